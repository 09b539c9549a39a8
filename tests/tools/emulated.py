"""The CUDA kernels without a GPU: their own source, compiled for this machine over the primitives of ``emulation/``."""

import ctypes
import functools
import os
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from once import built
from params import SIZES, BackwardParams, before_a_wall, bias_view, broadcast_view, view
from torch import Tensor

from pyattn import reference
from pyattn.options import LEARNED, Options, Packing
from pyattn.options.dropout import dropout_threshold
from pyattn.weights.max_score import of_heads, of_sequences, with_largest_scores

ROOT = Path(__file__).parents[2]
DTYPES = {torch.float64: "double", torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}
"""Names of the storage types, in the order of ``DType`` in storage.h."""


WARPGROUPS = ("f16",)
"""Names of the types that are multiplied as on compute capability 9.0; the other 16-bit type, as on the others."""


def units(dtypes: Iterable[torch.dtype]) -> list[tuple[str, str]]:
    """PYATTN_DTYPE and PYATTN_PACKED of each object of the kernels."""
    return [(DTYPES[dtype], packed) for dtype in dtypes for packed in ("false", "true")]


def defines(dtype: str, packed: str) -> list[str]:
    """The macros of an object."""
    macros = {"DTYPE": dtype, "PACKED": packed, "WARPGROUPS": int(dtype in WARPGROUPS)}
    return [f"-DPYATTN_{name}={value}" for name, value in macros.items()]


INCLUDES = ("-Icsrc", "-Itests/tools/emulation", "-DPYATTN_ISA=cuda", '-DPYATTN_ISA_HEADER="host.h"')
FLAGS = (
    "-std=c++20",
    "-O2",
    "-march=native",
    "-fPIC",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-Wno-psabi",
)
# -Wno-unknown-pragmas: g++ has no #pragma unroll. -Wno-psabi: vectors stay within one file.
SOURCES = tuple(f"tests/tools/emulation/{name}.cpp" for name in ("entry", "tensor_core", "threads"))
"""Sources of the library beside the kernels."""


def compile_kernels(
    root: Path, folder: Path, kernel_flags: Sequence[str] = (), *more: str, dtypes: Iterable[torch.dtype] = DTYPES
) -> Path:
    """The shared library of the kernels under ``root``, compiled with these flags too, and of ``more`` sources."""
    compiler = [os.environ.get("CXX", "c++"), *FLAGS, *INCLUDES]

    def build(unit: tuple[str, str]) -> str:
        dtype, packed = unit
        target = str(folder / f"{dtype}_{packed}.o")
        # Only float64 runs faster at -O2: others spend their time in tensor cores. -O1 takes 60 % of the compile time.
        level = "-O2" if dtype == "double" else "-O1"
        source = ["-Wno-unused-function", level, *kernel_flags, *defines(*unit), "-x", "c++", "csrc/cuda/kernels.cu"]
        subprocess.run([*compiler, *source, "-c", "-o", target], cwd=root, check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(build, units(dtypes)))
    library = folder / "emulated.so"
    subprocess.run([*compiler, "-shared", "-o", library, *SOURCES, *more, *objects], cwd=root, check=True)
    return library


def load(path: Path) -> ctypes.CDLL:
    kernels = ctypes.CDLL(str(path))
    for bytes_of in (kernels.params_bytes, kernels.forward_bytes, kernels.backward_bytes):
        bytes_of.restype = ctypes.c_int64
    kernels.forward.restype = kernels.backward.restype = ctypes.c_char_p
    assert kernels.params_bytes() == ctypes.sizeof(BackwardParams), "not the BackwardParams of attention.h"
    return kernels


@functools.cache
def library() -> ctypes.CDLL:
    return load(built("emulated", functools.partial(compile_kernels, ROOT)))


