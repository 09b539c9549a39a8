"""The tangents of packed sequences: those of :mod:`pyattn.derivatives.tangents`, sequence by sequence."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyattn import ops
from pyattn.derivatives import tangents as dense
from pyattn.derivatives.kind import Kind, Learned
from pyattn.ops.schema import LEARNED, PLACES, Options, Packing


class Sequence(NamedTuple):
    """Sequence ``number`` of a call: where its queries and its keys lie, ``unused`` ones behind them, its options."""

    number: int
    queries: slice
    keys: slice
    unused: int
    options: Options

    def alone(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As a batch of one."""
        return _alone(q, self.queries), _alone(k, self.keys), _alone(v, self.keys)

    def direction(self, packed: Learned) -> Learned:
        """Its share of a direction."""
        places = self.queries, self.keys, self.keys
        q, k, v = (None if t is None else _alone(t, at) for t, at in zip(packed[:3], places, strict=True))
        return Learned(q, k, v, None, _own(packed.alibi_slopes, self.number, 2), packed.sinks)


def tangents(
    q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...], direction: Learned, other: Learned | None = None
) -> tuple[Tensor, Tensor]:
    """out' (tokens, Hq, Dv) and lse' (Hq, tokens); along two directions out'* and lse'*."""
    out, lse = [], []
    for sequence in _sequences(rest):
        own, more = sequence.direction(direction), None if other is None else sequence.direction(other)
        moved = dense.tangents(*sequence.alone(q, k, v), sequence.options, own, more, sequence.number)
        out.append(moved[0][0].transpose(0, 1))
        lse.append(moved[1][0])
    tail = len(q) - sum(len(t) for t in out)
    out.append(q.new_zeros(tail, q.shape[1], v.shape[2]))
    lse.append(q.new_zeros(q.shape[1], tail, dtype=torch.promote_types(q.dtype, torch.float32)))
    return torch.cat(out), torch.cat(lse, 1)


def gradient_tangents(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...], direction: Learned
) -> tuple[Any, ...]:
    """dq', dk' and dv' like q, k and v, None for a bias, dm' and dn' like slopes and sinks."""
    dq, dk, dv = [], [], []
    dslopes: list[Tensor] = []
    dsinks: list[Tensor] = []
    for sequence in _sequences(rest):
        into_out, into_lse = _alone(dout, sequence.queries), None if dlse is None else dlse[None, :, sequence.queries]
        own, options, number = sequence.direction(direction), sequence.options, sequence.number
        moved = dense.gradient_tangents(into_out, into_lse, *sequence.alone(q, k, v), options, own, number)
        moved_q, moved_k, moved_v = (x[0].transpose(0, 1) for x in moved[:3])
        dq.append(moved_q)
        dk.append(pad(moved_k, (0, 0, 0, 0, 0, sequence.unused)))
        dv.append(pad(moved_v, (0, 0, 0, 0, 0, sequence.unused)))
        dslopes.append(moved[4])
        dsinks.append(moved[5])
    for parts, tensor in ((dq, q), (dk, k), (dv, v)):
        parts.append(tensor.new_zeros(len(tensor) - sum(len(part) for part in parts), *tensor.shape[1:]))
    options = Options(*rest[len(Packing._fields) :])
    more = _joined(dslopes, options.alibi_slopes), _joined(dsinks, options.sinks)
    return torch.cat(dq), torch.cat(dk), torch.cat(dv), None, *more


def _alone(tokens: Tensor, at: slice) -> Tensor:
    """(tokens, H, C) -> (1, H, the sequence's tokens, C)."""
    return tokens[at].transpose(0, 1)[None]


def _own(tensor: Tensor | None, number: int, dims: int) -> Tensor | None:
    """The part for one sequence of what has ``dims`` dimensions where each sequence has its own."""
    return tensor if tensor is None or tensor.dim() < dims else tensor[number, None]


def _joined(parts: list[Tensor], tensor: Tensor | None) -> Tensor | None:
    """What the sequences give to slopes or sinks that they share or have each their own of."""
    if tensor is None:
        return None
    if not parts:
        return torch.zeros_like(tensor)
    return torch.cat(parts) if tensor.dim() == 2 else torch.stack(parts).sum(0)


def _sequences(rest: tuple[Any, ...]) -> Iterator[Sequence]:
    count = len(Packing._fields)
    packing, options = Packing(*rest[:count]), Options(*rest[count:])
    starts_q, starts_k = packing.cu_seqlens_q.tolist(), packing.cu_seqlens_k.tolist()
    used = packing.cu_seqlens_k.diff() if packing.seqused_k is None else packing.seqused_k
    for b, keys in enumerate(used.tolist()):
        queries = slice(starts_q[b], starts_q[b + 1])
        own = options._replace(
            q_offsets=_own(options.q_offsets, b, 1),
            key_ranges=None if options.key_ranges is None else options.key_ranges[None, queries],
            alibi_slopes=_own(options.alibi_slopes, b, 2),
        )
        yield Sequence(b, queries, slice(starts_k[b], starts_k[b] + keys), starts_k[b + 1] - starts_k[b] - keys, own)


PACKED = Kind(
    ops.attention_varlen_forward,
    ops.attention_varlen_backward,
    tangents,
    gradient_tangents,
    len(Packing._fields) + PLACES[LEARNED[0]],
    len(Packing._fields) + len(PLACES),
)
