"""Jagged nested tensors (B, heads, j, head_dim): :func:`pyattn.attention` computes them as packed sequences.

The values of a jagged tensor are packed already and its offsets are cu_seqlens, so nothing is copied or padded,
unless the tensor has holes: then its tokens are gathered.
"""

from typing import Any

from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from pyattn.attention import attention
from pyattn.jagged.layout import (
    POSITIONS,
    check_jagged,
    check_same,
    checked_qk,
    like,
    longest,
    packed,
    packed_ranges,
    without_holes,
)
from pyattn.options.parse import check_known
from pyattn.options.tensor_types import TAKERS
from pyattn.varlen import attention_varlen


def _max_seqlen(tensor: Any) -> int:
    """An upper bound on the lengths. Only a GPU's speed depends on it; the host reads the longest length there."""
    count: int = longest(tensor) if tensor.is_cuda else tensor.values().shape[POSITIONS - 1]
    return count


def _attention(
    q: Any, k: Any, v: Any, *, return_lse: bool, return_max_score: bool, **options: Any
) -> Tensor | tuple[Tensor, ...]:
    """:func:`pyattn.attention` over jagged tensors; ``out`` and lse are jagged, max_score is (B, Hq)."""
    check_known(attention, options)
    q, k = checked_qk(q, k)
    check_jagged("v", v, 4, POSITIONS, "(batch, heads, j, head_dim)")
    v = without_holes("v", v)
    check_same("v", v, "k", k)
    options["key_ranges"] = packed_ranges(options.get("key_ranges"), q)
    tensors = packed(q), packed(k), packed(v), q.offsets(), k.offsets()
    out, lse, *most = attention_varlen(
        *tensors, _max_seqlen(q), _max_seqlen(k), return_lse=True, return_max_score=return_max_score, **options
    )
    result = like(out.transpose(0, 1), q)
    if return_lse:
        return result, like(lse, q), *most
    return (result, *most) if most else result


TAKERS.setdefault(NestedTensor, {})["attention"] = _attention
