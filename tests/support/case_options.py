"""Key ranges, masks and biases for cases: every shape, and the masks that models use."""

import math
import random

import torch
from torch import Tensor

KEY_RANGES = ("documents", "prefix", "random", "empty", "streaming", "pieces", "one random", "one pieces")
MASKS = ("random", "causal", "padding")
BIASES = ("float", "bands", "lowest")


def key_ranges(kind: str, batch: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """(batch or 1, seqlen_q, 2), or several intervals (batch or 1, seqlen_q, n, 2), the same for the same arguments.

    - documents: the last query is at the last key, and each query sees its document;
    - prefix: a prefix, causal after its end;
    - random: any two ends, in order;
    - empty: the same, but most ranges are empty;
    - streaming: the first keys, and those up to the query's own;
    - pieces: 2 to 4 intervals between any ends, in order; some touch, some are empty, and some rows see nothing;
    - one random, one pieces: one row of these for all queries.
    """
    if kind.startswith("one "):
        return key_ranges(kind.removeprefix("one "), batch, 1, seqlen_k)
    draw = random.Random(f"{kind} {batch} {seqlen_q} {seqlen_k}")
    if kind in ("streaming", "pieces"):
        return _several(kind, draw, draw.choice((1, batch)), seqlen_q, seqlen_k)
    ranges = []
    for _ in range(draw.choice((1, batch))):
        cuts = sorted({0, seqlen_k, *draw.choices(range(seqlen_k + 1), k=3)})
        rows = []
        for i in range(seqlen_q):
            position = min(max(i + seqlen_k - seqlen_q, 0), max(seqlen_k - 1, 0))
            begin, end = sorted(draw.choices(range(seqlen_k + 1), k=2))
            match kind:
                case "documents":
                    begin, end = max(c for c in cuts if c <= position), min(c for c in cuts if c >= position + 1)
                case "prefix":
                    begin, end = 0, max(cuts[1], position + 1)
                case "empty" if draw.random() < 0.7:
                    end = begin
            rows.append((begin, end))
        ranges.append(rows)
    return torch.tensor(ranges, dtype=draw.choice((torch.int32, torch.int64))).view(len(ranges), seqlen_q, 2)


def _several(kind: str, draw: random.Random, batch: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    first, left, count = draw.randint(0, seqlen_k), draw.randint(0, seqlen_k), draw.randint(2, 4)
    ranges = []
    for i in [*range(seqlen_q)] * batch:
        past = min(max(i + seqlen_k - seqlen_q + 1, first), seqlen_k)
        ends = [0, first // 4, max(past - left, first // 4), past]
        if kind == "pieces":
            ends = sorted(draw.choices(range(seqlen_k + 1), k=2 * count))
            for n in range(1, 2 * count):  # an interval that touches the one before it, or is empty
                ends[n] = ends[n - 1] if draw.random() < 0.2 else ends[n]
            ends = ends[:1] * len(ends) if draw.random() < 0.1 else ends
        ranges.append(ends)
    dtype = draw.choice((torch.int32, torch.int64))
    return torch.tensor(ranges, dtype=dtype).view(batch, seqlen_q, 2 if kind == "streaming" else count, 2)


def mask(words: str, sizes: tuple[int, int, int, int]) -> Tensor:
    """The bool mask that ``words`` describe: a kind, its full dimensions out of b, h, q and k, optionally ``strided``.

    - random: hides one key in four, and all keys of one row in eight;
    - causal: False above the diagonal that ends in the last query and the last key;
    - padding: False from some key on.

    Other dimensions are 1, and left out before the first full one: "random k" has one dimension.
    """
    kind, full, *layout = words.split()
    shape = _shape(full, sizes)
    batch, heads, rows, keys = shape
    match kind:
        case "random":
            x = ~_some(shape)
        case "causal":
            x = torch.ones(shape, dtype=torch.bool).tril(keys - rows)
        case "padding":
            x = torch.arange(keys) < torch.randint(keys + 1, (batch, heads, rows, 1))
    x = _from_first_full(x)
    return strided(x) if layout else x


def bias(words: str, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """A bias, described in the same way:

    - float: normally distributed;
    - bands: the same with -inf at 150 adjacent keys, or half of them, and at all keys of one row in eight;
    - lowest: the same with the lowest number of ``dtype`` at one key in four, and at all keys of one row in eight.
    """
    kind, full, *layout = words.split()
    shape = _shape(full, sizes)
    batch, heads, rows, keys = shape
    some = _some(shape)
    x = torch.randn(shape).to(dtype)
    match kind:
        case "bands":
            width, some_rows = min(150, keys // 2), torch.rand(batch, heads, rows, 1) < 0.125
            begin = torch.randint(keys + 1, (batch, heads, rows, 1)) - width // 2
            near = (begin <= torch.arange(keys)) & (torch.arange(keys) < begin + width)
            x = x.masked_fill(near | some_rows, -math.inf)
        case "lowest":
            # Half of it in float16, where its sum with a score would overflow in plain PyTorch.
            lowest = torch.finfo(dtype).min / (2 if dtype == torch.float16 else 1)
            x = x.masked_fill(some, lowest)
    x = _from_first_full(x)
    return strided(x) if layout else x


def _shape(full: str, sizes: tuple[int, int, int, int]) -> list[int]:
    return [n if name in full else 1 for name, n in zip("bhqk", sizes, strict=True)]


def _some(shape: list[int]) -> Tensor:
    """One key in four, and all keys of one row in eight."""
    return (torch.rand(shape) < 0.25) | (torch.rand(*shape[:3], 1) < 0.125)


def _from_first_full(x: Tensor) -> Tensor:
    return x[(0,) * next((d for d in range(3) if x.shape[d] != 1), 3)]


def strided(x: Tensor) -> Tensor:
    """x with its dimensions stored in reverse order, none of them dense, inside a buffer of NaN, True or -2^31."""
    backwards = tuple(reversed(range(x.dim())))
    unused = True if x.dtype == torch.bool else math.nan if x.is_floating_point() else -(2**31)
    buffer = torch.full([*(n + 1 for n in reversed(x.shape)), 2], unused, dtype=x.dtype)[..., 0]
    return buffer.permute(backwards)[(slice(1, None),) * x.dim()].copy_(x)
