"""Rows of attention weights and sums of them, as torch operations over blocks of rows."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pyattn.derivatives.block import PAIRS_AT_ONCE, Scores
from pyattn.derivatives.grouped_products import products
from pyattn.derivatives.transforms import transforming
from pyattn.options.autocast import without
from pyattn.options.axes import TENSORS, kv_heads, part, take
from pyattn.options.call import Call
from pyattn.options.checks import check_between, check_integers, shown
from pyattn.options.dropout import dropout_factor
from pyattn.options.schema import LEARNED, Options
from pyattn.options.selected_keys import keys_of

Reduce = Literal["queries", "entropy", None]


def chosen(name: str, values: Sequence[int] | Tensor | None, size: int, device: torch.device) -> Tensor:
    """``values`` as indices from 0 to size - 1; None chooses all of them."""
    if values is None:
        return torch.arange(size, device=device)
    indices = check_integers(name, values, device).to(device)
    check_between(name, indices, -size, size - 1)
    return torch.where(indices < 0, indices + size, indices)


def check_reduce(reduce: object) -> None:
    """ValueError for another ``reduce`` than None and those of :data:`_REDUCED`."""
    if reduce not in (None, *_REDUCED):
        raise ValueError(f'pyattn: reduce must be "queries", "entropy" or None, got {shown(reduce)}')


def shape_of(name: str, t: Tensor, device: torch.device) -> Tensor:
    """Checks the device and layout of ``t``; returns a meta tensor without the tangent that ``to("meta")`` keeps."""
    if t.layout != torch.strided:
        raise NotImplementedError(f"pyattn: {name} must be a dense tensor, got layout {t.layout}")
    if t.device != device:
        name = name.replace("offsets", "offset")  # the operators' name for a q_offset of each sequence
        raise ValueError(f"pyattn: {name} must be on q's device, got {t.device} and {device}")
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


def shapes_of(options: Options, device: torch.device) -> list[Any]:
    """The options for an operator on meta tensors, which checks them and computes nothing."""
    named = zip(Options._fields, options, strict=True)
    return [shape_of(name, t, device) if isinstance(t, Tensor) else t for name, t in named]


def chosen_weights(call: Call, lse: Tensor | None, heads: Tensor | None, rows: Tensor, reduce: Reduce) -> Tensor:
    """:func:`pyattn.attention_weights` of checked arguments; heads None: all, without copying a key."""
    with without(call.q.device):
        these = _of_heads(call, lse, heads)
        if reduce is not None:
            return _REDUCED[reduce](these, rows)
        if call.options.selected is not None:
            return torch.cat(_by_blocks(_in_list_order, these, rows), 2).to(call.q.dtype)
        return _weights(these, rows).to(call.q.dtype)


class _Heads(NamedTuple):
    """Some heads of a call, in float32 or float64.

    Attributes:
        call: q (B, heads, Sq, D) and k (B, KV heads, Sk, D) of these heads, options of all, LEARNED but bias cast.
        lse: (B, heads, Sq), or None.
        heads: (heads,), their numbers among all ``num_heads``; None: all.
    """

    call: Call
    lse: Tensor | None
    heads: Tensor | None
    num_heads: int


def _of_heads(call: Call, lse: Tensor | None, heads: Tensor | None) -> _Heads:
    q, k, _, options, *_ = call
    wide, num_heads = torch.promote_types(q.dtype, torch.float32), q.shape[1]
    if heads is not None:
        q, k = q.index_select(1, heads), part(TENSORS["k"], k, {"g": kv_heads(heads, num_heads, k.shape[1])})
        lse = None if lse is None else lse.index_select(1, heads)
    lse = None if lse is None else lse.to(wide)
    learned = {name: getattr(options, name) for name in LEARNED[1:]}  # each block casts its own part of bias
    options = options._replace(**{name: t.to(wide) for name, t in learned.items() if t is not None})
    return _Heads(Call(q.to(wide), k.to(wide), k, options), lse, heads, num_heads)


def _scores(these: _Heads, row: Tensor) -> Scores:
    """The scores (B, heads, rows, Sk) of these rows."""
    (q, k, *_), options = these.call, take(these.call.options, heads=these.heads, rows=row, num_heads=these.num_heads)
    head = torch.arange(these.num_heads, device=row.device) if these.heads is None else these.heads
    return Scores(_products(q.index_select(2, row), k), options, head, row, q.shape[2], q.shape[3])


def _with_sinks(pairs: Scores, scores: Tensor) -> Tensor:
    """``scores`` (B, heads, rows, Sk), and the sinks in one more column if there are any."""
    sinks = pairs.options.sinks
    if sinks is None:
        return scores
    return torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)


def _weights(these: _Heads, row: Tensor) -> Tensor:
    """The weights (B, heads, rows, Sk)."""
    pairs, options = _scores(these, row), these.call.options
    empty = ~pairs.visible.any(-1, keepdim=True)
    if these.lse is not None:
        total = these.lse.index_select(2, row).unsqueeze(-1)
        weights = torch.exp(pairs.scores - total.masked_fill(empty, 0.0))
    else:
        columns = _with_sinks(pairs, pairs.scores.masked_fill(empty, 0.0))
        weights = torch.softmax(columns, -1)[..., : these.call.k.shape[2]]
    weights = pairs.hide(weights)
    if options.dropout_p:
        kept = pairs.kept(these.call.q.shape[0], these.num_heads)
        weights = weights.masked_fill(~kept, 0.0) * dropout_factor(options.dropout_p)
    return weights


def _in_list_order(these: _Heads, row: Tensor) -> Tensor:
    """The weights (B, heads, rows, n * selected_block) of listed keys; 0 where a key repeats, or an entry is none."""
    options = take(these.call.options, heads=these.heads, rows=row, num_heads=these.num_heads)
    weights, keys = _weights(these, row), keys_of(options.selected, options.selected_block)
    order = keys.argsort(dim=-1, stable=True)
    in_order = keys.gather(-1, order)
    again = torch.zeros_like(keys, dtype=torch.bool)
    again = again.scatter(-1, order[..., 1:], in_order[..., 1:] == in_order[..., :-1])
    hidden = again | (keys < 0) | (keys >= weights.shape[3])
    lists = max(1, keys.shape[1])
    keys, hidden = (t.repeat_interleave(weights.shape[1] // lists, 1) for t in (keys, hidden))
    keys = torch.where(hidden, 0, keys).expand(*weights.shape[:3], -1)
    if not weights.shape[3]:
        return weights.new_zeros(keys.shape)
    return weights.gather(-1, keys).masked_fill(hidden, 0.0)


def _received(these: _Heads, row: Tensor) -> Tensor:
    """(B, heads, Sk): the sums of these rows' weights."""
    return _weights(these, row).sum(2)


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


