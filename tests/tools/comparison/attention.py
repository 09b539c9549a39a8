"""Forward and training of attention: every way to compute it, each at its best configuration."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

import pyattn
from comparison import runtimes
from pyattn.cli.bench.sides.calls import Side

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """Sizes of a layer's attention.

    Attributes:
        name: a model that has such a layer.
        heads, heads_kv: of q, and of k and v.
        queries: how many of the last tokens.
    """

    name: str
    batch: int
    heads: int
    heads_kv: int
    queries: int
    tokens: int
    head_dim: int
    causal: bool

    def described(self) -> str:
        """The sizes in words."""
        heads = f"{self.heads} heads" if self.heads == self.heads_kv else f"{self.heads} heads over {self.heads_kv}"
        what = f"{self.tokens} tokens" if self.queries == self.tokens else f"one token over {self.tokens}"
        rule = "causal" if self.causal else "no mask"
        return f"batch {self.batch}, {heads} of {self.head_dim}, {what}, {rule}"


LAYERS = (
    Shape("GPT-2 small", 2, 12, 12, 1024, 1024, 64, True),
    Shape("ViT-B/16", 8, 12, 12, 197, 197, 64, False),
    Shape("Llama, grouped heads", 1, 16, 4, 1024, 1024, 128, True),
    Shape("long context", 1, 2, 2, 4096, 4096, 64, True),
)
TOKENS = (
    Shape("GPT-2 small, a token", 8, 12, 12, 1, 1024, 64, False),
    Shape("Llama, a token", 1, 32, 8, 1, 8192, 128, False),
)
"""The last token sees all others, so it needs no mask."""


def written_out(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """The formula; the query heads of a group are further queries, so k and v are not repeated.

    ``hidden`` (queries of a group, T) is True where a query must not see a key.
    """
    queries = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    scores = queries @ k.mT * q.shape[-1] ** -0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).view(q.shape)


def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's SDPA of one token: the heads of a group are its queries, which is faster than ``enable_gqa``."""
    queries = q.view(q.shape[0], k.shape[1], -1, q.shape[3])
    return functional.scaled_dot_product_attention(queries, k, v).view(q.shape)


def _flex(shape: Shape, grouped: bool) -> Function:
    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i

    blocks = None
    if shape.causal:
        blocks = flex.create_block_mask(mask, None, None, shape.queries, shape.tokens, device="cpu")
    return torch.compile(partial(flex.flex_attention, block_mask=blocks, enable_gqa=grouped), dynamic=False)


def functions(shape: Shape) -> dict[str, Function]:
    """The functions by side, all for q, k, v of this shape; the first is ours."""
    grouped = shape.heads != shape.heads_kv
    sdpa: Function = folded
    if shape.queries > 1:
        sdpa = partial(functional.scaled_dot_product_attention, is_causal=shape.causal, enable_gqa=grouped)
    hidden = None
    if shape.causal:
        hidden = torch.ones(shape.queries, shape.tokens, dtype=torch.bool).triu(1)
        hidden = hidden.repeat(shape.heads // shape.heads_kv, 1)
    return {
        "pyattn": partial(pyattn.attention, causal=shape.causal),
        "torch SDPA": sdpa,
        "torch SDPA, compiled": torch.compile(sdpa, dynamic=False),
        "written out, compiled": torch.compile(partial(written_out, hidden=hidden), dynamic=False),
        "FlexAttention, compiled": _flex(shape, grouped),
    }


FORWARD_ONLY = ("FlexAttention, compiled",)
"""Sides without a backward on a CPU."""


class Contest(NamedTuple):
    """The calls of each side: forward, which returns out, and the gradients of the sides that have any."""

    forwards: dict[str, Callable[[], Any]]
    trainings: Mapping[str, Callable[[], Any]]


def contest(shape: Shape, dtype: torch.dtype) -> Contest:
    """All sides at this shape; with few queries, as over a cache, forward alone."""
    torch.manual_seed(0)
    q = torch.randn(shape.batch, shape.heads, shape.queries, shape.head_dim, dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(shape.batch, shape.heads_kv, shape.tokens, shape.head_dim, dtype=dtype, requires_grad=True)
        for _ in range(2)
    )
    dout = torch.randn_like(q)
    # A compiled function keeps a graph with and one without gradients, and each side's are made for this shape.
    sides = {name: Side(function, (q, k, v), dout) for name, function in functions(shape).items()}
    forwards: dict[str, Callable[[], Any]] = {name: side.forward for name, side in sides.items()}
    trained = shape.queries == shape.tokens
    forwards |= runtimes.forwards(q.detach(), k.detach(), v.detach(), shape.causal)
    trainings = {name: side.gradients for name, side in sides.items() if trained and name not in FORWARD_ONLY}
    return Contest(forwards, trainings)