class Call:
    """The params of a call, and the tensors that they point into."""

    def __init__(self, qkv: Sequence[Tensor], learned: Sequence[Tensor | None], options: dict[str, Any]) -> None:
        q, k, v = qkv
        bias, slopes, sinks, relative = learned
        self.q, self.row_dtype = q, torch.promote_types(q.dtype, torch.float32)
        self.options, self.kept = options, [*qkv]
        self.p = p = BackwardParams(q=view(q), k=view(k), v=view(v))
        packing: Packing | None = options.get("packing")
        if packing is None:
            batch, seqlen_q, seqlen_k = q.shape[0], q.shape[2], k.shape[2]
        else:
            batch = len(packing.cu_seqlens_q) - 1
            seqlen_q, seqlen_k = min(packing.max_seqlen_q, len(q)), min(packing.max_seqlen_k, len(k))
            self.pack(packing, len(q), len(k))
        sizes = batch, q.shape[1], k.shape[1], seqlen_q, seqlen_k, q.shape[-1], v.shape[-1]
        for name, size in zip(SIZES, sizes, strict=True):
            setattr(p, name, size)
        scale, offset = options.get("softmax_scale"), options.get("q_offset")
        p.softmax_scale = reference.default_scale(q.shape[-1]) if scale is None else scale
        p.mask.causal, p.mask.num_ranges = options.get("causal", True), 1
        p.mask.window_left, p.mask.window_right = options.get("window") or (-1, -1)
        if isinstance(offset, Tensor):
            p.mask.q_offsets = self.address(offset)
        elif packing is not None and offset is None:
            p.mask.q_offsets = p.packed.default_offsets = self.address(before_a_wall(batch, dtype=torch.int64))
        else:
            p.mask.q_offset = seqlen_k - seqlen_q if offset is None else offset
        if (ranges := options.get("key_ranges")) is not None:
            rows = ranges if packing else ranges.expand(-1, seqlen_q, *ranges.shape[2:])  # as the operators do
            p.mask.key_ranges = self.address(rows.long().contiguous())
            p.mask.num_ranges = ranges.shape[-2] if ranges.dim() == q.dim() else 1
            p.mask.key_ranges_stride_b = 0 if packing or len(ranges) == 1 else 2 * p.mask.num_ranges * seqlen_q
        p.score.softcap, p.part = options.get("softcap", 0.0), options.get("part", False)
        if (mask := options.get("mask")) is not None:
            self.kept.append(mask)
            p.mask.shown = broadcast_view(mask)
        if bias is not None:
            self.kept.append(bias)
            p.score.bias = bias_view(bias, q.dtype)
        if slopes is not None:
            p.score.alibi_slopes = self.address(slopes.to(self.row_dtype))
            p.score.slopes_stride_b = q.shape[1] if slopes.dim() == 2 else 0
        if sinks is not None:
            p.score.sinks = self.address(sinks.to(self.row_dtype))
        if relative is not None:
            p.score.relative_bias = self.address(relative.to(self.row_dtype))
            heads, entries = relative.shape[-2:]
            p.score.reach, p.score.relative_stride_h = entries // 2, entries if heads > 1 else 0
            p.score.relative_stride_b = heads * entries if relative.dim() == 3 else 0
        if options.get("dropout_p"):
            p.dropout.threshold = dropout_threshold(options["dropout_p"])
            p.dropout.seed = options["dropout_seed"].data_ptr()
        if (origins := options.get("dropout_origins")) is not None:
            p.dropout.origins, p.dropout.origins_stride_b = self.address(origins), len(origins) > 1

    def pack(self, packing: Packing, total_q: int, total_k: int) -> None:
        packed = self.p.packed
        lengths = {"cu_seqlens_q": packing.cu_seqlens_q, "cu_seqlens_k": packing.cu_seqlens_k}
        if packing.seqused_k is not None:
            lengths["seqused_k"] = packing.seqused_k
        for name, t in lengths.items():
            setattr(packed, name, self.address(before_a_wall(*t.shape, dtype=torch.int64).copy_(t)))
        packed.total_q, packed.total_k = total_q, total_k
        packed.sequences = self.address(before_a_wall(len(packing.cu_seqlens_q), 4, dtype=torch.int64))

    def address(self, t: Tensor) -> int:
        """The address of the tensor, made dense and kept alive as long as the call."""
        self.kept.append(t.contiguous())
        return self.kept[-1].data_ptr()

    def set_workspace(self, size: int) -> None:
        memory = before_a_wall(-(-size // 16) * 4, dtype=torch.float32)  # starts at a multiple of 16 bytes
        self.p.workspace = self.address(memory)

    def forward(self, kernels: ctypes.CDLL, dtype: int) -> None:
        self.set_workspace(kernels.forward_bytes(dtype, ctypes.byref(self.p)))
        assert kernels.forward(dtype, ctypes.byref(self.p)) is None

    def backward(self, kernels: ctypes.CDLL, dtype: int) -> None:
        deterministic = ctypes.c_bool(self.options.get("deterministic", True))
        self.set_workspace(kernels.backward_bytes(dtype, ctypes.byref(self.p), deterministic))
        assert kernels.backward(dtype, ctypes.byref(self.p), deterministic) is None


class Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: ctypes.CDLL, options: dict[str, Any], *inputs: Tensor | None) -> tuple[Tensor, ...]:
        q, k, v, *learned = inputs
        call = Call((q, k, v), learned, options)
        rows = before_a_wall(3, *(q.shape[:3] if q.dim() == 4 else q.shape[1::-1]), dtype=call.row_dtype)
        out = before_a_wall(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
        call.p.out, (call.p.row_max, call.p.row_sum, call.p.lse) = view(out), (row.data_ptr() for row in rows)
        call.forward(kernels, list(DTYPES).index(q.dtype))
        ctx.save_for_backward(*inputs, out, rows)
        ctx.options, ctx.kernels = options, kernels
        ctx.set_materialize_grads(False)
        results = out, *(row.clone() for row in rows[[2, 0, 1]])
        ctx.mark_non_differentiable(*results[2:])
        return results

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        *inputs, out, rows = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        wanted = ctx.needs_input_grad[-4:]
        return None, None, *gradients(ctx.kernels, ctx.options, inputs, wanted, dout, dlse, out, rows[0], rows[1])


def gradients(
    kernels: ctypes.CDLL,
    options: dict[str, Any],
    inputs: Sequence[Tensor | None],
    wanted: Sequence[bool],
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and v, and those of bias, slopes, sinks and the relative bias that are wanted."""
    q, k, v, *learned = inputs
    call = Call((q, k, v), learned, options)
    p, bias = call.p, learned[0]
    dq, dk, dv = (before_a_wall(*t.shape, dtype=call.row_dtype if p.part else t.dtype) for t in (q, k, v))
    p.out, p.dout, p.dq, p.dk, p.dv = map(view, (out, dout, dq, dk, dv))
    p.row_max, p.row_sum = call.address(row_max), call.address(row_sum)
    p.dlse = None if dlse is None else call.address(dlse)
    dbias, *rows = (
        before_a_wall(*t.shape, dtype=t.dtype if t is bias else call.row_dtype) if w else None
        for t, w in zip(learned, wanted, strict=True)
    )
    if dbias is not None:
        p.dbias = bias_view(dbias, q.dtype)
    p.dslopes, p.dsinks, p.drelative = (None if t is None else t.data_ptr() for t in rows)
    call.backward(kernels, list(DTYPES).index(q.dtype))
    return dq, dk, dv, dbias, *(None if d is None else d.to(t.dtype) for d, t in zip(rows, learned[1:], strict=True))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    return_lse: bool = False,
    return_max_score: bool = False,
    kernels: ctypes.CDLL | None = None,
    **options: Any,
) -> Any:
    """``pyattn.attention`` on emulated kernels; ``deterministic=False`` adds up dQ atomically."""
    if isinstance(options.get("dropout_seed"), int):
        options["dropout_seed"] = torch.tensor(options["dropout_seed"])

    def attend(values: Sequence[Any]) -> tuple[Tensor, ...]:
        known = Options(*values)
        learned = (getattr(known, name) for name in LEARNED)
        return Emulated.apply(kernels or library(), options, q, k, v, *learned)

    known = Options(bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, relative_bias=relative_bias)
    if not return_max_score:
        out, lse, _, _ = attend(known)
        return (out, lse) if return_lse else out
    begins = options["packing"].cu_seqlens_q if "packing" in options else None
    out, lse, largest = with_largest_scores(attend, known, begins)
    most = of_heads(largest) if begins is None else of_sequences(largest, begins)
    return (out, lse, most) if return_lse else (out, most)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = None,
    **options: Any,
) -> Any:
    """``pyattn.attention_varlen`` on emulated kernels."""
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    return attention(q, k, v, packing=packing, **options)


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | tuple[Tensor, Tensor],
    *,
    dlse: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """``pyattn.parts.attention_backward`` on emulated kernels, whose gradients of q, k and v are not rounded."""
    row_max, row_sum = lse if isinstance(lse, tuple) else (lse, torch.ones_like(lse))
    learned = bias, alibi_slopes, sinks, relative_bias
    wanted = [t is not None and t.is_floating_point() for t in learned]
    options["part"] = True
    return gradients(library(), options, (q, k, v, *learned), wanted, dout, dlse, out, row_max, row_sum)