def _by_blocks(reduced: Callable[[_Heads, Tensor], Tensor], these: _Heads, row: Tensor) -> list[Tensor]:
    """``reduced`` of blocks of rows; a backward computes each block again instead of keeping its weights."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return [reduced(these, row)]  # a trace would unroll the loop for one length
    step = max(1, PAIRS_AT_ONCE // max(1, these.call.q.shape[0] * these.call.q.shape[1] * these.call.k.shape[2]))
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not transforming():
        reduced = partial(checkpoint, reduced, use_reentrant=False, preserve_rng_state=False)
    return [reduced(these, some) for some in row.split(step)]


def _sum_over_rows(these: _Heads, row: Tensor) -> Tensor:
    first, *others = _by_blocks(_received, these, row)
    return sum(others, first)


def _entropy(these: _Heads, row: Tensor) -> Tensor:
    return torch.cat(_by_blocks(_entropies, these, row), -1)


_REDUCED = {"queries": _sum_over_rows, "entropy": _entropy}


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Returns ``q k^T`` (B, heads, rows, Sk); its gradients treat non-finite inputs as 0.

    A masked pair has gradient 0, and 0 * NaN would be NaN. Non-finite products are added as a constant.
    """
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if tracing or not torch.is_grad_enabled():  # torch checks a trace without gradients
        return products(q, k)
    with torch.no_grad():
        exact = products(q, k)
    finite = products(*(torch.where(t.isfinite(), t, 0.0) for t in (q, k)))
    return finite + exact.masked_fill(exact.isfinite(), 0.0)
