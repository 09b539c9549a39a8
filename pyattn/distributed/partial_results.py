"""Results over some of the keys, and their merging into those over all."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyattn.derivatives.merge import alone, by_row
from pyattn.weights.max_score import largest_scores


class PartialResults(NamedTuple):
    """Results of queries over some of the keys: out, the largest score, the sum of exp(score - largest)."""

    out: Tensor
    row_max: Tensor
    row_sum: Tensor

    @classmethod
    def of(cls, out: Tensor, lse: Tensor, _: Tensor, row_sum: Tensor) -> "PartialResults":
        """The operators' results."""
        return cls(out, largest_scores(lse, row_sum), row_sum)

    @property
    def lse(self) -> Tensor:
        """log of the sum of exp(score)."""
        return self.row_max + torch.log(self.row_sum)

    def wide(self) -> "PartialResults":
        """The same with out in the dtype of the other two, float32 or more."""
        return self._replace(out=self.out.to(self.row_max.dtype))

    def narrow(self, rows: slice, dim: int, row_dim: int) -> "PartialResults":
        """Views of some of the rows, of ``dim`` in out and ``row_dim`` in the others."""
        begin, length = rows.start, rows.stop - rows.start
        return PartialResults(
            self.out.narrow(dim, begin, length), *(t.narrow(row_dim, begin, length) for t in self[1:])
        )

    def merge(self, other: "PartialResults") -> None:
        """Makes these results, which are wide, those over both sets of keys."""
        only_mine, only_theirs = alone(self.out, self.row_max, other.out, other.row_max)
        row_max = torch.maximum(self.row_max, other.row_max)
        base = row_max.masked_fill(row_max == -math.inf, 0.0)
        sums = [rows.row_sum * torch.exp(rows.row_max - base) for rows in (self, other)]
        total = torch.where(only_theirs, other.row_sum, torch.where(only_mine, self.row_sum, sums[0] + sums[1]))
        mine, theirs = (
            torch.where(own, 1.0, part / total) for own, part in ((only_mine, sums[0]), (only_theirs, sums[1]))
        )
        added = other.out.to(self.out.dtype).masked_fill(by_row(only_mine), 0.0)
        self.out.masked_fill_(by_row(only_theirs), 0.0)
        self.out.mul_(by_row(mine.masked_fill(only_theirs, 0.0)))
        self.out.addcmul_(by_row(theirs.masked_fill(only_mine, 0.0)), added)
        self.row_max.copy_(row_max)
        self.row_sum.copy_(total)

    def merge_sinks(self, sinks: Tensor | None, count: int | None = None) -> None:
        """Adds the sinks (Hq,), if any, of the first ``count`` rows, or all.

        They come last: before, row_max is the largest score of a key.
        """
        if sinks is None:
            return
        scores = sinks.to(self.row_max.dtype)[:, None].repeat(*self.row_max.shape[:-2], 1, self.row_max.shape[-1])
        if count is not None:
            scores[..., count:] = -math.inf
        self.merge(PartialResults(self.out.new_zeros(1).expand_as(self.out), scores, torch.ones_like(scores)))


class BackwardInputs(NamedTuple):
    """The inputs of a rank's backward, for all its rows.

    Attributes:
        dout, dlse: the gradients of the results.
        q: the queries.
        results: over all keys.
        wanted: which of LEARNED need a gradient.
        deterministic: as :func:`pyattn.set_deterministic` says.
    """

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    results: PartialResults
    wanted: Sequence[bool]
    deterministic: bool
