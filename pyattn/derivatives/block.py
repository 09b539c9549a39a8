"""A block of query rows with its pairs as tensors: weights, and how a direction changes them.

A direction moves q, k, v, bias, slopes m and sinks n by their tangents, marked with '. D are the dropout factors,
distance is |i + q_offset - j|, and f caps the scaled products a: f(a) = softcap tanh(a / softcap), or a without a cap.
::

    a = softmax_scale q k^T                  a' = softmax_scale (q' k^T + q k'^T)
    s = f(a) + bias - m distance             s' = f1 a' + bias' - m' distance                  f1 = df/da
    P = exp(s - lse), N = exp(n - lse)       lse' = rowsum(P s') + N n'
                                             P' = P (s' - lse'),  N' = N (n' - lse')

Along a second direction, marked with *, as well::

    a'* = softmax_scale (q' k*^T + q* k'^T)  lse'* = rowsum(P* s' + P s'*) + N* n'
    s'* = f1 a'* + f2 a' a*                  P'* = P* (s' - lse') + P (s'* - lse'*)            f2 = df1/da
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyattn.derivatives.grouped import products, sum_over_keys, sum_over_rows
from pyattn.derivatives.kind import Learned
from pyattn.dropout import dropout_threshold, kept_weights
from pyattn.ops import visible
from pyattn.ops.schema import Options


class Change(NamedTuple):
    """What a direction does to a block: a', s', P' (B, Hq, rows, Sk), lse' and N' (B, Hq, rows, 1)."""

    products: Tensor
    scores: Tensor
    weights: Tensor
    lse: Tensor
    sink_weight: Tensor | None


