"""Attention under any score_mod for a block of query rows and the keys visible to them.

In the notation of :mod:`pyattn.derivatives.block`, with f the score_mod and g its gradient by autograd::

    a = scale q k^T                          dP = dout v^T
    s = f(a, b, h, i, j)                     dS = P (dP - rowsum(P dP) + dlse)
    lse = log(rowsum(exp(s)))                dA, dcaptured = g(dS)
    P = exp(s - lse)                         dq = scale dA k,  dk = scale dA^T q
    out = P v                                dv = P^T dout

A score of -inf masks its pair, whether the mask or the score_mod says so.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyattn.adapters.flex.masks.dense_mask import Holes
from pyattn.adapters.flex.native_forms import ScoreMod
from pyattn.adapters.flex.trace.evaluation import Lookups, over_pairs
from pyattn.adapters.flex.trace.trace import Trace
from pyattn.derivatives.grouped_products import products, sum_over_visible_keys, sum_over_visible_rows
from pyattn.masks.key_ranges import by_interval

ROWS = 128
"""Most query rows of a block: enough for matrix products to run at full speed, few beside a causal mask's edge."""

PAIRS = 2**18
"""Most pairs of a block with several heads or rows: about ten temporaries of 1 MB in float32, which fit in a cache."""


class ScoredCall(NamedTuple):
    """All that the blocks of a call share.

    Attributes:
        captured: the tensors that the score_mod reads from outside and that require a gradient.
        traces: of the score_mod, and of holes that are evaluated again in each derivative.
        ranges: the visible keys, as key_ranges (B or 1, Sq, 2) or (B or 1, Sq, n, 2).
        holes: further masks.
    """

    score_mod: ScoreMod
    captured: Sequence[Tensor]
    ranges: Tensor
    holes: Sequence[Holes]
    scale: float
    traces: Sequence[Trace]

    def check(self) -> None:
        """RuntimeError if a mod that is called again computes something else now."""
        for trace in self.traces:
            trace.check()

    def read(self) -> list[Tensor]:
        """``captured``, then the tensors without a copy that derivatives read again, for autograd to save."""
        return [*self.captured, *(x for trace in self.traces for x in trace.saved())]


