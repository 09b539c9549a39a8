"""A mask_mod of the user's own in a compiled graph: one operator, which evaluates it again where it has changed."""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from pyattn.adapters.flex.compiled.operators import Operator, define
from pyattn.adapters.flex.masks.block_mask import EVALUATED, mask_in
from pyattn.adapters.flex.masks.dense_mask import Holes
from pyattn.adapters.flex.native_forms import Mask, MaskMod, key_ranges_of, mask_of
from pyattn.adapters.flex.trace.evaluation import Lookups, outermost
from pyattn.locks import Lock
from pyattn.masks.key_ranges import by_interval
from pyattn.options.checks import has_values

NUMBERED: WeakValueDictionary[int, BlockMask] = WeakValueDictionary()
"""BlockMasks by a number, which an operator takes in place of an object."""

_numbers = itertools.count()
_lock = Lock()
"""Two threads that take a number at once could get the same one in a Python without the GIL."""


class Numbered(NamedTuple):
    """The facts for which a graph is compiled.

    Attributes:
        mask_mod: the BlockMask's, when it was made.
        captured: the tensors that it reads. They are inputs of the operator, which reads what the graph computes for
            them: functionalization writes changes within the graph to other tensors.
        of_sequences, of_heads: whether these differ.
        intervals: how many a query has at most: the operator returns key_ranges; 0: bits (B or 1, Hq or 1, Sq, Sk), and
            key_ranges from the first to the last key visible to some head.
    """

    number: int
    mask_mod: MaskMod
    captured: list[Tensor]
    of_sequences: bool
    of_heads: bool
    intervals: int

    def __deepcopy__(self, memo: object) -> None:
        """A copy is another BlockMask, which has no number."""


def number(block_mask: BlockMask) -> None:
    """Lets compiled graphs call the BlockMask's mask_mod, unless that has a native meaning."""
    if mask_of(block_mask.mask_mod) is not None:
        return
    mask, _, trace = EVALUATED[block_mask]
    captured = [x for x in trace.captured if has_values(x)]
    intervals = 0 if mask.holes else mask.intervals
    reads = "b" in trace.reads, "h" in trace.reads
    with _lock:
        own = next(_numbers)
        NUMBERED[own] = block_mask
    block_mask.numbered = Numbered(own, block_mask.mask_mod, captured, *reads, intervals)  # type: ignore[attr-defined]


def mask_in_graph(block_mask: BlockMask, batch: int, heads: int) -> Mask | None:
    """The BlockMask's mask in the graph that is compiled, None if it has no number."""
    numbered, now = getattr(block_mask, "numbered", None), block_mask.mask_mod
    # dynamo rebuilds a functools.partial wherever it is read; the operator compares it.
    if numbered is None or not (numbered.mask_mod is now or isinstance(now, functools.partial)):
        return None
    seqlen_q, seqlen_k = block_mask.seq_lengths
    sizes = (
        batch if numbered.of_sequences else min(1, batch),
        heads if numbered.of_heads else min(1, heads),
        seqlen_q,
        seqlen_k,
    )
    captured = [x.detach() for x in numbered.captured]
    ranges, bits = evaluated(captured, numbered.number, batch, heads, sizes, numbered.intervals)
    if numbered.intervals:
        return Mask(ranges=(lambda *_: ranges,), intervals=numbered.intervals)
    return Mask(ranges=(lambda *_: ranges,), holes=(Holes.given(bits),))


@outermost
def _evaluated(
    captured: Sequence[Tensor], own: int, batch: int, heads: int, sizes: Sequence[int], intervals: int
) -> tuple[Tensor, Tensor]:
    block_mask = NUMBERED.get(own)
    if block_mask is None:
        raise RuntimeError("pyattn: block_mask must live as long as graphs that use it, got one that is gone")
    numbered: Numbered = block_mask.numbered  # type: ignore[attr-defined]
    if numbered.mask_mod is not block_mask.mask_mod:
        raise RuntimeError(f"pyattn: block_mask must keep its mask_mod in compiled code, got {block_mask.mask_mod}")
    mask = mask_in(block_mask, batch, heads, Lookups(numbered.captured, captured))
    return _in_intervals(mask, sizes, intervals) if intervals else _in_bits(mask, sizes)


def _in_intervals(mask: Mask, sizes: Sequence[int], intervals: int) -> tuple[Tensor, Tensor]:
    """The mask as that many intervals a row, the last ones perhaps empty, and no bits."""
    rows = by_interval(key_ranges_of(mask, sizes[2], sizes[3], torch.device("cpu")))
    count = rows.shape[2]
    if mask.holes or count > intervals:
        raise RuntimeError(
            "pyattn: a row of a mask_mod must have at most as many intervals as when the function was "
            f"compiled, {intervals}, got {'more' if mask.holes else count}"
        )
    padded = torch.full((sizes[0], sizes[2], intervals, 2), sizes[3])
    padded[:, :, :count] = rows
    return padded[:, :, 0].clone() if intervals == 1 else padded, rows.new_empty(0, dtype=torch.bool)


def _in_bits(mask: Mask, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """key_ranges around the visible keys of each row, and the mask's bits."""
    if mask.holes:
        (holes,) = mask.holes  # a mask_mod is evaluated as a whole
        bits, hulls = holes.bits(), holes.hulls()
        assert hulls is not None
        return hulls.expand(sizes[0], -1, -1).clone(), bits.expand(*sizes).clone()
    rows = by_interval(key_ranges_of(mask, sizes[2], sizes[3], torch.device("cpu")))
    begin, end = rows[:, None, ..., None].unbind(4)
    keys = torch.arange(sizes[3])
    visible = ((begin <= keys) & (keys < end)).any(3).expand(*sizes)
    return torch.tensor([0, sizes[3]]).repeat(sizes[0], sizes[2], 1), visible.contiguous()


def _fake_evaluated(
    captured: Sequence[Tensor], own: int, batch: int, heads: int, sizes: Sequence[int], intervals: int
) -> tuple[Tensor, Tensor]:
    several = () if intervals <= 1 else (intervals,)
    ranges = torch.empty(sizes[0], sizes[2], *several, 2, dtype=torch.int64)
    return ranges, torch.empty(*((0,) if intervals else sizes), dtype=torch.bool)


evaluated: Operator = define(
    "evaluated(Tensor[] captured, SymInt own, SymInt batch, SymInt heads, SymInt[] sizes, int intervals) -> "
    "(Tensor ranges, Tensor bits)",
    _evaluated,
    _fake_evaluated,
)
