"""The params of csrc/attention.h for ctypes, and the memory that tests hand to kernels."""

import ctypes
import math
import mmap

import torch
from torch import Tensor


class View(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [(name, ctypes.c_int64) for name in ("stride_b", "stride_h", "stride_s")]


class Broadcast(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [(f"stride_{name}", ctypes.c_int64) for name in ("b", "h", "q", "k")]


class Bias(ctypes.Structure):
    _fields_ = [("view", Broadcast), ("type", ctypes.c_int)]


class Mask(ctypes.Structure):
    _fields_ = [
        ("causal", ctypes.c_bool),
        ("q_offset", ctypes.c_int64),
        ("q_offsets", ctypes.c_void_p),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("key_ranges", ctypes.c_void_p),
        ("key_ranges_stride_b", ctypes.c_int64),
        ("shown", Broadcast),
        ("mask_rows", ctypes.c_void_p),
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


class Packed(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")),
        *((name, ctypes.c_int64) for name in ("total_q", "total_k")),
        *((name, ctypes.c_void_p) for name in ("sequences", "default_offsets", "before")),
    ]


class Pages(ctypes.Structure):
    _fields_ = [("table", ctypes.c_void_p), ("stride", ctypes.c_int64), ("size", ctypes.c_int64)]


SIZES = ("batch", "num_heads_q", "num_heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")


class BackwardParams(ctypes.Structure):
    """``BackwardParams`` of attention.h, which begins with ``ForwardParams``."""

    _fields_ = (
        [(name, View) for name in ("q", "k", "v", "out")]
        + [(name, ctypes.c_void_p) for name in ("row_max", "row_sum", "lse")]
        + [(name, ctypes.c_int64) for name in SIZES]
        + [
            ("pairs", ctypes.c_double),
            ("softmax_scale", ctypes.c_double),
            ("packed", Packed),
            ("pages", Pages),
            ("mask", Mask),
            ("score", Score),
            ("dropout", Dropout),
        ]
        + [("workspace", ctypes.c_void_p), ("counts", ctypes.c_void_p)]
        + [(name, View) for name in ("dout", "dq", "dk", "dv")]
        + [("dlse", ctypes.c_void_p), ("dbias", Bias), ("dslopes", ctypes.c_void_p), ("dsinks", ctypes.c_void_p)]
        + [("part", ctypes.c_bool)]
    )


def view(t: Tensor) -> View:
    """The view of a tensor (batch, heads, tokens, columns), or packed (tokens, heads, columns)."""
    assert t.shape[-1] <= 1 or t.stride(-1) == 1
    return View(t.data_ptr(), *(t.stride()[:3] if t.dim() == 4 else (0, t.stride(1), t.stride(0))))


def before_a_wall(*sizes: int, dtype: torch.dtype) -> Tensor:
    """A tensor of NaN whose memory ends at a protected page: an access past its end kills the process."""
    page, count = mmap.PAGESIZE, math.prod(sizes)
    size = max(count * dtype.itemsize, 1)
    used = -(-size // page) * page
    memory = mmap.mmap(-1, used + page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin + used), page, 0) == 0
    if not count:
        return torch.empty(sizes, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=used - count * dtype.itemsize)
    return flat.fill_(torch.nan if dtype.is_floating_point else True).view(sizes)


def broadcast_view(t: Tensor) -> Broadcast:
    """The view of a tensor that broadcasts to four dimensions, aligned at the last one."""
    strides = [0] * (4 - t.dim()) + [t.stride(d) if t.shape[d] > 1 else 0 for d in range(t.dim())]
    return Broadcast(t.data_ptr(), *strides)


def bias_view(t: Tensor, dtype: torch.dtype) -> Bias:
    """The view of a bias; ``dtype`` is q's."""
    return Bias(broadcast_view(t), 1 if t.dtype == dtype else 2)