class Block:
    """Some query rows of some heads and sequences, with the keys visible to any of them.

    Attributes:
        queries: where in tensors (B, Hq, Sq, ...) the rows are.
        places: where the block's parts of dout, dlse, q, k and v are.
        visible: bool, the mask; it broadcasts to (sequences, query heads, rows, keys).

    Args:
        keys: where in tensors (B, Hkv, Sk, ...) the keys are.
        sizes: (B, Hq, Sq, Sk).
    """

    queries: tuple[slice, ...]
    places: list[tuple[Any, ...]]
    visible: Tensor

    def __init__(
        self,
        call: ScoredCall,
        queries: tuple[slice, ...],
        keys: tuple[Any, ...],
        visible: Tensor,
        sizes: tuple[int, ...],
    ) -> None:
        self._call, self.queries, self.visible = call, queries, visible
        self.places = [queries] * 3 + [keys] * 2
        places = zip(sizes, (*queries, keys[2]), strict=True)
        self._indices = [torch.arange(size, device=visible.device)[place] for size, place in places]

    def parts(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The block's part of each of dout, dlse, q, k and v, or of the last of them."""
        return [x[place] for x, place in zip(inputs, self.places[-len(inputs) :], strict=True)]

    def forward(self, inputs: Sequence[Tensor], captured: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """out and lse of the rows, from q, k and v."""
        q, k, v = inputs
        scores = self._changed(self._products(q, k), captured)
        weights, lse = _softmax(scores)
        return sum_over_visible_keys(weights, v, scores != -math.inf), lse

    def backward(
        self, inputs: Sequence[Tensor], captured: Sequence[Tensor], sums: Sequence[Tensor] | None = None
    ) -> list[Tensor | None]:
        """dq, dk, dv and the gradients of ``captured``, which require one, from dout, dlse, q, k and v.

        ``sums`` get those of looked up elements. Without it, the results have all and are differentiable in the inputs.
        """
        dout, dlse, q, k, v = inputs
        inner = self._products(q, k)
        inner = inner if inner.requires_grad else inner.requires_grad_()
        with torch.enable_grad():
            scores = self._changed(inner, captured, sums)
        visible = scores != -math.inf
        weights, _ = _softmax(scores)
        dp = torch.where(visible, products(dout, v), 0.0)
        ds = torch.where(visible, weights * (dp - (weights * dp).sum(-1, keepdim=True) + dlse[..., None]), 0.0)
        da, *dcaptured = _gradients([scores], [inner, *captured], [ds], again=sums is None)
        da = torch.zeros_like(ds) if da is None else torch.where(self.visible, da, 0.0) * self._call.scale
        dk = sum_over_visible_rows(da, q, visible, k.shape[1])
        dv = sum_over_visible_rows(weights, dout, visible, k.shape[1])
        return [sum_over_visible_keys(da, k, visible), dk, dv, *dcaptured]

    def double_backward(
        self, gradients: Sequence[Tensor | None], inputs: Sequence[Tensor], captured: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The gradients of ``inputs`` (dout, dlse, q, k, v) and ``captured``, from those of backward's results."""
        leaves = [x.detach().requires_grad_() for x in (*inputs, *captured)]
        with torch.enable_grad():
            results = self.backward(leaves[:5], leaves[5:])
        return _gradients(results, leaves, gradients)

    def _products(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(self.visible, products(q, k) * self._call.scale, 0.0)

    def _changed(self, scores: Tensor, captured: Sequence[Tensor], sums: Sequence[Tensor] | None = None) -> Tensor:
        lookups = Lookups(self._call.captured, captured, sums)
        changed = over_pairs(self._call.score_mod, self._indices, scores, lookups=lookups)
        return torch.where(self.visible, changed.to(scores.dtype), -math.inf)


def blocks(call: ScoredCall, q: Tensor, k: Tensor) -> Iterator[Block]:
    """The blocks of a call in which some pair is visible; each has at most :data:`PAIRS`, or is one row of a group."""
    (batch, heads_q, seqlen_q, _), (_, heads, seqlen_k, _) = q.shape, k.shape
    if not (q.shape[:3].numel() and k.shape[:3].numel()):
        return
    group, sizes = heads_q // heads, (batch, heads_q, seqlen_q, seqlen_k)
    rows = min(ROWS, max(1, PAIRS // (group * seqlen_k)))
    some_heads = min(heads, max(1, PAIRS // (rows * group * seqlen_k)))
    sequences = min(batch, max(1, PAIRS // (rows * heads_q * seqlen_k)))
    heads_differ = any(holes.sizes[1] > 1 for holes in call.holes)
    for b, i, h in itertools.product(range(0, batch, sequences), range(0, seqlen_q, rows), range(0, heads, some_heads)):
        heads_kv = slice(h, min(heads, h + some_heads))
        queries = slice(b, b + sequences), slice(h * group, heads_kv.stop * group), slice(i, i + rows)
        if h == 0 or heads_differ:
            visible, columns = _visible_pairs(call, *queries)
        if visible.shape[-1]:
            yield Block(call, queries, (queries[0], heads_kv, columns), visible, sizes)


def _visible_pairs(call: ScoredCall, batch: slice, heads: slice, rows: slice) -> tuple[Tensor, slice | Tensor]:
    """The visible pairs, of the keys visible to any of the rows; and where these keys are."""
    ranges = by_interval(call.ranges)
    begin, end = ranges[batch if ranges.shape[0] > 1 else slice(None), rows, ..., None].unbind(3)
    first, past = torch.where(begin < end, begin, end.max()).min(), torch.where(begin < end, end, 0).max()
    keys = torch.arange(int(first), max(int(first), int(past)), device=begin.device)
    visible = ((begin <= keys) & (keys < end)).any(2)[:, None]
    if not call.holes:
        return visible, slice(int(first), int(past))
    for holes in call.holes:
        visible = visible & holes.visible(batch, heads, rows)[..., keys]
    some = visible.any(0).any(0).any(0)
    return visible[..., some], keys[some]


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """P and lse; a row without a visible key has weights 0 and lse -inf."""
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0), (total.log() + top).squeeze(-1)


def _gradients(
    results: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    again: bool = False,
) -> list[Tensor | None]:
    """The gradients of ``inputs``, None for those on which no result depends."""
    pairs = [(x, dx) for x, dx in zip(results, gradients, strict=True) if x is not None and dx is not None]
    pairs = [(x, dx) for x, dx in pairs if x.requires_grad]
    if not pairs:
        return [None] * len(inputs)
    reached, given = zip(*pairs, strict=True)
    return list(torch.autograd.grad(reached, inputs, given, create_graph=again, allow_unused=True))
