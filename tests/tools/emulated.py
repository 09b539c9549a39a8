"""The CUDA kernels without a GPU: their own source, compiled for this machine over the primitives of ``emulation/``."""

import ctypes
import functools
import math
import mmap
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyattn import reference
from pyattn.dropout import dropout_threshold

ROOT = Path(__file__).parents[2]
DTYPES = {torch.float64: "double", torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}
"""Names of the storage types, in the order of ``DType`` in attention.h."""

INCLUDES = ("-Icsrc", "-Icsrc/cuda", "-Itests/tools/emulation", "-DPYATTN_ISA=cuda", '-DPYATTN_ISA_HEADER="host.h"')
FLAGS = ("-std=c++20", "-O2", "-march=native", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Wno-unknown-pragmas")
# g++ does not know #pragma unroll.
SOURCES = ("tests/tools/emulation/entry.cpp", "tests/tools/emulation/tensor_core.cpp")
"""Sources of the library beside the kernels."""


def compile_kernels(root: Path, folder: Path, kernel_flags: Sequence[str] = (), *more: str) -> Path:
    """The shared library of the kernels under ``root``, compiled with these flags too, and of ``more`` sources."""
    compiler = [os.environ.get("CXX", "c++"), *FLAGS, *INCLUDES]

    def build(dtype: str) -> str:
        target = str(folder / f"{dtype}.o")
        source = ["-Wno-unused-function", *kernel_flags, f"-DPYATTN_DTYPE={dtype}", "-x", "c++", "csrc/cuda/kernels.cu"]
        subprocess.run([*compiler, *source, "-c", "-o", target], cwd=root, check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(build, DTYPES.values()))
    library = folder / "emulated.so"
    subprocess.run([*compiler, "-shared", "-o", library, *SOURCES, *more, *objects], cwd=root, check=True)
    return library


class View(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [(name, ctypes.c_int64) for name in ("stride_b", "stride_h", "stride_s")]


class Bias(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("data", ctypes.c_void_p)] + [
        (f"stride_{name}", ctypes.c_int64) for name in ("b", "h", "q", "k")
    ]


class Mask(ctypes.Structure):
    _fields_ = [
        ("causal", ctypes.c_bool),
        ("q_offset", ctypes.c_int64),
        ("q_offsets", ctypes.c_void_p),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("key_ranges", ctypes.c_void_p),
        ("key_ranges_stride_b", ctypes.c_int64),
        ("bias_rows", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
    ]


class Score(ctypes.Structure):
    _fields_ = [
        ("softcap", ctypes.c_double),
        ("bias", Bias),
        ("alibi_slopes", ctypes.c_void_p),
        ("slopes_stride_b", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
    ]


class Dropout(ctypes.Structure):
    _fields_ = [("threshold", ctypes.c_uint32), ("seed", ctypes.c_void_p)]


SIZES = ("batch", "num_heads_q", "num_heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")


class BackwardParams(ctypes.Structure):
    """``BackwardParams`` of attention.h, whose beginning is ``ForwardParams``."""

    _fields_ = (
        [(name, View) for name in ("q", "k", "v", "out")]
        + [(name, ctypes.c_void_p) for name in ("row_max", "row_sum", "lse")]
        + [(name, ctypes.c_int64) for name in SIZES]
        + [("softmax_scale", ctypes.c_double), ("mask", Mask), ("score", Score), ("dropout", Dropout)]
        + [("workspace", ctypes.c_void_p), ("counts", ctypes.c_void_p)]
        + [(name, View) for name in ("dout", "dq", "dk", "dv")]
        + [("dlse", ctypes.c_void_p), ("dbias", Bias), ("dslopes", ctypes.c_void_p), ("dsinks", ctypes.c_void_p)]
    )


def view(t: Tensor) -> View:
    assert t.shape[3] <= 1 or t.stride(3) == 1
    return View(t.data_ptr(), *t.stride()[:3])


def before_a_wall(*sizes: int, dtype: torch.dtype) -> Tensor:
    """NaN in memory after whose end nothing may be read or written: that ends the process."""
    page, count = mmap.PAGESIZE, math.prod(sizes)
    size = max(count * dtype.itemsize, 1)
    used = -(-size // page) * page
    memory = mmap.mmap(-1, used + page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin + used), page, 0) == 0
    if not count:
        return torch.empty(sizes, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=used - count * dtype.itemsize)
    return flat.fill_(torch.nan).view(sizes)


def load(path: Path) -> ctypes.CDLL:
    kernels = ctypes.CDLL(str(path))
    kernels.params_bytes.restype = kernels.workspace_bytes.restype = ctypes.c_int64
    kernels.forward.restype = kernels.backward.restype = ctypes.c_char_p
    assert kernels.params_bytes() == ctypes.sizeof(BackwardParams), "not the BackwardParams of attention.h"
    return kernels


@functools.cache
def library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        return load(compile_kernels(ROOT, Path(folder)))


def _params(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> BackwardParams:
    p = BackwardParams(q=view(q), k=view(k), v=view(v))
    for name, size in zip(
        SIZES, (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]), strict=True
    ):
        setattr(p, name, size)
    scale, offset = options.get("softmax_scale"), options.get("q_offset")
    p.softmax_scale = reference.default_scale(q.shape[3]) if scale is None else scale
    p.mask.causal = options.get("causal", True)
    p.mask.window_left, p.mask.window_right = options.get("window", (-1, -1))
    if isinstance(offset, Tensor):
        p.mask.q_offsets = offset.data_ptr()
    else:
        p.mask.q_offset = k.shape[2] - q.shape[2] if offset is None else offset
    if options.get("dropout_p"):
        p.dropout.threshold = dropout_threshold(options["dropout_p"])
        p.dropout.seed = options["dropout_seed"].data_ptr()
    return p


class Emulated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], kernels: ctypes.CDLL
    ) -> tuple[Tensor, Tensor]:
        rows = before_a_wall(3, *q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        out = before_a_wall(*q.shape[:3], v.shape[3], dtype=q.dtype)
        p = _params(q, k, v, options)
        p.out, (p.row_max, p.row_sum, p.lse) = view(out), (row.data_ptr() for row in rows)
        assert kernels.forward(list(DTYPES).index(q.dtype), ctypes.byref(p)) is None
        ctx.save_for_backward(q, k, v, out, rows)
        ctx.options, ctx.kernels = options, kernels
        ctx.set_materialize_grads(False)
        return out, rows[2].clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, rows = ctx.saved_tensors
        dq, dk, dv = (before_a_wall(*t.shape, dtype=t.dtype) for t in (q, k, v))
        dout = torch.zeros_like(out) if dout is None else dout
        p = _params(q, k, v, ctx.options)
        p.out, p.dout, p.dq, p.dk, p.dv = map(view, (out, dout, dq, dk, dv))
        p.row_max, p.row_sum, p.dlse = rows[0].data_ptr(), rows[1].data_ptr(), None
        if dlse is not None:
            dlse = dlse.contiguous()
            p.dlse = dlse.data_ptr()
        kernels, dtype = ctx.kernels, list(DTYPES).index(q.dtype)
        deterministic = ctypes.c_bool(ctx.options.get("deterministic", True))
        workspace_bytes = kernels.workspace_bytes(dtype, ctypes.byref(p), deterministic)
        workspace = before_a_wall(
            -(-workspace_bytes // 16) * 4, dtype=torch.float32
        )  # begins at a multiple of 16 bytes
        p.workspace = workspace.data_ptr()
        assert kernels.backward(dtype, ctypes.byref(p), deterministic) is None
        return dq, dk, dv, None, None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    kernels: ctypes.CDLL | None = None,
    **options: Any,
) -> Any:
    """``pyattn.attention`` of emulated kernels; ``deterministic=False``: dQ added up atomically."""
    if isinstance(options.get("dropout_seed"), int):
        options["dropout_seed"] = torch.tensor(options["dropout_seed"])
    out, lse = Emulated.apply(q, k, v, options, kernels or library())
    return (out, lse) if return_lse else out
