"""Packed sequences: where each of them lies among the tokens of all ranks, in the order of a layout."""

from bisect import bisect
from itertools import accumulate, pairwise

import torch
from torch import Tensor


def dealt(lengths: list[int], parts: int) -> list[list[int]]:
    """How many tokens of each sequence each part has: an even share, and at most one more.

    Rank r has parts r and parts - 1 - r. The tokens left over are dealt to the ranks in turn, and each sequence begins
    with the rank after the last one's, so the ranks' totals differ by at most one. Sequences give them to late and to
    early parts by turns: otherwise sequences shorter than the number of parts would give some ranks late tokens alone.
    """
    ranks, turn, found = parts // 2, 0, list[list[int]]()
    for number, length in enumerate(lengths):
        share, left = divmod(length, parts)
        early = [(turn + step) % ranks for step in range(ranks)]
        late = [parts - 1 - part for part in early]
        more = {*(early + late if number % 2 else late + early)[:left]}
        found.append([share + (part in more) for part in range(parts)])
        turn = (turn + left) % ranks
    return found


class Packing:
    """Packed sequences in the order in which a layout has their tokens.

    Layouts that cut the tokens anywhere keep their order, as one part. ``zigzag_varlen`` cuts each sequence in parts,
    and orders all tokens by part; here three sequences on two ranks::

        tokens             a0 a1 a2 a3 a4 a5 a6 a7 b0 b1 b2 b3 c0
        in four parts      a0 a1 b0 | a2 a3 b1 | a4 a5 b2 | a6 a7 b3 c0
        rank               0          1          1          0

    A chunk, a range of positions in this order within a part, has one run of each sequence: one call of a kernel takes
    all of them.

    Attributes:
        lengths: (sequences,), those of the whole sequences.
        ends: where each part begins in the order, and where the last one ends.
    """

    def __init__(self, name: str, begins: list[int], total: int, parts: int = 1) -> None:
        if not begins or begins[0] != 0 or sorted(begins) != begins or begins[-1] > total:
            raise ValueError(f"pyattn: {name} must start at 0, never decrease and end at most at {total}, got {begins}")
        bounds = [*begins, total]  # the tokens after the last sequence are cut as one more
        lengths = [end - begin for begin, end in pairwise(bounds)]
        counts = [[length] for length in lengths] if parts == 1 else dealt(lengths, parts)
        cuts = [pairwise(accumulate(count, initial=begin)) for begin, count in zip(begins, counts, strict=True)]
        self._parts = [[range(*run) for run in part] for part in zip(*cuts, strict=True)]
        self.ends: list[int] = [*accumulate((sum(map(len, part)) for part in self._parts), initial=0)]
        first = torch.tensor(begins)
        self.lengths: Tensor = first.diff()
        held = torch.tensor([[len(run) for run in part[:-1]] for part in self._parts], dtype=torch.int64)
        self._begins = torch.cat([held.new_zeros(parts, 1), held.cumsum(1)], 1) + torch.tensor(self.ends[:-1])[:, None]
        self._skipped = torch.tensor([[run.start for run in part[:-1]] for part in self._parts]) - first[:-1]

    def tokens(self, chunk: range) -> list[range]:
        """The tokens at these positions of the order."""
        found, first = [], 0
        for part in self._parts:
            for run in part:
                inside = run[max(chunk.start - first, 0) : max(chunk.stop - first, 0)]
                if inside:
                    found.append(inside)
                first += len(run)
        return found

    def local(self, chunk: range) -> tuple[Tensor, Tensor]:
        """Where the sequences begin in a chunk, and the position in its sequence with which each begins there."""
        part = min(bisect(self.ends, chunk.start), len(self._parts)) - 1
        begins = self._begins[part]
        into = (chunk.start - begins[:-1]).clamp(min=0)
        return (begins - chunk.start).clamp(0, len(chunk)), self._skipped[part] + into
