"""Made by tests/tools/stub.py from the package and pyattn/options.py."""

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from pyattn import masks as masks
from pyattn import nn as nn
from pyattn import parts as parts
from pyattn import relative_bias as relative_bias
from pyattn.cache import KVCache as KVCache
from pyattn.derivatives.autograd import set_deterministic as set_deterministic
from pyattn.dropout import dropout_mask as dropout_mask
from pyattn.instruction_sets import isa as isa
from pyattn.instruction_sets import isas as isas
from pyattn.instruction_sets import set_isa as set_isa
from pyattn.options import AttentionOptions as AttentionOptions

__version__: str
__all__ = [
    "AttentionOptions",
    "KVCache",
    "__version__",
    "attention",
    "attention_varlen",
    "attention_weights",
    "attention_with_cache",
    "dropout_mask",
    "isa",
    "isas",
    "masks",
    "nn",
    "parts",
    "relative_bias",
    "set_deterministic",
    "set_isa",
]

@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    window: tuple[int, int] | None = (-1, -1),
    key_ranges: Tensor | None = None,
    mask: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout_p: float | None = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    window: tuple[int, int] | None = (-1, -1),
    key_ranges: Tensor | None = None,
    mask: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout_p: float | None = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    window: tuple[int, int] | None = (-1, -1),
    key_ranges: Tensor | None = None,
    mask: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout_p: float | None = 0.0,
    dropout_seed: int | Tensor | None = None,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    window: tuple[int, int] | None = (-1, -1),
    key_ranges: Tensor | None = None,
    mask: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout_p: float | None = 0.0,
    dropout_seed: int | Tensor | None = None,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    window: tuple[int, int] | None = (-1, -1),
    key_ranges: Tensor | None = None,
    mask: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout_p: float | None = 0.0,
    dropout_seed: int | Tensor | None = None,
    lse: Tensor | None = None,
    heads: Sequence[int] | Tensor | None = None,
    rows: Sequence[int] | Tensor | None = None,
) -> Tensor: ...
@overload
def attention_with_cache(
    q: Tensor,
    cache: KVCache,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    window: tuple[int, int] | None = (-1, -1),
    key_ranges: Tensor | None = None,
    mask: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout_p: float | None = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attention_with_cache(
    q: Tensor,
    cache: KVCache,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    window: tuple[int, int] | None = (-1, -1),
    key_ranges: Tensor | None = None,
    mask: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout_p: float | None = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
