"""The tangents of packed sequences, computed by :mod:`pyattn.derivatives.tangents` sequence by sequence."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyattn import ops
from pyattn.derivatives import tangents as dense
from pyattn.derivatives.learned import Kind, Learned
from pyattn.options.axes import AXES, dims_of, take
from pyattn.options.schema import LEARNED, PLACES, Options, Packing
from pyattn.options.sequences import Sequence, sequences


def _of(sequence: Sequence, *qkv: Tensor | None) -> tuple[Any, Any, Any]:
    """The sequence's share of q, k and v or of their tangents, as a batch of one."""
    places = sequence.queries, sequence.keys, sequence.keys
    q, k, v = (None if t is None else _alone(t, at) for t, at in zip(qkv, places, strict=True))
    return q, k, v


def _direction(sequence: Sequence, packed: Learned) -> Learned:
    """The sequence's share of a direction."""
    learned = take(packed, batch=slice(sequence.number, sequence.number + 1), packed=True)
    return Learned(*_of(sequence, *packed[:3]), *learned[3:])


def tangents(
    q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...], direction: Learned, other: Learned | None = None
) -> tuple[Tensor, Tensor]:
    """out' (tokens, Hq, Dv) and lse' (Hq, tokens); along two directions out'* and lse'*."""
    out, lse = [], []
    packing, options = _unpacked(rest)
    for sequence in sequences(packing, options, q.shape[1]):
        along, more = _direction(sequence, direction), None if other is None else _direction(sequence, other)
        moved = dense.tangents(*_of(sequence, q, k, v), sequence.options, along, more)
        out.append(moved[0][0].transpose(0, 1))
        lse.append(moved[1][0])
    tail = len(q) - sum(len(t) for t in out)
    out.append(q.new_zeros(tail, q.shape[1], v.shape[2]))
    lse.append(q.new_zeros(q.shape[1], tail, dtype=torch.promote_types(q.dtype, torch.float32)))
    return torch.cat(out), torch.cat(lse, 1)


def gradient_tangents(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...], direction: Learned
) -> tuple[Any, ...]:
    """dq', dk' and dv' shaped like q, k and v, None for bias, dm', dn' and dr' shaped like their tensors."""
    dq, dk, dv = [], [], []
    learned: dict[str, list[Tensor]] = {name: [] for name in LEARNED[1:]}
    packing, options = _unpacked(rest)
    for sequence in sequences(packing, options, q.shape[1]):
        into_out, into_lse = _alone(dout, sequence.queries), None if dlse is None else dlse[None, :, sequence.queries]
        inputs = *_of(sequence, q, k, v), sequence.options, _direction(sequence, direction)
        moved = dense.gradient_tangents(into_out, into_lse, *inputs)
        moved_q, moved_k, moved_v = (x[0].transpose(0, 1) for x in moved[:3])
        dq.append(moved_q)
        dk.append(pad(moved_k, (0, 0, 0, 0, 0, sequence.unused)))
        dv.append(pad(moved_v, (0, 0, 0, 0, 0, sequence.unused)))
        for parts, own_part in zip(learned.values(), moved[4:], strict=True):
            parts.append(own_part)
    for parts, tensor in ((dq, q), (dk, k), (dv, v)):
        parts.append(tensor.new_zeros(len(tensor) - sum(len(part) for part in parts), *tensor.shape[1:]))
    more = [_joined(parts, getattr(options, name), AXES[name]) for name, parts in learned.items()]
    return torch.cat(dq), torch.cat(dk), torch.cat(dv), None, *more


def _unpacked(rest: tuple[Any, ...]) -> tuple[Packing, Options]:
    count = len(Packing._fields)
    return Packing(*rest[:count]), Options(*rest[count:])


def _alone(tokens: Tensor, at: slice) -> Tensor:
    """(tokens, H, C) -> (1, H, the sequence's tokens, C)."""
    return tokens[at].transpose(0, 1)[None]


def _joined(parts: list[Tensor], tensor: Tensor | None, axes: str) -> Tensor | None:
    """The sequences' gradients of a tensor: joined if each sequence has its own, else summed."""
    if tensor is None:
        return None
    if not parts:
        return torch.zeros_like(tensor)
    return torch.cat(parts) if "b" in dims_of(axes, tensor) else torch.stack(parts).sum(0)


PACKED = Kind(
    ops.attention_varlen_forward,
    ops.attention_varlen_backward,
    tangents,
    gradient_tangents,
    len(Packing._fields) + PLACES[LEARNED[0]],
    len(Packing._fields) + len(PLACES),
)
