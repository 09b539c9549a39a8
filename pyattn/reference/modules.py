"""The attention modules that people write from scratch, in plain PyTorch, every ``mask`` a buffer.

They follow S. Raschka, "Build a Large Language Model (From Scratch)", chapters 3 and 4, and the tutorials based on it.
Each specifies its namesake in :mod:`pyattn.nn`, whose docstring lists its arguments; ``masks`` are the ``key_ranges``,
``mask`` and ``bias`` of :func:`pyattn.reference.heads.attend`.
"""
# ruff: noqa: D101, D102

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pyattn.reference.heads import Masks, attend, future, merge, of_head, split


class SimplifiedSelfAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return attend(x, x, x, softmax_scale=1.0)[0]


class SelfAttention_v1(nn.Module):
    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.W_query: nn.Parameter = nn.Parameter(torch.rand(d_in, d_out))
        self.W_key: nn.Parameter = nn.Parameter(torch.rand(d_in, d_out))
        self.W_value: nn.Parameter = nn.Parameter(torch.rand(d_in, d_out))

    def forward(self, x: Tensor) -> Tensor:
        return attend(x @ self.W_query, x @ self.W_key, x @ self.W_value)[0]


class Projections(nn.Module):
    """The Linears from which most modules start."""

    def __init__(self, d_in: int, d_out: int, qkv_bias: bool) -> None:
        super().__init__()
        self.W_query: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.W_query(x), self.W_key(x), self.W_value(x)


class SelfAttention_v2(Projections):
    def __init__(self, d_in: int, d_out: int, qkv_bias: bool = False) -> None:
        super().__init__(d_in, d_out, qkv_bias)

    def forward(self, x: Tensor) -> Tensor:
        return attend(*self.project(x))[0]


SelfAttention = SelfAttention_v2


class CausalAttention(Projections):
    mask: Tensor

    def __init__(self, d_in: int, d_out: int, context_length: int, dropout: float, qkv_bias: bool = False) -> None:
        super().__init__(d_in, d_out, qkv_bias)
        self.dropout: nn.Dropout = nn.Dropout(dropout)
        self.register_buffer("mask", future(context_length))

    def forward(self, x: Tensor, **masks: Unpack[Masks]) -> Tensor:
        seqlen = x.shape[1]
        masked = self.mask.bool()[:seqlen, :seqlen]
        return attend(*self.project(x), masked=masked, **masks, dropout=self.dropout)[0]


class MultiHeadAttentionWrapper(nn.Module):
    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        self.heads: nn.ModuleList = nn.ModuleList(
            CausalAttention(d_in, d_out, context_length, dropout, qkv_bias) for _ in range(num_heads)
        )

    def forward(self, x: Tensor, **masks: Unpack[Masks]) -> Tensor:
        mask, bias = masks.get("mask"), masks.get("bias")
        own = [{**masks, "mask": of_head(mask, h), "bias": of_head(bias, h)} for h in range(len(self.heads))]
        outs = [head(x, **masks_of_head) for head, masks_of_head in zip(self.heads, own, strict=True)]
        return torch.cat(outs, dim=-1)


class SingleHeadSelfAttention(nn.Module):
    def __init__(self, d_model: int, d_k: int, dropout: float = 0.0, trace_shapes: bool = False) -> None:
        super().__init__()
        self.q: nn.Linear = nn.Linear(d_model, d_k, bias=False)
        self.k: nn.Linear = nn.Linear(d_model, d_k, bias=False)
        self.v: nn.Linear = nn.Linear(d_model, d_k, bias=False)
        self.dropout: nn.Dropout = nn.Dropout(dropout)
        self.trace_shapes = trace_shapes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.trace_shapes:
            print(f"q {q.shape}  k {k.shape}  v {v.shape}")
        out, weights = attend(q, k, v, masked=future(x.shape[1]).to(x.device).bool(), dropout=self.dropout)
        if self.trace_shapes:
            print(f"weights {weights.shape}  out {out.shape}")
        return out, weights


class Attention(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.W_q: nn.Linear = nn.Linear(embed_dim, embed_dim)
        self.W_k: nn.Linear = nn.Linear(embed_dim, embed_dim)
        self.W_v: nn.Linear = nn.Linear(embed_dim, embed_dim)
        self.W_o: nn.Linear = nn.Linear(embed_dim, embed_dim)
        self.dropout: nn.Dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, key_ranges: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        q, k, v = (split(project(x), self.num_heads) for project in (self.W_q, self.W_k, self.W_v))
        if mask is not None and mask.dim() == 3:
            mask = mask.unsqueeze(1)
        context, _ = attend(q, k, v, masked=mask, key_ranges=key_ranges, bias=bias, dropout=self.dropout)
        out: Tensor = self.W_o(merge(context))
        return out
