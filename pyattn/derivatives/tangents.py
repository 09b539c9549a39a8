"""Derivatives of attention's results and gradients along a direction, in torch operations over blocks of query rows.

In the notation of :mod:`pyattn.derivatives.block`, with dout and dlse held constant::

    out = (P D) v                            out' = (P' D) v + (P D) v'
    dP = D (dout v^T)                        dP' = D (dout v'^T)
    delta = rowsum(P dP)                     delta' = rowsum(P' dP + P dP')
    dS = P (dP - delta + dlse)               dS' = P' (dP - delta + dlse) + P (dP' - delta')
    dA = softmax_scale f1 dS                 dA' = softmax_scale (f1 dS' + f2 a' dS)           f2 = df1/da
    dq = dA k                                dq' = dA' k + dA k'
    dk = dA^T q                              dk' = dA'^T q + dA^T q'
    dv = (P D)^T dout                        dv' = (P' D)^T dout
    dbias = dS, dm = -sum dS distance        dbias' = dS', dm' = -sum dS' distance
    dr = sum of dS over the pairs of r       dr' = sum of dS' over the pairs of r
    dn = sum N (dlse - delta)                dn' = sum N' (dlse - delta) - N delta'

Second derivatives are symmetric, so these formulas are double backward too: along the direction of the gradients with
respect to dq, dk, dv and so on, out' and lse' are the gradients of dout and dlse, and dq', dk', dv' those of q, k and
v. Along two directions::

    out'* = (P'* D) v + (P' D) v* + (P* D) v'

Memory is linear in the sequence lengths: :data:`~pyattn.derivatives.block.PAIRS_AT_ONCE` bounds a block. 16-bit types
are computed in float32 and rounded once.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pyattn import ops
from pyattn.derivatives.block import PAIRS_AT_ONCE, Block
from pyattn.derivatives.grouped_products import products
from pyattn.derivatives.learned import Kind, Learned, added
from pyattn.derivatives.second_order import record
from pyattn.options.axes import take
from pyattn.options.call import Call
from pyattn.options.schema import LEARNED, Options


def tangents(call: Call, direction: Learned, other: Learned | None = None) -> tuple[Tensor, Tensor]:
    """out' (B, Hq, Sq, Dv) in q's dtype, and lse' (B, Hq, Sq); along two directions out'* and lse'*."""
    wide = _widened(call)
    direction, other = _cast(direction, wide.q.dtype), None if other is None else _cast(other, wide.q.dtype)
    out, lse = [], []
    for block in _blocks(wide):
        change = block.along(take(direction, rows=block.rows))
        if other is None:
            weights, moved_lse, terms = change.weights, change.lse, [(block.weights, direction.v)]
        else:
            more = block.along(take(other, rows=block.rows))
            weights, moved_lse = block.twice(change, more, direction, other)
            terms = [(change.weights, other.v), (more.weights, direction.v)]
        moved = block.over_keys(block.drop(weights), block.v)
        for pairs, values in terms:
            if values is not None:
                moved = moved + block.over_keys(block.drop(pairs), values)
        out.append(moved.to(call.q.dtype))
        lse.append(moved_lse.squeeze(-1))
    return torch.cat(out, 2), torch.cat(lse, 2)


def gradient_tangents(dout: Tensor, dlse: Tensor | None, call: Call, direction: Learned) -> tuple[Any, ...]:
    """dq', dk', dv', dbias', dm', dn' and dr', each in its tensor's dtype and shape."""
    wide, options = _widened(call), call.options
    direction, dout = _cast(direction, wide.q.dtype), dout.to(wide.q.dtype)
    bias = options.bias
    by_rows = bias is not None and bias.dim() > 1 and bias.shape[-2] != 1
    dq: list[Tensor] = []
    dbias: list[Tensor] = []
    sums: list[Tensor | None] = [None] * (len(Learned._fields) - 1)
    for block in _blocks(wide):
        into = block.of(dout), None if dlse is None else block.of(dlse)
        rows, *rest = _moved_gradients(block, *into, direction, bias, options.relative_bias)
        dq.append(rows)
        if by_rows:
            dbias.append(rest[2])
            rest[2] = None
        sums = [added(x, y) for x, y in zip(sums, rest, strict=True)]
    if by_rows:
        sums[2] = torch.cat(dbias, 2)
    tensors = *call[:3], *(getattr(options, name) for name in LEARNED)
    return tuple(_like(x, t) for x, t in zip((torch.cat(dq, 2), *sums), tensors, strict=True))


