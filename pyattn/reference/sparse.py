"""Multi-head attention over the keys that a lightning indexer selects, in plain PyTorch.

Each class specifies its namesake in :mod:`pyattn.nn.book`.
"""
# ruff: noqa: D101

import math

import torch
from torch import Tensor, nn

from pyattn.reference.selection import index_scores


class LightningIndexer(nn.Module):
    def __init__(self, d_model: int, index_n_heads: int, index_head_dim: int) -> None:
        super().__init__()
        self.sizes: tuple[int, int] = (index_n_heads, index_head_dim)
        self.W_q_index: nn.Linear = nn.Linear(d_model, index_n_heads * index_head_dim, bias=False)
        self.W_k_index: nn.Linear = nn.Linear(d_model, index_head_dim, bias=False)
        self.W_weights: nn.Linear = nn.Linear(d_model, index_n_heads, bias=False)

    def forward(self, x: Tensor, x_ctx: Tensor, topk: int, causal_mask: Tensor | None = None) -> Tensor:
        """(B, T, min(topk, S)): the keys with the largest scores."""
        heads, columns = self.sizes
        q = self.W_q_index(x).unflatten(-1, self.sizes).transpose(1, 2) / math.sqrt(columns)
        scores = index_scores(q, self.W_k_index(x_ctx), self.W_weights(x).mT / math.sqrt(heads))
        scores = scores if causal_mask is None else scores + causal_mask
        return scores.topk(min(topk, x_ctx.shape[1]), dim=-1).indices


class MultiHeadAttentionWithDSA(nn.Module):
    def __init__(
        self,
        d_in: int,
        d_out: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        index_n_heads: int = 4,
        index_head_dim: int = 64,
        topk: int = 64,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.topk = topk
        self.W_query: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj: nn.Linear = nn.Linear(d_out, d_out)
        self.dropout: nn.Dropout = nn.Dropout(dropout)
        self.indexer: LightningIndexer = LightningIndexer(d_in, index_n_heads, index_head_dim)

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        """out of the tokens x (B, T, d_in), after those of ``past`` (B, before, d_in)."""
        context = x if past is None else torch.cat([past, x], 1)
        seqlen, keys = x.shape[1], context.shape[1]
        hidden = torch.ones(seqlen, keys, dtype=torch.bool).triu(keys - seqlen + 1)
        causal = torch.zeros(seqlen, keys, dtype=x.dtype).masked_fill(hidden, -math.inf)
        chosen = self.indexer(x, context, self.topk, causal)
        mask = causal + torch.full((len(x), seqlen, keys), -math.inf, dtype=x.dtype).scatter(-1, chosen, 0.0)
        q, k, v = (
            layer(t).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, t in ((self.W_query, x), (self.W_key, context), (self.W_value, context))
        )
        weights = torch.softmax((q @ k.mT + mask[:, None]) / math.sqrt(q.shape[-1]), -1)
        out: Tensor = self.out_proj((self.dropout(weights) @ v).transpose(1, 2).flatten(2))
        return out
