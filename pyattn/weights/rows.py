"""Rows of attention weights and sums of them, as torch operations over blocks of rows."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pyattn.derivatives.block import PAIRS_AT_ONCE, Scores
from pyattn.derivatives.grouped_products import listed_products, products
from pyattn.derivatives.recomputing import recomputing
from pyattn.options.autocast import without
from pyattn.options.axes import TENSORS, kv_heads, part, take
from pyattn.options.call import Call
from pyattn.options.checks import has_values
from pyattn.options.dropout import dropout_factor
from pyattn.options.schema import LEARNED, Options
from pyattn.options.selected_keys import Listed, listed
from pyattn.weights.checks import Reduce

GATHERED_AT_ONCE = 4 * PAIRS_AT_ONCE
"""Elements of listed keys that a block gathers: 16 MB in float32, which a backward keeps for each of its products."""


def chosen_weights(call: Call, lse: Tensor | None, heads: Tensor | None, rows: Tensor, reduce: Reduce) -> Tensor:
    """:func:`pyattn.attention_weights` of checked arguments; heads None: all, without copying a key."""
    lists = call.options.selected
    if reduce == "heads" and lists is not None and lists.shape[1] != 1:
        raise ValueError(
            'pyattn: reduce="heads" must come with lists that all heads share, since weights are in their order, got '
            f"selected of {lists.shape[1]} lists"
        )
    with without(call.q.device):
        these = _of_heads(call, lse, heads)
        if reduce is not None:
            return _REDUCED[reduce](these, rows)
        if lists is not None:
            return _joined(partial(_in_list_order, dtype=call.q.dtype), these, rows, 2)
        return _weights(these, rows).to(call.q.dtype)


class _Heads(NamedTuple):
    """Some heads of a call, in float32 or float64.

    Attributes:
        call: q (B, heads, Sq, D) and k (B, KV heads, Sk, D) of these heads, options of all, LEARNED but bias cast.
        lse: (B, heads, Sq), or None.
        heads: (heads,), their numbers among all ``num_heads``; None: all.
        finite: q and k with 0 for what is not finite; None if products need no such copies.
        by_lists: whether a row's weights are computed for its listed keys alone, which are fewer than all.
    """

    call: Call
    lse: Tensor | None
    heads: Tensor | None
    num_heads: int
    finite: tuple[Tensor, Tensor] | None
    by_lists: bool

    @property
    def weights_each(self) -> int:
        """n, how many weights a row has: Sk, or those of its list."""
        options = self.call.options
        if not self.by_lists:
            return self.call.k.shape[2]
        listed_keys: int = options.selected.shape[3] * options.selected_block
        return listed_keys


def _of_heads(call: Call, lse: Tensor | None, heads: Tensor | None) -> _Heads:
    q, k, _, options, *_ = call
    wide, num_heads = torch.promote_types(q.dtype, torch.float32), q.shape[1]
    if heads is not None:
        q, k = q.index_select(1, heads), part(TENSORS["k"], k, {"g": kv_heads(heads, num_heads, k.shape[1])})
        lse = None if lse is None else lse.index_select(1, heads)
    lse = None if lse is None else lse.to(wide)
    learned = {name: getattr(options, name) for name in LEARNED[1:]}  # each block casts its own part of bias
    options = options._replace(**{name: t.to(wide) for name, t in learned.items() if t is not None})
    q, k = q.to(wide), k.to(wide)
    lists = options.selected
    # On a GPU, gradients of gathered keys would be summed in no fixed order.
    by_lists = lists is not None and q.is_cpu and lists.shape[3] * options.selected_block < k.shape[2]
    return _Heads(Call(q, k, k, options), lse, heads, num_heads, _finite(q, k), by_lists)


def _options(these: _Heads, row: Tensor) -> Options:
    return take(these.call.options, heads=these.heads, rows=row, num_heads=these.num_heads)


def _listed(these: _Heads, options: Options) -> Listed | None:
    """The listed keys of rows with these options; None where the rows' weights are those of all keys."""
    if not these.by_lists:
        return None
    return listed(options.selected, options.selected_block, these.call.k.shape[2])


def _scores(these: _Heads, row: Tensor) -> Scores:
    """The scores (B, heads, rows, n) of these rows."""
    q, options = these.call.q, _options(these, row)
    head = torch.arange(these.num_heads, device=row.device) if these.heads is None else these.heads
    keys = _listed(these, options)
    products = _products(these, row, keys)
    keys = None if keys is None else keys.of_heads(len(head))
    return Scores(products, options, head, row, q.shape[2], q.shape[3], keys)


def _with_sinks(pairs: Scores, scores: Tensor) -> Tensor:
    """``scores`` (B, heads, rows, n), and the sinks in one more column if there are any."""
    sinks = pairs.options.sinks
    if sinks is None:
        return scores
    return torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)


def _weights(these: _Heads, row: Tensor) -> Tensor:
    """The weights (B, heads, rows, n)."""
    pairs, options = _scores(these, row), these.call.options
    empty = ~pairs.visible.any(-1, keepdim=True)
    if these.lse is not None:
        total = these.lse.index_select(2, row).unsqueeze(-1)
        weights = torch.exp(pairs.scores - total.masked_fill(empty, 0.0))
    else:
        columns = _with_sinks(pairs, pairs.scores.masked_fill(empty, 0.0))
        weights = torch.softmax(columns, -1)[..., : these.weights_each]
    weights = pairs.hide(weights)
    if options.dropout_p:
        kept = pairs.kept(these.call.q.shape[0], these.num_heads)
        weights = weights.masked_fill(~kept, 0.0) * dropout_factor(options.dropout_p)
    return weights


