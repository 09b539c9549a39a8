"""Attention weights of chosen rows and heads, which the native kernels never store, and sums of them."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from typing_extensions import Unpack

from pyattn.derivatives.transforms import check_not_nested, transforming
from pyattn.leading_dimensions import by_batches
from pyattn.options.attention_options import AttentionOptions
from pyattn.options.autocast import cast
from pyattn.options.call import Call
from pyattn.options.checks import check_tensor, refuse_positional
from pyattn.options.parse import parse, takes_options
from pyattn.options.schema import Options
from pyattn.options.tensor_types import CACHES, KeyCache, check_outside, taken
from pyattn.weights.checks import Reduce, check_call, check_reduce, chosen
from pyattn.weights.rows import chosen_weights

__all__ = ["attention_weights"]


@takes_options
def attention_weights(
    q: Tensor,
    k: Tensor | KeyCache,
    *positional: object,
    lse: Tensor | None = None,
    heads: Sequence[int] | Tensor | None = None,
    rows: Sequence[int] | Tensor | None = None,
    reduce: Reduce = None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """The weights of :func:`pyattn.attention` for chosen heads and rows.

    Query ``i`` of head ``h`` has these weights for the keys ``j`` that it sees, and weight 0 for all other keys::

        weights_ij = dropout(exp(score_ij) / (sum_j exp(score_ij) + exp(sinks_h)))        out_i = sum_j weights_ij v_j

    If you pass the options of an :func:`pyattn.attention` call, including its ``dropout_seed``,
    ``attention_weights(...) @ v`` equals the out of that call up to rounding.

    ``reduce`` sums them over the chosen rows, over the chosen heads, or over the keys::

        reduce="queries"    received_j = sum_i weights_ij                               what each key received
        reduce="heads"      total_ij = sum_h weights_hij                                what each query gives each key
        reduce="entropy"    entropy_i = -sum_j p_ij log(p_ij) - s_i log(s_i)            p: the weights before dropout

    ``s_i = 1 - sum_j p_ij`` is the share of the sink, if there are sinks. So an entropy is at least 0 and at most the
    log of the number of visible keys, plus one with sinks.

    Time is linear in the number of weights, with ``selected`` in that of the listed keys, and so is memory without
    ``reduce``. With it, weights exist for one block of rows at a time, in the backward as well, and memory is linear in
    the lengths, for ``reduce="heads"`` plus its result; in a compiled graph and in a transform of torch.func that
    differentiates, they are kept.

    Args:
        q: as for :func:`pyattn.attention`.
        k: the same; or a :class:`pyattn.KVCache` of any kind, whose keys q sees as in
            :func:`pyattn.attention_with_cache`, with its options.
        lse: (B, Hq, Sq), returned by :func:`pyattn.attention` for the same arguments; it already includes sinks. The
            weights are then exp(score - lse). Passing lse saves a pass over the scores, but the weights
            carry its rounding error. Gradients also flow through lse. Default: this function computes each row's
            maximum and sum itself.
        heads: query heads, as ints or an int32 or int64 tensor; negative ones count from the end. Default: all.
        rows: queries, in the same form. Default: all.
        reduce: "queries", "heads", "entropy" or None: see above. Default: the weights themselves.
        options: as for :func:`pyattn.attention`. Their shapes are those for all heads and rows.

    Returns:
        The weights (B, len(heads), len(rows), Sk) in q's dtype. With ``selected``, (B, len(heads), len(rows), n *
        selected_block) in the order of the lists, 0 at entries of -1 and where a key repeats. For 16-bit types they are
        computed in float32 and rounded once. A query that sees no key has only weights of 0. With ``reduce="queries"``
        (B, len(heads), Sk), with ``reduce="heads"`` those of one head, (B, len(rows), Sk) or in the order of one list
        for all heads, with ``reduce="entropy"`` (B, len(heads), len(rows)), in float32, or float64 for float64; a query
        that sees no key has entropy 0. All are differentiable any number of times.

    Over a cache, results are indexed by position: Sk is the length of the longest sequence, and positions that a ring
    buffer no longer keeps have weight 0. ``lse`` is the one that :func:`pyattn.attention_with_cache` returned. The host
    reads the lengths.

    q and k may have more leading dimensions, as for :func:`pyattn.attention`; the results have these in place of B.

    q and k may be jagged nested tensors, as for :func:`pyattn.attention`; lse is then jagged too. ``rows`` are those of
    every sequence. Results that have keys share the offsets of k: (B, heads, j) with ``reduce="queries"``, (B, rows, j)
    with ``reduce="heads"``, (B, heads, rows, j) without reduce. Entropies of all rows share those of q. Weights
    in the order of lists are no nested tensors. The host reads the offsets.

    Raises:
        ValueError, TypeError, NotImplementedError: as for :func:`pyattn.attention`; a head or row that does not exist;
            another reduce; ``reduce="heads"`` with lists of each head; over a cache, as for
            :func:`pyattn.attention_with_cache`, and q that is jagged or has other than 4 dimensions; jagged q and k
            with weights of all rows: torch has no layout for j x j weights.

    >>> q, k, v = torch.randn(3, 1, 8, 5, 64)
    >>> attention_weights(q, k, heads=[0], rows=[1, -1])[0, 0].count_nonzero(-1)
    tensor([2, 5])
    >>> attention_weights(q, k, reduce="queries").sum(-1)[0, :3].round()  # each of the 5 queries gives 1 in all
    tensor([5., 5., 5.])
    """
    if positional:
        refuse_positional(attention_weights, positional)
    check_outside("attention_weights")
    if isinstance(k, KeyCache):
        found = CACHES["attention_weights"](q, k, lse=lse, heads=heads, rows=rows, reduce=reduce, **options)
        assert isinstance(found, Tensor)
        return found
    if not torch.compiler.is_compiling() and transforming():
        check_not_nested(q=q, k=k)
    if type(q) is not Tensor:
        found = taken("attention_weights", q, k, lse=lse, heads=heads, rows=rows, reduce=reduce, **options)
        if found is not None:
            assert isinstance(found, Tensor)
            return found
    check_tensor("q", q)
    check_tensor("k", k)
    check_reduce(reduce)
    known = Options(*parse(attention_weights, options, q.device))
    q, k = cast(q), cast(k)
    compute = partial(_of_batch, heads=heads, rows=rows, reduce=reduce)
    if q.dim() <= 4 and k.dim() <= 4:
        return compute(q, k, known, lse)[0]
    if lse is not None:
        check_tensor("lse", lse)
    tensors = {name: t for name, t in (("q", q), ("k", k), ("lse", lse)) if t is not None}
    return by_batches(compute, tensors, known)[0]


def _of_batch(
    q: Tensor,
    k: Tensor,
    options: Options,
    lse: Tensor | None = None,
    *,
    heads: Sequence[int] | Tensor | None,
    rows: Sequence[int] | Tensor | None,
    reduce: Reduce,
) -> tuple[Tensor]:
    check_call(q, k, lse, options)
    head = None if heads is None else chosen("heads", heads, q.shape[1], q.device)
    row = chosen("rows", rows, q.shape[2], q.device)
    return (chosen_weights(Call(q, k, k, options), lse, head, row, reduce),)
