"""Models with attention written out by hand, for the tests of pyattn.adapters.scratch."""

import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """The book's, chapter 3."""

    def __init__(self, d: int, context: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.W_query, self.W_key, self.W_value = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.out_proj = nn.Linear(d, d)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.triu(torch.ones(context, context), diagonal=1))

    def forward(self, x):
        b, t, d = x.shape
        linears = (self.W_query, self.W_key, self.W_value)
        q, k, v = (linear(x).view(b, t, self.num_heads, -1).transpose(1, 2) for linear in linears)
        scores = q @ k.transpose(2, 3)
        scores.masked_fill_(self.mask.bool()[:t, :t], -torch.inf)
        weights = self.dropout(torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1))
        return self.out_proj(self.read(weights, v).transpose(1, 2).reshape(b, t, d))

    def read(self, weights, v):
        return weights @ v


class Keeping(Attention):
    """As the Annotated Transformer does."""

    def read(self, weights, v):
        self.weights = weights
        return weights @ v


class Clamping(Attention):
    def read(self, weights, v):
        return weights.clamp(0, 0.5) @ v


class Scores(nn.Module):
    def forward(self, q, k):
        return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


class InParts(nn.Module):
    """Scores in a separate module."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = Scores()

    def forward(self, x):
        return self.scores(x, x).softmax(-1) @ x


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.norm = nn.LayerNorm(16)
        self.ff = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.ff(x)


class Model(nn.Module):
    def __init__(self, kind=Attention, reentrant: bool | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(kind(16, 8, 4, dropout)) for _ in range(2))
        self.reentrant = reentrant
        self.double()

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x
