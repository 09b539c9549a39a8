"""mask_mods as users of FlexAttention write them, for 72 positions; some take grids of 6 x 12 or several documents."""

import functools

import torch
from torch.nn.attention import flex_attention as torch_flex

from pyattn.adapters.flex import and_masks, causal, document, or_masks, sliding_window

LENGTH, WIDTH = 72, 12

PIECES = torch.arange(LENGTH) // 9 % 3
"""Three documents, each in several pieces."""

ROWS = torch.stack([PIECES, PIECES.roll(5)])
RUNS = torch.arange(LENGTH) // 20


def tree(parents):
    """bool (S, S), whether a token is the other one or one of its ancestors."""
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            ancestors[i] |= ancestors[parent]
    return ancestors


IMAGES = torch.arange(LENGTH) // 6 * (torch.arange(LENGTH) // 6 % 3 == 1)
"""The number of the image of each position, 0 for text."""

ANCESTORS = tree([(i - 1) // 2 for i in range(LENGTH)])
REACHES = torch.tensor([1, 3, 9, 80])
OFFSET = 3
TENTH, LIMIT = torch.tensor(0.1), torch.tensor(2**63 - 30)


def in_place(x):
    """Changed through a view, hidden within one function of torch."""
    torch.nn.functional.relu(x.view(1), inplace=True)
    return x


def neighbourhood(b, h, q_idx, kv_idx):
    """NATTEN in two dimensions: the 3 x 5 positions of the grid around a query."""
    x, y = (q_idx % WIDTH - kv_idx % WIDTH).abs(), (q_idx // WIDTH - kv_idx // WIDTH).abs()
    return (x <= 2) & (y <= 1)


def three_dimensions(b, h, q_idx, kv_idx):
    """NATTEN for a grid of 3 x 6 x 4 positions."""
    steps = [(q_idx // size % n - kv_idx // size % n).abs() for size, n in ((24, 3), (4, 6), (1, 4))]
    return (steps[0] <= 1) & (steps[1] <= 2) & (steps[2] <= 1)


def dilated(b, h, q_idx, kv_idx, step):
    distance = q_idx - kv_idx
    return (distance >= 0) & (distance < 8 * step) & (distance % step == 0)


@torch.jit.script
def every_third(h, q_idx, kv_idx):
    return (q_idx + kv_idx + h) % 3 == 0


def through_a_view(b, h, q_idx, kv_idx):
    """The head is added to zeros that read no value, through a view."""
    steps = torch.zeros_like(b + h + q_idx + kv_idx)
    steps.view(()).add_(h)
    return (q_idx - kv_idx) % (steps + 2) == 0


class Every:
    def __init__(self, step):
        self.step = torch.tensor(step)

    def __call__(self, b, h, q_idx, kv_idx):
        return (kv_idx % self.step == 0) | (q_idx == kv_idx)


INTERVALS = {
    "causal": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
    "global offset": lambda b, h, q_idx, kv_idx: q_idx + OFFSET >= kv_idx,
    "window": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= 7,
    "prefix": lambda b, h, q_idx, kv_idx: (kv_idx < 20) | (q_idx >= kv_idx),
    "padding": lambda b, h, q_idx, kv_idx: kv_idx < torch.tensor([60, 31])[b],
    "nothing": lambda b, h, q_idx, kv_idx: q_idx < 0,
    "first rows": lambda b, h, q_idx, kv_idx: (q_idx < 9) & (kv_idx > 3 * q_idx),
    "torch's noop": torch_flex.noop_mask,
    "torch's and": torch_flex.and_masks(causal(), sliding_window(9)),
    "a union": or_masks(causal(), lambda b, h, q_idx, kv_idx: kv_idx < 5),
    "images in causal text": lambda b, h, q_idx, kv_idx: (
        (q_idx >= kv_idx) | ((IMAGES[q_idx] == IMAGES[kv_idx]) & (IMAGES[q_idx] > 0))
    ),
    "blocks of 9": lambda b, h, q_idx, kv_idx: q_idx // 9 == kv_idx // 9,
    "a rounded position": lambda b, h, q_idx, kv_idx: (q_idx - 0.5).long() >= kv_idx,
    "a rounded difference": lambda b, h, q_idx, kv_idx: (q_idx - 3.5).int() - kv_idx >= -1,
    "a sum of floats": lambda b, h, q_idx, kv_idx: (q_idx + 0.1) - kv_idx > 0.1,
    "a sum of a captured float": lambda b, h, q_idx, kv_idx: (q_idx + TENTH) - kv_idx > TENTH,
    "bytes": lambda b, h, q_idx, kv_idx: (q_idx * 4).to(torch.int8) >= kv_idx,
    "a negated overflow": lambda b, h, q_idx, kv_idx: -(q_idx - 2**63) < -(kv_idx - 2**63),
    "a multiple of the key": lambda b, h, q_idx, kv_idx: torch.sub(q_idx, kv_idx, alpha=2) > 0,
    "a sum in place": lambda b, h, q_idx, kv_idx: in_place(q_idx - 9) >= kv_idx,
    "a sequence of one": lambda b, h, q_idx, kv_idx: (b == 1) & (q_idx >= kv_idx),
}
"""Each row is one interval, the same for all heads."""

SEVERAL = {
    "documents in pieces": document(PIECES),
    "rows of documents": document(ROWS),
    "causal documents": and_masks(causal(), document(ROWS)),
    "neighbourhood": neighbourhood,
    "sinks and a window": or_masks(sliding_window(5), lambda b, h, q_idx, kv_idx: (kv_idx < 3) & (q_idx >= kv_idx)),
    "torch's or": torch_flex.or_masks(neighbourhood, lambda b, h, q_idx, kv_idx: kv_idx == 0),
    "prefixes of documents": lambda b, h, q_idx, kv_idx: (
        (PIECES[q_idx] == PIECES[kv_idx]) & ((kv_idx % 9 < 4) | (q_idx >= kv_idx))
    ),
    "an overflow": lambda b, h, q_idx, kv_idx: q_idx + (2**63 - 30) >= kv_idx + (2**63 - 30),
    "an overflow in int32": lambda b, h, q_idx, kv_idx: q_idx.int() + (2**31 - 30) >= kv_idx.int() + (2**31 - 30),
    "an overflow of a captured number": lambda b, h, q_idx, kv_idx: q_idx + LIMIT >= kv_idx + LIMIT,
    "an overflow of a multiple": lambda b, h, q_idx, kv_idx: q_idx * 2**58 >= kv_idx * 2**58,
    "windows apart": or_masks(sliding_window(3), sliding_window(3, offset=-9)),
    "a document or a window, in a window": and_masks(
        or_masks(document(RUNS), sliding_window(2), sliding_window(1, offset=-30)), sliding_window(40)
    ),
}
"""Some row is two to four intervals, the same for all heads."""

HOLES = {
    "dilated": functools.partial(dilated, step=3),
    "tree": lambda b, h, q_idx, kv_idx: ANCESTORS[q_idx, kv_idx],
    "tree by negative indices": lambda b, h, q_idx, kv_idx: ANCESTORS[q_idx - LENGTH][kv_idx],
    "checkerboard": lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 2 == 0,
    "reaches of heads": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= REACHES[h],
    "heads and sequences": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((q_idx - kv_idx) % (b + h + 1) == 0),
    "an object": Every(7),
    "heads of TorchScript": lambda b, h, q_idx, kv_idx: every_third(h, q_idx, kv_idx),
    "heads through a view": through_a_view,
    "three dimensions": three_dimensions,
    "five windows": or_masks(*(sliding_window(2, offset=-9 * n) for n in range(5))),
}
"""Some row is more intervals than key_ranges hold, or heads differ."""
