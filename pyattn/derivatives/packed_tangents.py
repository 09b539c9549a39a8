"""The tangents of packed sequences, computed by :mod:`pyattn.derivatives.tangents` sequence by sequence."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyattn import ops
from pyattn.derivatives import tangents as dense
from pyattn.derivatives.autograd import attend
from pyattn.derivatives.learned import Kind, Learned
from pyattn.derivatives.second_order import record
from pyattn.options.axes import AXES, dims_of, take
from pyattn.options.call import Call, Sequence, as_batch
from pyattn.options.schema import LEARNED, Options, Packing
from pyattn.options.selected_keys import check_packed


def _direction(sequence: Sequence, packed: Learned) -> Learned:
    """The sequence's part of a direction."""
    places = sequence.queries, sequence.keys, sequence.keys
    q, k, v = (None if t is None else as_batch(t, at) for t, at in zip(packed[:3], places, strict=True))
    learned = take(packed, batch=slice(sequence.number, sequence.number + 1), packed=True)
    return Learned(q, k, v, *learned[3:])


def tangents(call: Call, direction: Learned, other: Learned | None = None) -> tuple[Tensor, Tensor]:
    """out' (tokens, Hq, Dv) and lse' (Hq, tokens); along two directions out'* and lse'*."""
    q, v = call.q, call.v
    out, lse = [], []
    for sequence in call.sequences():
        along, more = _direction(sequence, direction), None if other is None else _direction(sequence, other)
        moved = dense.tangents(sequence.call, along, more)
        out.append(moved[0][0].transpose(0, 1))
        lse.append(moved[1][0])
    tail = len(q) - sum(len(t) for t in out)
    out.append(q.new_zeros(tail, q.shape[1], v.shape[2]))
    lse.append(q.new_zeros(q.shape[1], tail, dtype=torch.promote_types(q.dtype, torch.float32)))
    return torch.cat(out), torch.cat(lse, 1)


def one_by_one(call: Call) -> tuple[Tensor, ...]:
    """(out, lse, row_max, row_sum) of packed sequences, each in a separate call: for what no packed kernel computes."""
    _check(call)
    rows = call.q.new_zeros(call.q.shape[1], 0, dtype=torch.promote_types(call.q.dtype, torch.float32))
    parts = [[call.q.new_zeros(0, call.q.shape[1], call.v.shape[2])], [rows], [rows], [rows]]
    for sequence in call.sequences():
        q, k, v, options, _ = sequence.call
        out, *statistics = attend(dense.DENSE, q, k, v, tuple(options))
        for found, part in zip(parts, (out[0].transpose(0, 1), *(t[0] for t in statistics)), strict=True):
            found.append(part)
    out, *statistics = torch.cat(parts[0]), *(torch.cat(part, 1) for part in parts[1:])
    if len(parts[0]) == 1:  # no sequence connects the results with the inputs
        learned = (getattr(call.options, name) for name in LEARNED)
        zero = sum(t[:0].sum() for t in (*call[:3], *learned) if t is not None)
        out, statistics[0] = out + zero, statistics[0] + zero
    tail = len(call.q) - len(out)
    fill = zip(statistics, (-math.inf, -math.inf, 0.0), strict=True)
    return pad(out, (0, 0, 0, 0, 0, tail)), *(pad(t, (0, tail), value=value) for t, value in fill)


def _check(call: Call) -> None:
    """The checks of packed sequences: by their operator, on tensors without columns and a window of a single key."""
    q, k, v, options, packing = call
    assert packing is not None
    check_packed(options.selected, len(q))
    detached = {name: t.detach() for name in LEARNED if (t := getattr(options, name)) is not None}
    known = options._replace(**detached, selected=None, window=(0, 0), dropout_p=0.0)
    with torch.no_grad():
        ops.attention_varlen_forward(*(t.detach()[..., :0] for t in (q, k, v)), *packing, *known)


def gradient_tangents(dout: Tensor, dlse: Tensor | None, call: Call, direction: Learned) -> tuple[Any, ...]:
    """dq', dk' and dv' shaped like q, k and v, None for bias, dm', dn' and dr' shaped like their tensors."""
    dq, dk, dv = [], [], []
    learned: dict[str, list[Tensor]] = {name: [] for name in LEARNED[1:]}
    for sequence in call.sequences():
        into_out = as_batch(dout, sequence.queries)
        into_lse = None if dlse is None else dlse[None, :, sequence.queries]
        moved = dense.gradient_tangents(into_out, into_lse, sequence.call, _direction(sequence, direction))
        moved_q, moved_k, moved_v = (x[0].transpose(0, 1) for x in moved[:3])
        dq.append(moved_q)
        dk.append(pad(moved_k, (0, 0, 0, 0, 0, sequence.unused)))
        dv.append(pad(moved_v, (0, 0, 0, 0, 0, sequence.unused)))
        for parts, own_part in zip(learned.values(), moved[4:], strict=True):
            parts.append(own_part)
    for parts, tensor in ((dq, call.q), (dk, call.k), (dv, call.v)):
        parts.append(tensor.new_zeros(len(tensor) - sum(len(part) for part in parts), *tensor.shape[1:]))
    more = [_joined(parts, getattr(call.options, name), AXES[name]) for name, parts in learned.items()]
    return torch.cat(dq), torch.cat(dk), torch.cat(dv), None, *more


def _joined(parts: list[Tensor], tensor: Tensor | None, axes: str) -> Tensor | None:
    """The sequences' gradients of a tensor: joined if each sequence has its own, else summed."""
    if tensor is None:
        return None
    if not parts:
        return torch.zeros_like(tensor)
    return torch.cat(parts) if "b" in dims_of(axes, tensor) else torch.stack(parts).sum(0)


def _call(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> Call:
    return Call(q, k, v, Options(*values[_OPTIONS_AT:]), Packing(*values[:_OPTIONS_AT]))


_OPTIONS_AT = len(Packing._fields)
PACKED = Kind(
    ops.attention_varlen,
    ops.attention_varlen_forward,
    ops.attention_varlen_backward,
    _call,
    tangents,
    gradient_tangents,
    _OPTIONS_AT,
)
record(PACKED, ops.attention_varlen_recorded_backward)
