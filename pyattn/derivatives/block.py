"""A block of query rows with its pairs as tensors: scores, weights and their derivatives along a direction.

A direction consists of tangents of q, k, v, bias, slopes m, sinks n and relative bias r, marked with '. D are the
dropout factors, distance is |i + q_offset - j|, r_ij is r's value for the pair, and f caps the scaled products a:
f(a) = softcap tanh(a / softcap), or a without a cap.
::

    a = softmax_scale q k^T                  a' = softmax_scale (q' k^T + q k'^T)
    s = f(a) + bias + r_ij - m distance      s' = f1 a' + bias' + r'_ij - m' distance          f1 = df/da
    P = exp(s - lse), N = exp(n - lse)       lse' = rowsum(P s') + N n'
                                             P' = P (s' - lse'),  N' = N (n' - lse')

Second derivatives, along another direction marked with *::

    a'* = softmax_scale (q' k*^T + q* k'^T)  lse'* = rowsum(P* s' + P s'*) + N* n'
    s'* = f1 a'* + f2 a' a*                  P'* = P* (s' - lse') + P (s'* - lse'*)            f2 = df1/da
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyattn.derivatives.grouped_products import products, sum_over_visible_keys, sum_over_visible_rows
from pyattn.derivatives.learned import Learned
from pyattn.ops import visible_pairs
from pyattn.options.dropout import dropout_factor, kept_pairs, kept_weights
from pyattn.options.schema import Options
from pyattn.options.selected_keys import Listed

PAIRS_AT_ONCE = 2**20
"""Pairs of query and key in a block, over batch and heads: about twenty temporaries of 4 MB in float32."""


class Change(NamedTuple):
    """A block's derivatives along a direction: a', s', P' (B, Hq, rows, Sk), lse' and N' (B, Hq, rows, 1)."""

    products: Tensor
    scores: Tensor
    weights: Tensor
    lse: Tensor
    sink_weight: Tensor | None


class Scores:
    """The scores of all keys for some query rows of some heads, (B, heads, rows, Sk).

    With ``listed`` of these heads, scores are those of a row's n listed keys, n in place of Sk.

    Attributes:
        options: those of these heads and rows.
        visible: bool (B or 1, heads or 1, rows, Sk), the visible pairs.
        scores: -inf at masked pairs, whatever they hold; no derivative flows there.
        scale: the factor on the products.
        over_cap: a / softcap; None without a softcap.
        distance: None without slopes; 0 at masked pairs.
        places: int64 (B or 1, heads or 1, rows, Sk), where a relative bias has each pair's value; None without one.
    """

    options: Options
    dtype: torch.dtype
    visible: Tensor
    scale: float
    scores: Tensor

    def __init__(
        self,
        products: Tensor,
        options: Options,
        heads: Tensor,
        rows: Tensor,
        seqlen_q: int,
        head_dim: int,
        listed: Listed | None = None,
    ) -> None:
        """``products`` (B, heads, rows, Sk); ``options`` of these heads and rows, all LEARNED but bias in its dtype."""
        self.options, self._heads, self._rows, self.dtype = options, heads, rows, products.dtype
        self._listed = listed
        where = options, rows, seqlen_q, products.shape[3] if listed is None else listed.seqlen_k
        self.visible = visible_pairs.visible(*where, len(heads), listed)
        self.scale = options.scale_for(head_dim)
        scores = self.hide(products) * self.scale
        self.over_cap: Tensor | None = None
        if options.softcap:
            self.over_cap = scores / options.bounded_softcap
            scores = options.bounded_softcap * torch.tanh(self.over_cap)
        if options.bias is not None:
            scores = scores + self.of_bias(options.bias)
        self.places: Tensor | None = None
        if options.relative_bias is not None:
            self.places = visible_pairs.places(*where, options.relative_bias.shape[-1] // 2, listed)
            scores = scores + self.of_relative(options.relative_bias, self.places)
        self.distance: Tensor | None = None
        if options.alibi_slopes is not None:
            self.distance = self.hide(visible_pairs.distances(*where, listed).to(self.dtype))
            scores = scores - options.alibi_slopes[..., None, None] * self.distance
        self.scores = scores.masked_fill(~self.visible, -math.inf)

    def kept(self, batch: int, num_heads: int) -> Tensor:
        """bool (B, heads, rows, Sk): the weights that dropout keeps in a call with ``num_heads`` heads in all."""
        origins = self.options.origins_for(batch, num_heads, self._rows.device)
        sequence, whole, head, query, key = origins[:, None, None].unbind(-1)
        heads = sequence * whole + head + self._heads[:, None]
        queries, seed, dropout_p = query + self._rows, self.options.dropout_seed, self.options.dropout_p
        if self._listed is None:
            return kept_weights(seed, heads, queries, key, self.visible.shape[3], dropout_p)
        return kept_pairs(seed, heads[..., None], queries[..., None], key[..., None] + self._listed.keys, dropout_p)

    def of_bias(self, bias: Tensor) -> Tensor:
        """These rows of a bias or of its tangent, as pairs."""
        return self.hide(visible_pairs.at_keys(bias, self._listed).to(self.dtype))

    def of_relative(self, relative: Tensor, places: Tensor) -> Tensor:
        """The pairs' values (B or 1, heads or 1, rows, Sk) of a relative bias or of its tangent."""
        return self.hide(visible_pairs.at_places(relative, places))

    def hide(self, pairs: Tensor) -> Tensor:
        """``pairs`` with 0 at masked pairs, whatever they hold."""
        return torch.where(self.visible, pairs, 0.0)


