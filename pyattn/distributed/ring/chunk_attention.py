"""Attention of some of a rank's queries over a chunk of keys, as a separate call whose positions are shifted."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyattn import ops
from pyattn.distributed.partial_results import BackwardInputs, PartialResults
from pyattn.distributed.sequence_layout import SequenceLayout
from pyattn.options.attention_options import OPTIONS
from pyattn.options.axes import AXES, part, take
from pyattn.options.positions import Count, explicit, shift, span, visible_keys
from pyattn.options.schema import DEFAULTS, LEARNED, Options

BY_POSITION = [name for name, option in OPTIONS.items() if option.by_position and name not in ("causal", "q_offset")]
"""Options whose meaning changes where neighbours are no longer at adjacent positions."""


class Chunk(NamedTuple):
    """Some of a rank's queries and a chunk of keys.

    Attributes:
        rows: where the queries lie in the rank's part.
        queries, keys: their positions.
        first: whether these are the first keys of the queries, which carry the sinks.
    """

    rows: slice
    queries: range
    keys: range
    first: bool


class Dense:
    """Batches: (B, H, S, D).

    Attributes:
        dim: the dimension of the sequence in q, k, v and out.
        row_dim: that in lse.
        options: those of all the rank's rows and of all keys, with explicit positions.
        offsets: the least and the largest key position of query 0.
    """

    dim: int = 2
    row_dim: int = 2
    _forward: Callable[..., Any] = ops.attention_forward
    _backward: Callable[..., tuple[Tensor | None, ...]] = ops.attention_backward

    def __init__(self, options: Options, q: Tensor, seqlen_q: int, seqlen_k: int) -> None:
        self._set(options, len(q), q, seqlen_k - seqlen_q)

    def _set(self, options: Options, batch: int, q: Tensor, last_offset: Count) -> None:
        self.options: Options = explicit(options, batch, q.shape[1], last_offset, q.device)
        offset = self.options.q_offset if self.options.q_offsets is None else self.options.q_offsets
        self.offsets: tuple[int, int] = span(offset)

    def visible(self, queries: range, keys: range) -> range:
        """The keys of a chunk that may be visible to queries of another, as far as all ranks know."""
        return visible_keys(queries, keys, self.offsets, self.options.causal, self.options.window)

    def of_rows(self, tensor: Tensor, chunk: Chunk) -> Tensor:
        """The chunk's rows of q, or of a tensor like it."""
        return tensor.narrow(self.dim, chunk.rows.start, len(chunk.queries))

    def of_learned(self, totals: Sequence[Tensor | None], chunk: Chunk) -> list[Tensor | None]:
        """The chunk's parts of the gradients of LEARNED, as views."""
        index = {"q": chunk.rows, "k": slice(chunk.keys.start, chunk.keys.stop)}
        parts = {
            name: None if total is None else part(AXES[name], total, index)
            for name, total in zip(LEARNED, totals, strict=True)
        }
        return [*(parts if chunk.first else parts | {"sinks": None}).values()]

    def shifted(self, chunk: Chunk) -> Options:
        """The options of a chunk as a separate call."""
        keys = chunk.keys
        options = _with_sinks(take(self.options, rows=chunk.rows, keys=slice(keys.start, keys.stop)), chunk)
        return shift(options, chunk.queries.start, keys.start, len(keys))

    def merge_sinks(self, results: PartialResults, queries: range) -> None:
        """Adds the sinks to a chunk's results over all keys."""
        results.merge_sinks(self.options.sinks)

    def are_one(self, queries: Sequence[range], keys: Sequence[range]) -> bool:
        """Whether the same keys are visible to chunks of queries if the chunks lie side by side, as one call."""
        given = self.options._replace(window=tuple(self.options.window))  # a graph has a list
        if any(getattr(given, name) not in (None, DEFAULTS[name]) for name in BY_POSITION):
            return False
        ordered = [*queries] == [*keys] == sorted(queries, key=lambda chunk: chunk.start)
        return not self.options.causal or (ordered and self.offsets == (0, 0))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk) -> PartialResults:
        """The chunk's results."""
        return PartialResults.of(*self._forward(q, k, v, *self._arguments(q.device, chunk)))

    def backward(self, inputs: BackwardInputs, k: Tensor, v: Tensor, chunk: Chunk) -> tuple[Tensor | None, ...]:
        """The chunk's gradients of q, k, v and LEARNED, given the results of all rows over all keys."""
        dout, dlse, q, results, wanted, deterministic = inputs
        numbers = [
            None if t is None else t.narrow(self.row_dim, chunk.rows.start, len(chunk.queries))
            for t in (dlse, results.row_max, results.row_sum)
        ]
        own = [self.of_rows(t, chunk) for t in (dout, q, results.out)]
        mask = [want and (chunk.first or name != "sinks") for name, want in zip(LEARNED, wanted, strict=True)]
        arguments = self._arguments(q.device, chunk)
        rows = own[0], numbers[0], own[1], k, v, own[2], *numbers[1:]
        return self._backward(*rows, *arguments, deterministic, mask, True)

    def _arguments(self, device: torch.device, chunk: Chunk) -> tuple[Any, ...]:
        """The operators' arguments after the tensors."""
        return tuple(self.shifted(chunk))


