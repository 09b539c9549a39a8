"""Attention weights over jagged nested tensors, sequence by sequence, and sums of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from pyattn import ops
from pyattn.jagged.layout import (
    POSITIONS,
    check_jagged,
    check_same,
    checked_qk,
    like,
    packed,
    packed_ranges,
    without_holes,
)
from pyattn.masks.key_ranges import check_ranges
from pyattn.options.autocast import cast
from pyattn.options.call import Call
from pyattn.options.parse import parse
from pyattn.options.schema import Options, Packing
from pyattn.options.selected_keys import check_packed
from pyattn.options.tensor_types import TAKERS
from pyattn.weights.attention_weights import attention_weights
from pyattn.weights.checks import Reduce, check_call, check_reduce, chosen, shape_of, shapes_of
from pyattn.weights.rows import chosen_weights


def _weights(
    q: Any,
    k: Any,
    *,
    lse: Any,
    heads: Sequence[int] | Tensor | None,
    rows: Sequence[int] | Tensor | None,
    reduce: Reduce,
    **options: Any,
) -> Tensor:
    """:func:`pyattn.attention_weights` over jagged tensors; ``rows`` are those of every sequence."""
    q, k = checked_qk(q, k)
    check_reduce(reduce)
    if reduce in ("heads", None) and rows is None:
        raise NotImplementedError(
            "pyattn: weights of all rows of jagged tensors would be jagged in two dimensions, which torch has no "
            f"layout for: choose rows, or reduce, got rows={rows} and reduce={reduce}"
        )
    if lse is not None:
        check_jagged("lse", lse, 3, POSITIONS, "(batch, heads, j)")
        lse = without_holes("lse", lse)
        check_same("lse", lse, "q", q)
        lse = lse.values()
    options["key_ranges"] = packed_ranges(options.get("key_ranges"), q)
    known = Options(*parse(attention_weights, options, q.device))
    all_q, all_k = cast(packed(q)), cast(packed(k))
    packing = Packing(q.offsets(), k.offsets(), len(all_q), len(all_k))
    _check(all_q, all_k, lse, packing, known)
    head = None if heads is None else chosen("heads", heads, q.shape[1], q.device)
    parts = []
    for sequence in Call(all_q, all_k, all_k, known, packing).sequences():
        own, own_lse = sequence.call, None if lse is None else lse[None, :, sequence.queries]
        if own.options.key_ranges is not None and not q.is_cuda:
            check_ranges(own.options.key_ranges, own.k.shape[2], sequence.number)
        if own.options.selected is not None:
            check_call(own.q, own.k, own_lse, own.options)
        row = chosen("rows", rows, own.q.shape[2], q.device)
        parts.append(chosen_weights(own, own_lse, head, row, reduce)[0])
    if not parts:
        parts.append(_of_no_sequence(q, head, None if reduce == "queries" else rows, reduce, known))
    in_list_order = known.selected is not None and reduce in ("heads", None)
    if in_list_order or (reduce == "entropy" and rows is not None):
        return torch.stack(parts)[: q.shape[0]]
    found = torch.cat(parts, -1)
    return like(found, q if reduce == "entropy" else k, found.dim())


def _of_no_sequence(
    q: Any, head: Tensor | None, rows: Sequence[int] | Tensor | None, reduce: Reduce, options: Options
) -> Tensor:
    """The result of an empty batch as that of one sequence without tokens: (heads, rows if any are chosen, 0)."""
    count = q.shape[1] if head is None else len(head)
    columns = () if reduce == "entropy" and rows is not None else (0,)
    if options.selected is not None and reduce in ("heads", None):
        columns = (options.selected.shape[2] * options.selected_block,)
    chosen_rows = () if rows is None else (len(rows),)
    dtype = q.dtype if reduce is None else torch.promote_types(q.dtype, torch.float32)
    heads = () if reduce == "heads" else (count,)
    nothing: Tensor = q.values().new_zeros(*heads, *chosen_rows, *columns, dtype=dtype)
    return nothing


def _check(q: Tensor, k: Tensor, lse: Tensor | None, packing: Packing, options: Options) -> None:
    """Checks packed q and k and all options but lists by running the operator on meta tensors."""
    if options.selected is not None:
        check_packed(options.selected, len(q))
        options = options._replace(selected=None, selected_block=1)
    q_, k_ = shape_of("q", q, q.device), shape_of("k", k, q.device)
    begins = [shape_of("offsets", t, q.device) for t in packing[:2]]
    _, sums, *_ = ops.attention_varlen_forward(
        q_, k_, k_[..., :0], *begins, *packing[2:], *shapes_of(options, q.device)
    )
    if lse is not None and lse.shape != sums.shape:
        raise ValueError(f"pyattn: lse must have {q.shape[1]} heads like q, got {lse.shape[0]}")


TAKERS.setdefault(NestedTensor, {})["attention_weights"] = _weights
