"""Shares: attention of one chunk of queries over one chunk of keys, as an ordinary call whose positions are shifted."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyattn import ops
from pyattn.distributed.packing import Packing
from pyattn.distributed.partial_results import Rows
from pyattn.options.schema import LEARNED, Options

INT64 = torch.iinfo(torch.int64)

Wanted = Sequence[bool]


def span(offset: Tensor | int) -> tuple[int, int]:
    """The least and the largest of the sequences' offsets."""
    if isinstance(offset, Tensor):
        low, high = offset.aminmax() if len(offset) else (0, 0)
        return int(low), int(high)
    return offset, offset


def moved(offset: Tensor, by: Tensor) -> Tensor:
    """``offset + by``, or the ends of int64 beyond which that lies."""
    return offset.clamp(INT64.min - by.clamp(max=0), INT64.max - by.clamp(min=0)) + by


def seen_keys(queries: range, keys: range, offsets: tuple[int, int], causal: bool, window: Sequence[int]) -> range:
    """The keys from the first to the last that causal and the window let any of these queries see."""
    if not (queries and keys):
        return range(0)
    left, right = window
    first, last = queries[0] + offsets[0], queries[-1] + offsets[1]
    ends = [last + most + 1 for most, bounded in ((0, causal), (right, right >= 0)) if bounded]
    begin = keys.start if left < 0 else max(keys.start, first - left)
    return range(begin, max(begin, min([keys.stop, *ends])))


def origins_of(options: Options, num_heads_q: int, device: torch.device) -> Tensor:
    """dropout_origins: those given, or (1, 5) of a call of its own."""
    given: Tensor | None = options.dropout_origins
    return torch.tensor([[0, num_heads_q, 0, 0, 0]], device=device) if given is None else given


class Place(NamedTuple):
    """A share: where its queries lie in the rank's part, their positions, its keys, and whether it is their first."""

    rows: slice
    queries: range
    keys: range
    first: bool


class Dense:
    """Batches: (B, H, S, D).

    Attributes:
        dim: the dimension of the sequence in q, k, v and out.
        row_dim: that in lse.
    """

    dim: int = 2
    row_dim: int = 2
    _forward: Callable[..., Any] = ops.attention_forward
    _backward: Callable[..., Any] = ops.attention_backward

    def __init__(self, options: Options, num_heads_q: int, seqlen_q: int, seqlen_k: int) -> None:
        self.options: Options = options
        self.num_heads_q: int = num_heads_q
        self.num_keys: int = seqlen_k
        offsets = options.q_offsets
        self.offset: Tensor | int = options.offset_for(seqlen_q, seqlen_k) if offsets is None else offsets
        self.offsets: tuple[int, int] = span(self.offset)

    def seen(self, queries: range, keys: range) -> range:
        """The keys of a chunk that queries of another may see, as far as all ranks know."""
        return seen_keys(queries, keys, self.offsets, self.options.causal, self.options.window)

    def _part(self, tensor: Tensor | None, place: Place) -> Tensor | None:
        """A share's rows and columns of a mask, a bias or its gradient, which may broadcast."""
        if tensor is None:
            return None
        if tensor.dim() > 1 and tensor.shape[-2] != 1:
            tensor = tensor[..., place.rows, :]
        by_key = tensor.shape[-1] != 1 or self.num_keys == 1
        return tensor[..., place.keys.start : place.keys.stop] if by_key else tensor

    def learned(self) -> tuple[Tensor | None, ...]:
        """The options that have gradients."""
        return tuple(getattr(self.options, name) for name in LEARNED)

    def of_rows(self, tensor: Tensor, place: Place) -> Tensor:
        """A share's rows of q, or of a tensor like it."""
        return tensor.narrow(self.dim, place.rows.start, len(place.queries))

    def parts_of(self, totals: Sequence[Tensor | None], place: Place) -> list[Tensor | None]:
        """A share's parts of the gradients of :meth:`learned`."""
        bias, slopes, sinks, relative = totals
        return [self._part(bias, place), slopes, sinks if place.first else None, relative]

    def shifted(self, place: Place) -> Options:
        """The options of a share; the first one of a row alone has the sinks."""
        options, (rows, queries, keys, first) = self.options, place
        ahead, offset = queries.start - keys.start, self.offset
        if isinstance(offset, Tensor):
            offset = moved(offset, offset.new_tensor(ahead))
        else:
            offset = max(INT64.min, min(INT64.max, offset + ahead))
        ranges = options.key_ranges
        known: Options = options._replace(
            q_offset=None if isinstance(offset, Tensor) else offset,
            q_offsets=offset if isinstance(offset, Tensor) else None,
            key_ranges=None if ranges is None else (ranges[:, rows] - keys.start).clamp(0, len(keys)),
            mask=self._part(options.mask, place),
            bias=self._part(options.bias, place),
            sinks=options.sinks if first else None,
            **self._drawn([[0, 0, 0, queries.start, keys.start]]),
        )
        return known

    def _drawn(self, later: list[list[int]]) -> dict[str, Tensor]:
        """dropout_origins of a share, whose rows begin that much later."""
        if not self.options.dropout_p:
            return {}
        base = origins_of(self.options, self.num_heads_q, self.options.dropout_seed.device)
        return {"dropout_origins": base + base.new_tensor(later).view(-1, 5)}

    def merge_sinks(self, rows: Rows, queries: range) -> None:
        """Adds the sinks to a chunk's results over all keys."""
        rows.merge_sinks(self.options.sinks, self.column)

    def is_one_share(self, queries: Sequence[range], keys: Sequence[range]) -> bool:
        """Whether some chunks of queries see the same of some chunks of keys if these lie side by side.

        Then they are one call instead of one for each pair of chunks.
        """
        options = self.options
        by_position = [
            getattr(options, name) for name in ("key_ranges", "mask", "bias", "alibi_slopes", "relative_bias")
        ]
        if any(t is not None for t in by_position) or options.dropout_p or max(options.window) >= 0:
            return False
        ordered = [*queries] == [*keys] == sorted(queries, key=lambda chunk: chunk.start)
        return not options.causal or (ordered and self.offsets == (0, 0))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, place: Place) -> Rows:
        """The share's results."""
        return Rows.of(*self._forward(q, k, v, *self._arguments(q.device, place)))

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        results: Rows,
        k: Tensor,
        v: Tensor,
        wanted: Wanted,
        deterministic: bool,
        place: Place,
    ) -> tuple[Tensor | None, ...]:
        """The share's gradients, given the results of all rows over all keys."""
        numbers = [
            None if t is None else t.narrow(self.row_dim, place.rows.start, len(place.queries))
            for t in (dlse, results.row_max, results.row_sum)
        ]
        own = [self.of_rows(t, place) for t in (dout, q, results.out)]
        mask = wanted[0], wanted[1], wanted[2] and place.first, wanted[3]
        arguments = self._arguments(q.device, place)
        found: tuple[Tensor | None, ...] = self._backward(
            own[0], numbers[0], own[1], k, v, own[2], *numbers[1:], *arguments, deterministic, mask, True
        )
        return found

    def _arguments(self, device: torch.device, place: Place) -> tuple[Any, ...]:
        """The operators' arguments after the tensors."""
        return tuple(self.shifted(place))

    @staticmethod
    def column(rows: Tensor) -> Tensor:
        """Numbers of rows, shaped like lse, as a column for out."""
        return rows.unsqueeze(-1)