class Inputs(NamedTuple):
    """A call in float32 or float64; ``first`` is the number of its first sequence, which dropout counts by."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: Options
    first: int


class Block:
    """The query rows [begin, end) of a call. Pairs (B, Hq, rows, Sk) that are not seen hold 0.

    Attributes:
        q, k, v: the block's queries, and all keys and values.
        weights, sink_weight: P, and N (B, Hq, rows, 1) where there are sinks.
        cap: f1 and f2; None without a softcap.
        distance: None without slopes.
    """

    def __init__(self, inputs: Inputs, begin: int, end: int) -> None:
        q, self.k, self.v, options, first = inputs
        self.begin, self.end, self.sinks = begin, end, options.sinks
        batch, num_heads, seqlen_q, head_dim = q.shape
        seqlen_k, device, self.dtype = self.k.shape[2], q.device, q.dtype
        self._rows, self._heads = torch.arange(begin, end, device=device), torch.arange(num_heads, device=device)
        self.q = self.of(q)
        self.seen = visible.seen(options, self._rows, self._heads, seqlen_q, seqlen_k)
        self.scale = options.scale_for(head_dim)
        scores = self.hide(products(self.q, self.k) * self.scale)
        self.cap: tuple[Tensor, Tensor] | None = None
        if options.softcap:
            cap = options.bounded_softcap
            ratio, u = torch.tanh(scores / cap), torch.exp(-2 * (scores / cap).abs())
            scores, slope = cap * ratio, 4 * u / (1 + u) ** 2  # 1 - ratio^2 cancels where ratio is near 1
            self.cap = slope, -2 / cap * ratio * slope
        if options.bias is not None:
            scores = scores + self.of_bias(options.bias)
        self.distance: Tensor | None = None
        if options.alibi_slopes is not None:
            position = self._rows + visible.offsets(options, seqlen_q, seqlen_k, device).double()  # int64 overflows
            distance = (position[:, None, :, None] - torch.arange(seqlen_k, device=device)).abs().to(self.dtype)
            self.distance = torch.where(self.seen, distance, 0.0)
            scores = scores - options.alibi_slopes[..., None, None] * self.distance
        self.weights, self.sink_weight = self._softmax(scores)
        self.dropout: Tensor | None = None
        if options.dropout_p:
            assert options.dropout_seed is not None
            heads = torch.arange(first, first + batch, device=device)[:, None, None] * num_heads + self._heads[:, None]
            kept = kept_weights(options.dropout_seed, heads, self._rows, seqlen_k, options.dropout_p)
            self.dropout = kept.to(self.dtype) * (65536 / (65536 - dropout_threshold(options.dropout_p)))

    def _softmax(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """P and N; a row that has neither a key nor a sink has weights 0."""
        scores = scores.masked_fill(~self.seen, -math.inf)
        top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.sum(-1, keepdim=True) - math.inf
        sinks = None if self.sinks is None else self.sinks[:, None, None]
        top = top if sinks is None else torch.maximum(top, sinks)
        top = top.masked_fill(top == -math.inf, 0.0)
        weights = torch.exp(scores - top)
        sink_weight = None if sinks is None else torch.exp(sinks - top)
        total = weights.sum(-1, keepdim=True)
        total = total if sink_weight is None else total + sink_weight
        total = total.masked_fill(total == 0, 1.0)
        return self.hide(weights / total), None if sink_weight is None else sink_weight / total

    def along(self, direction: Learned) -> Change:
        """The right column of the formulas at the top of this file."""
        moved = torch.zeros_like(self.weights)
        if direction.q is not None:
            moved = moved + products(self.of(direction.q), self.k)
        if direction.k is not None:
            moved = moved + products(self.q, direction.k)
        moved = self.hide(moved * self.scale)
        scores = moved if self.cap is None else moved * self.cap[0]
        if direction.bias is not None:
            scores = scores + self.of_bias(direction.bias)
        if direction.alibi_slopes is not None and self.distance is not None:
            scores = scores - direction.alibi_slopes[..., None, None] * self.distance
        lse = (self.weights * scores).sum(-1, keepdim=True)
        sink_weight = None
        if self.sink_weight is not None:
            moved_sinks = 0.0 if direction.sinks is None else direction.sinks[:, None, None]
            lse = lse + self.sink_weight * moved_sinks
            sink_weight = self.sink_weight * (moved_sinks - lse)
        return Change(moved, scores, self.hide(self.weights * (scores - lse)), lse, sink_weight)

    def twice(self, change: Change, more: Change, direction: Learned, other: Learned) -> tuple[Tensor, Tensor]:
        """P'* and lse'* (B, Hq, rows, 1): how the change along the direction changes along the other."""
        moved = torch.zeros_like(self.weights)
        for queries, keys in ((direction.q, other.k), (other.q, direction.k)):
            if queries is not None and keys is not None:
                moved = moved + products(self.of(queries), keys)
        scores = self.hide(moved * self.scale)
        if self.cap is not None:
            scores = self.cap[0] * scores + self.cap[1] * change.products * more.products
        lse = (more.weights * change.scores + self.weights * scores).sum(-1, keepdim=True)
        if more.sink_weight is not None and direction.sinks is not None:
            lse = lse + more.sink_weight * direction.sinks[:, None, None]
        weights = more.weights * (change.scores - change.lse) + self.weights * (scores - lse)
        return self.hide(weights), lse

    def of(self, queries: Tensor) -> Tensor:
        """These rows of a tensor that has one for each query."""
        return queries.narrow(2, self.begin, self.end - self.begin)

    def of_bias(self, bias: Tensor) -> Tensor:
        """These rows of a bias or of its tangent, broadcasting to pairs."""
        return self.hide(visible.picked(bias, self._heads, self._rows).to(self.dtype))

    def hide(self, pairs: Tensor) -> Tensor:
        """Pairs that are not seen hold 0, whatever they were made from."""
        return torch.where(self.seen, pairs, 0.0)

    def drop(self, pairs: Tensor) -> Tensor:
        """The pairs times their dropout factors."""
        return pairs if self.dropout is None else pairs * self.dropout

    def over_keys(self, pairs: Tensor, keys: Tensor) -> Tensor:
        """``pairs keys``; a row that sees a key which is not finite becomes NaN, and no other row."""
        finite = keys.isfinite()
        group = pairs.shape[1] // max(1, keys.shape[1])
        broken = (~finite.all(-1)).repeat_interleave(group, 1)[:, :, None]
        return sum_over_keys(pairs.masked_fill(self.seen & broken, math.nan), torch.where(finite, keys, 0.0))

    def over_rows(self, pairs: Tensor, queries: Tensor) -> Tensor:
        """``pairs^T queries``; a key that is seen by a query which is not finite becomes NaN, and no other key."""
        finite = queries.isfinite()
        broken = ~finite.all(-1, keepdim=True)
        poisoned = pairs.masked_fill(self.seen & broken, math.nan)
        return sum_over_rows(poisoned, torch.where(finite, queries, 0.0), self.k.shape[1])
