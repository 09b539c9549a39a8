"""Multi-head and grouped-query attention in plain PyTorch, with the caches of the book's chapter 4.

Each specifies its namesake in :mod:`pyattn.nn`, as the classes of :mod:`pyattn.reference.modules` do. A cache is the
concatenation of all keys and values so far; a window masks what it does not see.
"""
# ruff: noqa: D101, D102

from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pyattn.reference.heads import Masks, attend, future, merge, rms_norm, split, turn

Tables = tuple[Tensor, Tensor]


class CachedHeads(nn.Module):
    """Causal heads over W_query, W_key, W_value and out_proj, which a subclass makes."""

    W_query: nn.Linear
    W_key: nn.Linear
    W_value: nn.Linear
    out_proj: nn.Linear
    dropout: nn.Dropout
    mask: Tensor | None
    cache_k: Tensor | None = None
    cache_v: Tensor | None = None
    window_size: int | None = None
    softmax_scale: float | None = None
    rotary_interleaved: bool = False
    qk_norm: bool | Literal["all_heads"] = False

    def set_norms(self, num_heads: int, num_heads_kv: int, head_dim: int, qk_norm: bool | Literal["all_heads"]) -> None:
        self.head_dim = head_dim
        self.qk_norm = qk_norm
        if qk_norm:
            heads, heads_kv = (num_heads, num_heads_kv) if qk_norm == "all_heads" else (1, 1)
            self.q_norm: nn.RMSNorm = nn.RMSNorm(heads * head_dim, eps=1e-6, dtype=self.W_query.weight.dtype)
            self.k_norm: nn.RMSNorm = nn.RMSNorm(heads_kv * head_dim, eps=1e-6, dtype=self.W_query.weight.dtype)

    def reset_cache(self) -> None:
        self.cache_k = self.cache_v = None

    def queries_and_keys(self, x: Tensor, past: int, tables: Tables | None) -> tuple[Tensor, Tensor]:
        """(B, heads, T, head_dim) of the tokens at positions from ``past`` on: normed, then turned."""
        q, k = self.W_query(x), self.W_key(x)
        if self.qk_norm == "all_heads":
            q, k = rms_norm(self.q_norm, q), rms_norm(self.k_norm, k)
        q, k = (split(t, t.shape[-1] // self.head_dim) for t in (q, k))
        if self.qk_norm is True:
            q, k = rms_norm(self.q_norm, q), rms_norm(self.k_norm, k)
        if tables is not None:
            cos, sin = (t[past : past + x.shape[1]] if t.dim() == 2 else t for t in tables)
            q, k = (turn(t, cos, sin, self.rotary_interleaved) for t in (q, k))
        return q, k

    def heads(self, x: Tensor, use_cache: bool, tables: Tables | None, masks: Masks) -> Tensor:
        """The heads' results side by side, (B, T, num_heads * head_dim)."""
        if not use_cache:
            self.reset_cache()
        past = 0 if self.cache_k is None else self.cache_k.shape[2]
        q, k = self.queries_and_keys(x, past, tables)
        v = split(self.W_value(x), k.shape[1])
        if use_cache:
            k = k if self.cache_k is None else torch.cat([self.cache_k, k], dim=2)
            v = v if self.cache_v is None else torch.cat([self.cache_v, v], dim=2)
            self.cache_k, self.cache_v = k, v
        seqlen = k.shape[2]
        masked = future(seqlen).bool() if self.mask is None else self.mask.bool()[:seqlen, :seqlen]
        if self.window_size is not None:
            masked = masked | torch.ones_like(masked).tril(-self.window_size)
        masked = masked[past:].to(x.device)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        options = {"masked": masked, "dropout": self.dropout, "softmax_scale": self.softmax_scale}
        return merge(attend(q, k, v, **options, **masks)[0])  # type: ignore[arg-type]


class MultiHeadAttention(CachedHeads):
    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        max_seq_len: int | None = None,
        window_size: int | None = None,
        *,
        head_dim: int | None = None,
        qk_norm: bool | Literal["all_heads"] = False,
        softmax_scale: float | None = None,
        rotary_interleaved: bool = False,
    ) -> None:
        super().__init__()
        width, columns = (d_out, d_out) if head_dim is None else (num_heads * head_dim, d_in)
        self.W_query: nn.Linear = nn.Linear(d_in, width, bias=qkv_bias)
        self.W_key: nn.Linear = nn.Linear(d_in, width, bias=qkv_bias)
        self.W_value: nn.Linear = nn.Linear(d_in, width, bias=qkv_bias)
        self.num_heads = num_heads
        self.out_proj: nn.Linear = nn.Linear(width, columns)
        self.dropout: nn.Dropout = nn.Dropout(dropout)
        self.register_buffer("mask", future(context_length) if max_seq_len is None and window_size is None else None)
        self.window_size: int | None = window_size
        self.softmax_scale: float | None = softmax_scale
        self.rotary_interleaved: bool = rotary_interleaved
        self.set_norms(num_heads, num_heads, width // num_heads, qk_norm)

    def forward(
        self, x: Tensor, use_cache: bool = False, *, position_embeddings: Tables | None = None, **masks: Unpack[Masks]
    ) -> Tensor:
        out: Tensor = self.out_proj(self.heads(x, use_cache, position_embeddings, masks))
        return out


class GroupedQueryAttention(CachedHeads):
    def __init__(
        self,
        d_in: int,
        d_out: int,
        dropout: float,
        num_heads: int,
        num_kv_groups: int,
        dtype: torch.dtype | None = None,
        qkv_bias: bool = False,
        *,
        head_dim: int | None = None,
        qk_norm: bool | Literal["all_heads"] = False,
        softmax_scale: float | None = None,
        rotary_interleaved: bool = False,
    ) -> None:
        super().__init__()
        width, columns = (d_out, d_out) if head_dim is None else (num_heads * head_dim, d_in)
        width_kv = num_kv_groups * (width // num_heads)
        self.W_key: nn.Linear = nn.Linear(d_in, width_kv, bias=qkv_bias, dtype=dtype)
        self.W_value: nn.Linear = nn.Linear(d_in, width_kv, bias=qkv_bias, dtype=dtype)
        self.num_kv_groups = num_kv_groups
        self.mask: Tensor | None = None
        self.W_query: nn.Linear = nn.Linear(d_in, width, bias=qkv_bias, dtype=dtype)
        self.out_proj: nn.Linear = nn.Linear(width, columns, bias=False, dtype=dtype)
        self.dropout: nn.Dropout = nn.Dropout(dropout)
        self.softmax_scale: float | None = softmax_scale
        self.rotary_interleaved: bool = rotary_interleaved
        self.set_norms(num_heads, num_kv_groups, width // num_heads, qk_norm)

    def forward(
        self, x: Tensor, use_cache: bool = False, *, position_embeddings: Tables | None = None, **masks: Unpack[Masks]
    ) -> Tensor:
        out: Tensor = self.out_proj(self.heads(x, use_cache, position_embeddings, masks))
        return out