def _in_list_order(these: _Heads, row: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights (B, heads, rows, n * selected_block) of listed keys; 0 where a key repeats, or an entry is none."""
    weights = _weights(these, row)
    if these.by_lists:
        return weights.to(dtype)
    options, seqlen_k = _options(these, row), weights.shape[3]
    keys = listed(options.selected, options.selected_block, seqlen_k).of_heads(weights.shape[1])
    number = keys.keys.expand(*weights.shape[:3], -1)
    if not seqlen_k:
        return weights.new_zeros(number.shape, dtype=dtype)
    return weights.gather(-1, number).masked_fill(keys.none, 0.0).to(dtype)


def _received(these: _Heads, row: Tensor) -> Tensor:
    """(B, heads, Sk): the sums of these rows' weights."""
    weights, keys = _weights(these, row), _listed(these, _options(these, row))
    if keys is None:
        return weights.sum(2)
    number = keys.of_heads(weights.shape[1]).keys.expand(weights.shape)
    return weights.new_zeros(*weights.shape[:2], keys.seqlen_k).scatter_add(2, number.flatten(2), weights.flatten(2))


def _over_heads(these: _Heads, row: Tensor) -> Tensor:
    """(B, rows, Sk or n * selected_block): the sums of the heads' weights."""
    if these.call.options.selected is None:
        return _weights(these, row).sum(1)
    return _in_list_order(these, row, these.call.q.dtype).sum(1)


def _entropies(these: _Heads, row: Tensor) -> Tensor:
    """(B, heads, rows): 0 for a row that sees no key, whatever its sink."""
    pairs = _scores(these, row)
    empty = ~pairs.visible.any(-1, keepdim=True)
    columns = _with_sinks(pairs, pairs.scores).masked_fill(empty, 0.0)
    if these.lse is None:
        logs = torch.log_softmax(columns, -1)
    else:
        logs = columns - these.lse.index_select(2, row).unsqueeze(-1).masked_fill(empty, 0.0)
    weights = torch.exp(logs)
    terms = weights * logs.masked_fill(weights == 0, 0.0)  # x log x is 0 at 0, where log x is -inf
    return -terms.sum(-1).masked_fill(empty.squeeze(-1), 0.0)


def _by_blocks(reduced: Callable[[_Heads, Tensor], Tensor], these: _Heads, row: Tensor) -> Iterator[Tensor]:
    """``reduced`` of blocks of rows; a backward computes each block again instead of keeping its weights."""
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    step = max(1, len(row)) if tracing else _rows_at_once(these)  # a trace would unroll the loop for one length
    (q, k, *_), options = these.call, these.call.options
    reduced = recomputing(reduced, (q, k, these.lse, *(these.finite or ()), *options))
    for some in row.split(step):
        yield reduced(these, some)


def _joined(reduced: Callable[[_Heads, Tensor], Tensor], these: _Heads, row: Tensor, dim: int) -> Tensor:
    """``reduced`` of blocks of rows, whose results have the rows as dimension ``dim``."""
    blocks = _by_blocks(reduced, these, row)
    first = next(blocks)
    if first.requires_grad or not has_values(first):
        return torch.cat([first, *blocks], dim)
    sizes = list(first.shape)
    sizes[dim] = len(row)
    found, done = first.new_empty(sizes), 0
    for block in itertools.chain([first], blocks):
        found.narrow(dim, done, block.shape[dim]).copy_(block)
        done += block.shape[dim]
    return found


def _rows_at_once(these: _Heads) -> int:
    batch, heads, _, head_dim = these.call.q.shape
    step = PAIRS_AT_ONCE // max(1, batch * heads * these.weights_each)
    if these.by_lists:
        lists = max(these.call.options.selected.shape[1], these.call.k.shape[1])
        step = min(step, GATHERED_AT_ONCE // max(1, batch * lists * these.weights_each * head_dim))
    return max(1, step)


def _sum_over_rows(these: _Heads, row: Tensor) -> Tensor:
    blocks = _by_blocks(_received, these, row)
    first = next(blocks)
    return sum(blocks, first)


def _entropy(these: _Heads, row: Tensor) -> Tensor:
    return _joined(_entropies, these, row, 2)


def _sum_over_heads(these: _Heads, row: Tensor) -> Tensor:
    return _joined(_over_heads, these, row, 1)


_REDUCED = {"queries": _sum_over_rows, "heads": _sum_over_heads, "entropy": _entropy}


def _finite(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
    """q and k with 0 for what is not finite; None if all is finite, or no gradient is wanted."""
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if tracing or not torch.is_grad_enabled():  # torch checks a trace without gradients
        return None
    finite = [t.isfinite() for t in (q, k)]
    if all(has_values(t) and t.all() for t in finite):
        return None
    found_q, found_k = (torch.where(known, t, 0.0) for known, t in zip(finite, (q, k), strict=True))
    return found_q, found_k


def _products(these: _Heads, row: Tensor, keys: Listed | None) -> Tensor:
    """``<q_i, k_j>`` (B, heads, rows, n) of these rows; their gradients treat non-finite inputs as 0.

    A masked pair has gradient 0, and 0 * NaN would be NaN. Non-finite products are added as a constant.
    """

    def product(q: Tensor, k: Tensor) -> Tensor:
        q = q.index_select(2, row)
        return products(q, k) if keys is None else listed_products(q, k, keys.keys)

    q, k = these.call.q, these.call.k
    if these.finite is None:
        return product(q, k)
    with torch.no_grad():
        exact = product(q, k)
    return product(*these.finite) + exact.masked_fill(exact.isfinite(), 0.0)
