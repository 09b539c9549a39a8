"""The params of csrc/attention.h for ctypes, and the memory that tests hand to kernels."""

import ctypes
import math
import mmap
from functools import partial

import torch
from torch import Tensor

Fields = list[tuple[str, type]]
SIZES = ("batch", "num_heads_q", "num_heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")


def of(kind: type, *names: str) -> Fields:
    """Fields of one type."""
    return [(name, kind) for name in names]


pointers, integers, doubles = partial(of, ctypes.c_void_p), partial(of, ctypes.c_int64), partial(of, ctypes.c_double)


class View(ctypes.Structure):
    _fields_ = pointers("data") + integers("stride_b", "stride_h", "stride_s")


class Broadcast(ctypes.Structure):
    _fields_ = pointers("data") + integers("stride_b", "stride_h", "stride_q", "stride_k")


class Bias(ctypes.Structure):
    _fields_ = of(Broadcast, "view") + of(ctypes.c_int, "type")


class Mask(ctypes.Structure):
    _fields_ = [
        *of(ctypes.c_bool, "causal"),
        *integers("q_offset"),
        *pointers("q_offsets"),
        *integers("window_left", "window_right"),
        *pointers("key_ranges"),
        *integers("key_ranges_stride_b", "num_ranges"),
        *of(Broadcast, "shown"),
        *pointers("mask_rows", "bias_rows", "blocks"),
    ]


class Score(ctypes.Structure):
    _fields_ = [
        *doubles("softcap"),
        *of(Bias, "bias"),
        *pointers("alibi_slopes"),
        *integers("slopes_stride_b"),
        *pointers("relative_bias"),
        *integers("reach", "relative_stride_b", "relative_stride_h"),
        *pointers("sinks"),
    ]


class Dropout(ctypes.Structure):
    _fields_ = of(ctypes.c_uint32, "threshold") + pointers("seed", "origins") + integers("origins_stride_b")


class Packed(ctypes.Structure):
    _fields_ = [
        *pointers("cu_seqlens_q", "cu_seqlens_k", "seqused_k"),
        *integers("total_q", "total_k"),
        *pointers("sequences", "default_offsets"),
    ]


class Pages(ctypes.Structure):
    _fields_ = pointers("table") + integers("stride", "size")


class Selected(ctypes.Structure):
    _fields_ = [
        *pointers("entries"),
        *integers("stride_b", "stride_h", "ranges_stride_h", "count", "block", "keys", "sharing"),
        *of(ctypes.c_bool, "bias_masks_none"),
    ]


class Scale(ctypes.Structure):
    _fields_ = pointers("data") + integers("stride_b", "stride_h", "stride_s")


class Bytes(ctypes.Structure):
    _fields_ = of(ctypes.c_int, "type") + of(Scale, "scale_k", "scale_v")


class Cpu(ctypes.Structure):
    _fields_ = [
        *of(Pages, "pages"),
        *of(Selected, "selected"),
        *of(Bytes, "bytes"),
        *pointers("before"),
        *doubles("pairs"),
        *of(ctypes.c_bool, "row_invariant"),
        *pointers("counts"),
    ]


class BackwardParams(ctypes.Structure):
    """``BackwardParams`` of attention.h, which begins with ``ForwardParams``."""

    _fields_ = [
        *of(View, "q", "k", "v", "out"),
        *pointers("row_max", "row_sum", "lse"),
        *integers(*SIZES),
        *doubles("softmax_scale"),
        *of(Packed, "packed"),
        *of(Mask, "mask"),
        *of(Score, "score"),
        *of(Dropout, "dropout"),
        *pointers("workspace"),
        *of(Cpu, "cpu"),
        *of(View, "dout", "dq", "dk", "dv"),
        *pointers("dlse"),
        *of(Bias, "dbias"),
        *pointers("dslopes", "dsinks", "drelative"),
        *of(ctypes.c_bool, "part"),
    ]


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