def _moved_gradients(
    block: Block, dout: Tensor, dlse: Tensor | None, direction: Learned, bias: Tensor | None, relative: Tensor | None
) -> list[Any]:
    """The block's dq', dk', dv', dbias' summed over dimensions that broadcast, dm' and dn' as (B, Hq), and dr'."""
    change = block.along(take(direction, rows=block.rows))
    dp = block.hide(block.drop(products(dout, block.v)))
    moved_dp = torch.zeros_like(dp)
    if direction.v is not None:
        moved_dp = block.hide(block.drop(products(dout, direction.v)))
    delta = (block.weights * dp).sum(-1, keepdim=True)
    moved_delta = (change.weights * dp + block.weights * moved_dp).sum(-1, keepdim=True)
    into_lse = -delta if dlse is None else dlse.unsqueeze(-1) - delta
    ds = block.hide(block.weights * (dp + into_lse))
    moved_ds = block.hide(change.weights * (dp + into_lse) + block.weights * (moved_dp - moved_delta))
    da, moved_da = block.scale * ds, block.scale * moved_ds
    if block.cap is not None:
        slope, bend = block.cap
        da, moved_da = slope * da, slope * moved_da + bend * change.products * da
    dq, dk = block.over_keys(moved_da, block.k), block.over_rows(moved_da, block.q)
    if direction.k is not None:
        dq = dq + block.over_keys(da, direction.k)
    if direction.q is not None:
        dk = dk + block.over_rows(da, block.of(direction.q))
    dv = block.over_rows(block.drop(change.weights), dout)
    dbias = dslopes = dsinks = drelative = None
    if bias is not None:
        sizes = zip((1,) * (4 - bias.dim()) + tuple(bias.shape), moved_ds.shape, strict=True)
        dbias = moved_ds.sum_to_size([1 if own == 1 else full for own, full in sizes])
    if block.distance is not None:
        dslopes = -(moved_ds * block.distance).sum((-2, -1))
    if change.sink_weight is not None and block.sink_weight is not None:
        dsinks = (change.sink_weight * into_lse - block.sink_weight * moved_delta).sum((-2, -1))
    if block.places is not None and relative is not None:
        index = block.places.flatten(2).expand(*moved_ds.shape[:2], -1)
        zeros = moved_ds.new_zeros(*moved_ds.shape[:2], relative.shape[-1])
        drelative = zeros.scatter_add(-1, index, moved_ds.flatten(2))
    return [dq, dk, dv, dbias, dslopes, dsinks, drelative]


def _like(gradient: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    """``gradient`` in the tensor's shape and dtype."""
    return None if gradient is None or tensor is None else gradient.sum_to_size(tensor.shape).to(tensor.dtype)


def _blocks(call: Call) -> Iterator[Block]:
    """All rows of a call; a call without rows yields one empty block, so that results have shapes."""
    batch, num_heads, seqlen_q, _ = call.q.shape
    step = max(1, PAIRS_AT_ONCE // max(1, batch * num_heads * call.k.shape[2]))
    for begin in range(0, max(1, seqlen_q), step):
        rows = slice(begin, min(begin + step, seqlen_q))
        yield Block(*call[:3], take(call.options, rows=rows), rows)


def _widened(call: Call) -> Call:
    """All inputs in float32 or float64, except bias: each block casts its own part."""
    wide = torch.promote_types(call.q.dtype, torch.float32)
    learned = {name: getattr(call.options, name) for name in LEARNED[1:]}
    cast = {name: None if t is None else t.to(wide) for name, t in learned.items()}
    q, k, v = (t.to(wide) for t in call[:3])
    return Call(q, k, v, call.options._replace(**cast))


def _cast(direction: Learned, dtype: torch.dtype) -> Learned:
    """The direction in ``dtype``, except bias: each block casts its own part."""
    own = {name: t.to(dtype) for name, t in direction._asdict().items() if t is not None and name != "bias"}
    return direction._replace(**own)


def _call(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> Call:
    return Call(q, k, v, Options(*values))


DENSE = Kind(
    ops.attention,
    ops.attention_forward,
    ops.attention_backward,
    _call,
    tangents,
    gradient_tangents,
    options_at=0,
    attend_for_out=ops.attention_of_few_options,
)
record(DENSE, ops.attention_recorded_backward)