class Packed(Dense):
    """Packed sequences: (total, H, D)."""

    dim: int = 0
    row_dim: int = 1
    _forward = ops.attention_varlen_forward
    _backward = ops.attention_varlen_backward

    def __init__(self, options: Options, num_heads_q: int, queries: Packing, keys: Packing) -> None:
        super().__init__(options, num_heads_q, queries.ends[-1], keys.ends[-1])
        self._queries, self._keys = queries, keys
        last = keys.lengths - queries.lengths
        given = last if options.q_offset is None else torch.full_like(last, options.q_offset)
        self._of_sequence = given if options.q_offsets is None else options.q_offsets.cpu()
        if self._of_sequence.shape != last.shape:
            shapes = [*last.shape], [*self._of_sequence.shape]
            raise ValueError(f"pyattn: q_offset must have shape {shapes[0]}, got {shapes[1]}")
        self._offsets: list[int] = self._of_sequence.tolist()

    def seen(self, queries: range, keys: range) -> range:  # noqa: D102
        own, theirs = self._queries.runs(queries), self._keys.runs(keys)

        def seen(b: int) -> range:
            offset, options = self._offsets[b], self.options
            return seen_keys(own[b][1], theirs[b][1], (offset, offset), options.causal, options.window)

        first = next((b for b in range(len(own)) if seen(b)), None)
        if first is None:
            return range(0)
        last = next(b for b in reversed(range(len(own))) if seen(b))
        begin, end = (theirs[b][0] - theirs[b][1].start for b in (first, last))
        return range(begin + seen(first).start, end + seen(last).stop)

    def merge_sinks(self, rows: Rows, queries: range) -> None:  # noqa: D102
        count = int(self._queries.local(queries)[0][-1])  # queries after the last sequence have none
        rows.merge_sinks(self.options.sinks, self.column, count)

    def is_one_share(self, queries: Sequence[range], keys: Sequence[range]) -> bool:  # noqa: D102
        return False

    def parts_of(self, totals: Sequence[Tensor | None], place: Place) -> list[Tensor | None]:  # noqa: D102
        return [None, totals[1], totals[2] if place.first else None, totals[3]]

    def _arguments(self, device: torch.device, place: Place) -> tuple[Any, ...]:
        (starts_q, skipped_q), (starts_k, skipped_k) = self._queries.local(place.queries), self._keys.local(place.keys)
        options = self.options
        ranges = options.key_ranges
        if ranges is not None:
            held, lengths = slice(int(starts_q[0]), int(starts_q[-1])), starts_q.diff()
            first, most = (t.repeat_interleave(lengths)[:, None, None] for t in (skipped_k, starts_k.diff()))
            ranges = ranges[place.rows].to("cpu", torch.int64, copy=True)
            ranges[held] = torch.minimum((ranges[held] - first).clamp(min=0), most)
        origins = [[b, 0, 0, *at] for b, at in enumerate(torch.stack([skipped_q, skipped_k], 1).tolist())]
        shifted = options._replace(
            q_offset=None,
            q_offsets=moved(self._of_sequence, skipped_q - skipped_k),
            key_ranges=ranges,
            sinks=options.sinks if place.first else None,
            **self._drawn(origins),
        )
        arguments = starts_q, starts_k, len(place.queries), len(place.keys), None, *shifted
        whole = torch.int64
        return tuple(a.to(device) if isinstance(a, Tensor) and a.dtype == whole else a for a in arguments)

    @staticmethod
    def column(rows: Tensor) -> Tensor:  # noqa: D102
        return rows.mT.unsqueeze(-1)
