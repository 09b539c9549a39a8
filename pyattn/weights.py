"""Attention weights of chosen rows and heads, which the native kernels never store, and sums of them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import Unpack

from pyattn import ops
from pyattn.arguments import check_between, check_integers, check_tensor, refuse_positional, shown
from pyattn.autocast import cast, without
from pyattn.derivatives import autograd
from pyattn.derivatives.block import Scores
from pyattn.derivatives.grouped import products
from pyattn.derivatives.tangents import PAIRS_AT_ONCE
from pyattn.dropout import dropout_factor
from pyattn.key_ranges import check_ranges
from pyattn.ops.schema import Options
from pyattn.options import AttentionOptions
from pyattn.parse import parse, takes_options

__all__ = ["attention_weights"]


@takes_options
def attention_weights(
    q: Tensor,
    k: Tensor,
    *positional: object,
    lse: Tensor | None = None,
    heads: Sequence[int] | Tensor | None = None,
    rows: Sequence[int] | Tensor | None = None,
    reduce: Literal["queries", "entropy", None] = None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """The weights of :func:`pyattn.attention` for chosen heads and rows.

    Query ``i`` of head ``h`` has these weights for the keys ``j`` that it sees, and weight 0 for all other keys::

        weights_ij = dropout(exp(score_ij) / (sum_j exp(score_ij) + exp(sinks_h)))        out_i = sum_j weights_ij v_j

    If you pass the options of an :func:`pyattn.attention` call, including its ``dropout_seed``,
    ``attention_weights(...) @ v`` equals the out of that call up to rounding.

    ``reduce`` sums them over the chosen rows, or over the keys::

        reduce="queries"    received_j = sum_i weights_ij                               what each key received
        reduce="entropy"    entropy_i = -sum_j p_ij log(p_ij) - s_i log(s_i)            p: the weights before dropout

    ``s_i = 1 - sum_j p_ij`` is the share of the sink, if there are sinks. So an entropy is at least 0 and at most the
    log of the number of visible keys, plus one with sinks.

    Time is linear in the number of weights, and so is memory without ``reduce``. With it, weights exist for one block
    of rows at a time, in the backward as well, and memory is linear in the lengths; in a compiled graph and in a
    transform of torch.func that differentiates, they are kept.

    Args:
        q, k: as for :func:`pyattn.attention`.
        lse: (B, Hq, Sq), returned by :func:`pyattn.attention` for the same arguments; it already includes sinks. The
            weights are then exp(score - lse). Passing lse saves a pass over the scores, but the weights
            carry its rounding error. Gradients also flow through lse. Default: this function computes each row's
            maximum and sum itself.
        heads: query heads, as ints or an int32 or int64 tensor; negative ones count from the end. Default: all.
        rows: queries, in the same form. Default: all.
        reduce: "queries", "entropy" or None: see above. Default: the weights themselves.
        options: as for :func:`pyattn.attention`. Their shapes are those for all heads and rows.

    Returns:
        The weights (B, len(heads), len(rows), Sk) in q's dtype. For 16-bit types they are computed in float32 and
        rounded once. A query that sees no key has only weights of 0. With ``reduce="queries"`` (B, len(heads), Sk),
        with ``reduce="entropy"`` (B, len(heads), len(rows)), in float32, or float64 for float64; a query that sees no
        key has entropy 0. All are differentiable any number of times.

    Raises:
        ValueError, TypeError, NotImplementedError: as for :func:`pyattn.attention`; a head or row that does not exist;
            another reduce.

    >>> q, k, v = torch.randn(3, 1, 8, 5, 64)
    >>> attention_weights(q, k, heads=[0], rows=[1, -1])[0, 0].count_nonzero(-1)
    tensor([2, 5])
    >>> attention_weights(q, k, reduce="queries").sum(-1)[0, :3].round()  # each of the 5 queries gives 1 in all
    tensor([5., 5., 5.])
    """
    if positional:
        refuse_positional(attention_weights, positional)
    check_tensor("q", q)
    check_tensor("k", k)
    if reduce not in (None, *_REDUCED):
        raise ValueError(f'pyattn: reduce must be "queries", "entropy" or None, got {shown(reduce)}')
    known = Options(*parse(attention_weights, options, q.device))
    q, k = cast(q), cast(k)
    _check(q, k, lse, known)
    head = _chosen("heads", heads, q.shape[1], q.device)
    row = _chosen("rows", rows, q.shape[2], q.device)
    with without(q.device):
        call = _call(q, k, lse, None if heads is None else head, known)
        if reduce is None:
            return _weights(call, row).to(q.dtype)
        return _REDUCED[reduce](call, row)


def _check(q: Tensor, k: Tensor, lse: Tensor | None, options: Options) -> None:
    """Checks q, k and all options by running the operator on meta tensors, on which it computes nothing."""
    if torch.compiler.is_compiling():
        return
    named = zip(Options._fields, options, strict=True)
    meta = [_shape_of(name, t, q.device) if isinstance(t, Tensor) else t for name, t in named]
    q_, k_ = _shape_of("q", q, q.device), _shape_of("k", k, q.device)
    _, rows, *_ = ops.attention_forward(q_, k_, k_[..., :0], *meta)
    if options.key_ranges is not None and options.key_ranges.is_cpu:
        check_ranges(options.key_ranges, k.shape[2])
    if lse is not None:
        check_tensor("lse", lse)
        if lse.shape != rows.shape:
            raise ValueError(f"pyattn: lse must have shape {tuple(rows.shape)}, got {tuple(lse.shape)}")


def _shape_of(name: str, t: Tensor, device: torch.device) -> Tensor:
    """Checks the device and layout of ``t``; returns a meta tensor without the tangent that ``to("meta")`` keeps."""
    if t.layout != torch.strided:
        raise NotImplementedError(f"pyattn: {name} must be a dense tensor, got layout {t.layout}")
    if t.device != device:
        name = name.replace("offsets", "offset")  # the operators' name for a q_offset of each sequence
        raise ValueError(f"pyattn: {name} must be on q's device, got {t.device} and {device}")
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


def _chosen(name: str, chosen: Sequence[int] | Tensor | None, size: int, device: torch.device) -> Tensor:
    """Returns ``chosen`` as indices from 0 to size - 1; None chooses all of them."""
    if chosen is None:
        return torch.arange(size, device=device)
    indices = check_integers(name, chosen, device).to(device)
    check_between(name, indices, -size, size - 1)
    return torch.where(indices < 0, indices + size, indices)


class _Call(NamedTuple):
    """A call of the chosen heads, in float32 or float64.

    Attributes:
        q, k: (B, heads, Sq, D), (B, KV heads, Sk, D).
        lse: (B, heads, Sq), or None.
        head: (heads,), the numbers of the heads among all ``num_heads``.
        options: with the slopes, sinks and relative bias of these heads.
    """

    q: Tensor
    k: Tensor
    lse: Tensor | None
    head: Tensor
    num_heads: int
    options: Options


def _call(q: Tensor, k: Tensor, lse: Tensor | None, head: Tensor | None, options: Options) -> _Call:
    """``head`` chooses heads; None chooses all of them, and no key is copied."""
    wide, num_heads = torch.promote_types(q.dtype, torch.float32), q.shape[1]
    learned = options.alibi_slopes, options.sinks, options.relative_bias
    slopes, sinks, relative = (None if t is None else t.to(wide) for t in learned)
    if head is None:
        head = torch.arange(num_heads, device=q.device)
    else:
        q, k = q.index_select(1, head), k.index_select(1, head // (num_heads // max(1, k.shape[1])))
        lse = None if lse is None else lse.index_select(1, head)
        slopes, sinks = (None if t is None else t.index_select(-1, head) for t in (slopes, sinks))
        if relative is not None and relative.shape[-2] > 1:
            relative = relative.index_select(-2, head)
    lse = None if lse is None else lse.to(wide)
    options = options._replace(alibi_slopes=slopes, sinks=sinks, relative_bias=relative)
    return _Call(q.to(wide), k.to(wide), lse, head, num_heads, options)


def _scores(call: _Call, row: Tensor) -> Scores:
    """The scores (B, heads, rows, Sk) of these rows."""
    pairs = _products(call.q.index_select(2, row), call.k)
    return Scores(pairs, call.options, call.head, row, call.q.shape[2], call.q.shape[3])


def _with_sinks(call: _Call, scores: Tensor) -> Tensor:
    """``scores`` (B, heads, rows, Sk), and the sinks in one more column if there are any."""
    if call.options.sinks is None:
        return scores
    return torch.cat([scores, call.options.sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)


def _weights(call: _Call, row: Tensor) -> Tensor:
    """The weights (B, heads, rows, Sk)."""
    pairs, options = _scores(call, row), call.options
    empty = ~pairs.seen.any(-1, keepdim=True)
    if call.lse is not None:
        total = call.lse.index_select(2, row).unsqueeze(-1)
        weights = torch.exp(pairs.scores - total.masked_fill(empty, 0.0))
    else:
        columns = _with_sinks(call, pairs.scores.masked_fill(empty, 0.0))
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
    empty = ~pairs.seen.any(-1, keepdim=True)
    columns = _with_sinks(call, pairs.scores).masked_fill(empty, 0.0)
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
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not autograd.transforming():
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
