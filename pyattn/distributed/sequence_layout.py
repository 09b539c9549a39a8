"""Packed sequences: where each of them lies among the tokens of all ranks, in the order of a layout."""

from bisect import bisect
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyattn.distributed.agreement.checks import check_values
from pyattn.masks.key_ranges import INTEGERS


def begins_of(name: str, cu_seqlens: Tensor) -> list[int]:
    """Where the sequences begin, and where the last one ends, of a user's tensor of this name."""
    check_values(name, cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in INTEGERS:
        kind = ValueError if cu_seqlens.dim() != 1 else TypeError
        raise kind(
            f"pyattn: {name} must be (sequences + 1,) of int32 or int64, got {cu_seqlens.dtype} of shape "
            f"{tuple(cu_seqlens.shape)}"
        )
    begins: list[int] = cu_seqlens.tolist()
    return begins


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


class SequenceLayout:
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
        self._runs: dict[range, list[tuple[int, range]]] = {}
        first = torch.tensor(begins)
        runs = torch.tensor([[[run.start, len(run)] for run in part] for part in self._parts])[:, :-1]
        self.lengths: Tensor = first.diff()
        self._skipped = runs[..., 0] - first[:-1]
        self._begins = pad(runs[..., 1].cumsum(1), (1, 0)) + torch.tensor(self.ends[:-1])[:, None]

    def tokens(self, chunk: range) -> list[range]:
        """The tokens at these positions of the order."""
        number = self._part_of(chunk)
        part, first = self._parts[number], self.ends[number]
        ends = accumulate(map(len, part), initial=first)
        cut = (run[max(chunk.start - at, 0) : max(chunk.stop - at, 0)] for run, at in zip(part, ends, strict=False))
        return [run for run in cut if run]

    def local(self, chunk: range) -> tuple[Tensor, Tensor]:
        """Where the sequences begin in a chunk, and the position in its sequence with which each begins there."""
        part = self._part_of(chunk)
        begins = self._begins[part]
        into = (chunk.start - begins[:-1]).clamp(min=0)
        return (begins - chunk.start).clamp(0, len(chunk)), self._skipped[part] + into

    def runs(self, chunk: range) -> list[tuple[int, range]]:
        """Where each sequence's run in a chunk lies in the order, and its positions in the sequence."""
        if chunk not in self._runs:
            starts, skipped = self.local(chunk)
            held = zip((starts[:-1] + chunk.start).tolist(), skipped.tolist(), starts.diff().tolist(), strict=True)
            self._runs[chunk] = [(at, range(first, first + length)) for at, first, length in held]
        return self._runs[chunk]

    def _part_of(self, chunk: range) -> int:
        return min(bisect(self.ends, chunk.start), len(self._parts)) - 1