class Packed(Dense):
    """Packed sequences: (total, H, D). Positions are counted within each sequence, and held on the host."""

    dim: int = 0
    row_dim: int = 1
    _forward = ops.attention_varlen_forward
    _backward = ops.attention_varlen_backward

    def __init__(self, options: Options, q: Tensor, queries: SequenceLayout, keys: SequenceLayout) -> None:
        self._queries, self._keys = queries, keys
        last = keys.lengths - queries.lengths
        if options.q_offsets is not None and options.q_offsets.shape != last.shape:
            shapes = [*last.shape], [*options.q_offsets.shape]
            raise ValueError(f"pyattn: q_offset must have shape {shapes[0]}, got {shapes[1]}")
        on_host = {
            name: t.to("cpu", torch.int64)
            for name, t in (("q_offsets", options.q_offsets), ("key_ranges", options.key_ranges))
            if t is not None
        }
        self._set(options._replace(**on_host), len(last), q, last)
        self._offsets: list[int] = self.options.q_offsets.tolist()

    def visible(self, queries: range, keys: range) -> range:  # noqa: D102
        own, theirs = self._queries.runs(queries), self._keys.runs(keys)

        def visible(b: int) -> range:
            offset, options = self._offsets[b], self.options
            return visible_keys(own[b][1], theirs[b][1], (offset, offset), options.causal, options.window)

        first = next((b for b in range(len(own)) if visible(b)), None)
        if first is None:
            return range(0)
        last = next(b for b in reversed(range(len(own))) if visible(b))
        begin, end = (theirs[b][0] - theirs[b][1].start for b in (first, last))
        return range(begin + visible(first).start, end + visible(last).stop)

    def merge_sinks(self, results: PartialResults, queries: range) -> None:  # noqa: D102
        count = int(self._queries.local(queries)[0][-1])  # queries after the last sequence have none
        results.merge_sinks(self.options.sinks, count)

    def are_one(self, queries: Sequence[range], keys: Sequence[range]) -> bool:  # noqa: D102
        return False

    def _arguments(self, device: torch.device, chunk: Chunk) -> tuple[Any, ...]:
        (starts_q, skipped_q), (starts_k, skipped_k) = self._queries.local(chunk.queries), self._keys.local(chunk.keys)
        options = _with_sinks(take(self.options, rows=chunk.rows, packed=True), chunk)
        shifted = shift(options, skipped_q, skipped_k, starts_k.diff(), starts_q.diff())
        arguments = starts_q, starts_k, len(chunk.queries), len(chunk.keys), None, *shifted
        whole = torch.int64
        return tuple(a.to(device) if isinstance(a, Tensor) and a.dtype == whole else a for a in arguments)


def _with_sinks(options: Options, chunk: Chunk) -> Options:
    """The options of a chunk: only the first keys of a row have the sinks."""
    return options if chunk.first else options._replace(sinks=None)