class Block(Scores):
    """Some query rows of a call in float32 or float64, with the options of these rows alone.

    Masked pairs, of (B, Hq, rows, Sk), hold 0.

    Attributes:
        q, k, v: the block's queries, and all keys and values.
        rows: the block's rows among all.
        weights, sink_weight: P, and N (B, Hq, rows, 1) where there are sinks.
        cap: f1 and f2; None without a softcap.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rows: slice
    weights: Tensor
    sink_weight: Tensor | None

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: Options, rows: slice) -> None:
        self.k, self.v, self.rows = k, v, rows
        batch, num_heads, seqlen_q, head_dim = q.shape
        heads, row = torch.arange(num_heads, device=q.device), torch.arange(rows.start, rows.stop, device=q.device)
        self.q = self.of(q)
        super().__init__(products(self.q, self.k), options, heads, row, seqlen_q, head_dim)
        self.cap: tuple[Tensor, Tensor] | None = None
        if self.over_cap is not None:
            ratio, u = torch.tanh(self.over_cap), torch.exp(-2 * self.over_cap.abs())
            slope = 4 * u / (1 + u) ** 2  # 1 - ratio^2 cancels where ratio is near 1
            self.cap = slope, -2 / options.bounded_softcap * ratio * slope
        self.weights, self.sink_weight = self._softmax(options.sinks)
        self.dropout: Tensor | None = None
        if options.dropout_p:
            self.dropout = self.kept(batch, num_heads).to(self.dtype) * dropout_factor(options.dropout_p)

    def _softmax(self, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """P and N; a row with neither a visible key nor a sink has weights 0."""
        scores = self.scores
        top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.sum(-1, keepdim=True) - math.inf
        sinks = None if sinks is None else sinks[:, None, None]
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
        if direction.relative_bias is not None and self.places is not None:
            scores = scores + self.of_relative(direction.relative_bias, self.places)
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
        """P'* (B, Hq, rows, Sk) and lse'* (B, Hq, rows, 1), the derivatives along both directions."""
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
        """These rows of a tensor that has one row per query."""
        return queries.narrow(2, self.rows.start, self.rows.stop - self.rows.start)

    def drop(self, pairs: Tensor) -> Tensor:
        """The pairs times their dropout factors."""
        return pairs if self.dropout is None else pairs * self.dropout

    def over_keys(self, pairs: Tensor, keys: Tensor) -> Tensor:
        """``pairs keys``; a row becomes NaN if it sees a key that is not finite, and only then."""
        return sum_over_visible_keys(pairs, keys, self.visible)

    def over_rows(self, pairs: Tensor, queries: Tensor) -> Tensor:
        """``pairs^T queries``; a key becomes NaN if a query that is not finite sees it, and only then."""
        return sum_over_visible_rows(pairs, queries, self.visible, self.k.shape[1])
