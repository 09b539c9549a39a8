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
from pyattn.options.axes import take
from pyattn.options.checks import check_between, check_integers, shown
from pyattn.options.dropout import dropout_factor
from pyattn.options.schema import LEARNED, Options

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


def chosen_weights(
    q: Tensor, k: Tensor, lse: Tensor | None, heads: Tensor | None, rows: Tensor, reduce: Reduce, options: Options
) -> Tensor:
    """:func:`pyattn.attention_weights` of checked arguments; heads None: all, without copying a key."""
    with without(q.device):
        call = _call(q, k, lse, heads, options)
        return _weights(call, rows).to(q.dtype) if reduce is None else _REDUCED[reduce](call, rows)


class _Call(NamedTuple):
    """A call of the chosen heads, in float32 or float64.

    Attributes:
        q, k: (B, heads, Sq, D), (B, KV heads, Sk, D).
        lse: (B, heads, Sq), or None.
        head: (heads,), the numbers of the heads among all ``num_heads``; None: all.
        options: of all heads, LEARNED but bias in the dtype of q.
    """

    q: Tensor
    k: Tensor
    lse: Tensor | None
    head: Tensor | None
    num_heads: int
    options: Options


def _call(q: Tensor, k: Tensor, lse: Tensor | None, head: Tensor | None, options: Options) -> _Call:
    """``head`` chooses heads; None chooses all of them, and no key is copied."""
    wide, num_heads = torch.promote_types(q.dtype, torch.float32), q.shape[1]
    if head is not None:
        q, k = q.index_select(1, head), k.index_select(1, head // (num_heads // max(1, k.shape[1])))
        lse = None if lse is None else lse.index_select(1, head)
    lse = None if lse is None else lse.to(wide)
    learned = {name: getattr(options, name) for name in LEARNED[1:]}  # each block casts its own part of bias
    options = options._replace(**{name: t.to(wide) for name, t in learned.items() if t is not None})
    return _Call(q.to(wide), k.to(wide), lse, head, num_heads, options)


def _scores(call: _Call, row: Tensor) -> Scores:
    """The scores (B, heads, rows, Sk) of these rows."""
    pairs = _products(call.q.index_select(2, row), call.k)
    options = take(call.options, heads=call.head, rows=row)
    head = torch.arange(call.num_heads, device=row.device) if call.head is None else call.head
    return Scores(pairs, options, head, row, call.q.shape[2], call.q.shape[3])


def _with_sinks(pairs: Scores, scores: Tensor) -> Tensor:
    """``scores`` (B, heads, rows, Sk), and the sinks in one more column if there are any."""
    sinks = pairs.options.sinks
    if sinks is None:
        return scores
    return torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)


def _weights(call: _Call, row: Tensor) -> Tensor:
    """The weights (B, heads, rows, Sk)."""
    pairs, options = _scores(call, row), call.options
    empty = ~pairs.visible.any(-1, keepdim=True)
    if call.lse is not None:
        total = call.lse.index_select(2, row).unsqueeze(-1)
        weights = torch.exp(pairs.scores - total.masked_fill(empty, 0.0))
    else:
        columns = _with_sinks(pairs, pairs.scores.masked_fill(empty, 0.0))
        weights = torch.softmax(columns, -1)[..., : call.k.shape[2]]
    weights = pairs.hide(weights)
    if options.dropout_p:
        kept = pairs.kept(call.q.shape[0], call.num_heads)
        weights = weights.masked_fill(~kept, 0.0) * dropout_factor(options.dropout_p)
    return weights


def _received(call: _Call, row: Tensor) -> Tensor:
    """(B, heads, Sk): the sums of these rows' weights."""
    return _weights(call, row).sum(2)


def _entropies(call: _Call, row: Tensor) -> Tensor:
    """(B, heads, rows): 0 for a row that sees no key, whatever its sink."""
    pairs = _scores(call, row)
    empty = ~pairs.visible.any(-1, keepdim=True)
    columns = _with_sinks(pairs, pairs.scores).masked_fill(empty, 0.0)
    if call.lse is None:
        logs = torch.log_softmax(columns, -1)
    else:
        logs = columns - call.lse.index_select(2, row).unsqueeze(-1).masked_fill(empty, 0.0)
    weights = torch.exp(logs)
    terms = weights * logs.masked_fill(weights == 0, 0.0)  # x log x is 0 at 0, where log x is -inf
    return -terms.sum(-1).masked_fill(empty.squeeze(-1), 0.0)


def _by_blocks(reduced: Callable[[_Call, Tensor], Tensor], call: _Call, row: Tensor) -> list[Tensor]:
    """``reduced`` of blocks of rows; a backward computes each block again instead of keeping its weights."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return [reduced(call, row)]  # a trace would unroll the loop for one length
    step = max(1, PAIRS_AT_ONCE // max(1, call.q.shape[0] * call.q.shape[1] * call.k.shape[2]))
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not transforming():
        reduced = partial(checkpoint, reduced, use_reentrant=False, preserve_rng_state=False)
    return [reduced(call, some) for some in row.split(step)]


def _sum_over_rows(call: _Call, row: Tensor) -> Tensor:
    first, *others = _by_blocks(_received, call, row)
    return sum(others, first)


def _entropy(call: _Call, row: Tensor) -> Tensor:
    return torch.cat(_by_blocks(_entropies, call, row), -1)


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
