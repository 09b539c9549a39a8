"""Promise: a block of query rows has the bits that it has alone, though keys stay packed from the block before."""

import math
from typing import Any

import pytest
import torch
from support.cases import Case, each_dtype

from pyattn import attention
from pyattn.cache import paged_attention

BLOCK = 64
ROWS = 3 * BLOCK + 18


def _ranges(*blocks: tuple[int, int]) -> torch.Tensor:
    """key_ranges (1, ROWS, 2): the same keys for all rows of a block; blocks run from the last one to the first."""
    return torch.tensor([blocks[i // BLOCK] for i in range(ROWS)])[None]


OPTIONS = {
    "causal": {"q_offset": 1},
    "window to the left": {"window": (90, 0), "q_offset": 101},
    "window to both sides": {"window": (20, 7), "causal": False, "q_offset": 3},
    "every key": {"causal": False},
    "keys after a gap": {"causal": False, "key_ranges": _ranges((0, 40), (600, 701), (20, 90), (300, 425))},
    "keys before and after": {"causal": False, "key_ranges": _ranges((0, 1000), (90, 700), (96, 200), (160, 171))},
    "odd numbers of keys": {
        "causal": False,
        "key_ranges": _ranges((0, 65), (0, 131), (0, 130), (0, 129)),
    },
}


@each_dtype
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(("group", "head_dim", "head_dim_v"), [(1, 41, 35), (2, 64, 64), (1, 16, 530)])
def test_blocks_together(
    isa: str, options: dict[str, Any], group: int, head_dim: int, head_dim_v: int, dtype: torch.dtype
) -> None:
    """With 530 columns, rows of floats of a whole head are too many to be kept. Value 65 hides beside a visible one."""
    q, k, v = Case(2, 2 * group, 2, ROWS, 1000, head_dim, head_dim_v).inputs(dtype)
    v[:, :, 65] = math.nan
    out = attention(q, k, v, **options)
    offset = options.get("q_offset", 1000 - ROWS)
    step = BLOCK // group
    for first in range(0, ROWS, step):
        rows = slice(first, first + step)
        own = options | {"q_offset": offset + first}
        if "key_ranges" in options:
            own["key_ranges"] = options["key_ranges"][:, rows]
        for b in range(2):
            alone = attention(q[b : b + 1, :, rows], k[b : b + 1], v[b : b + 1], **own)
            torch.testing.assert_close(out[b : b + 1, :, rows], alone, rtol=0, atol=0, equal_nan=True)


@each_dtype
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_pages(isa: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Keys in shuffled pages, copied tile by tile before they are packed, give the bits of contiguous ones."""
    q, k, v = Case(2, 2, 2, ROWS, 1008, 64, 48).inputs(dtype)
    order = torch.randperm(2 * 63)
    pages = [x.transpose(1, 2).reshape(2 * 63, 16, 2, -1)[order.argsort()] for x in (k, v)]
    given = {"q_offset": 1008 - ROWS} | options
    out, _ = paged_attention.attention(q, *pages, order.view(2, 63), torch.tensor([1008, 1008]), 1008, **given)
    assert torch.equal(out, attention(q, k, v, **given))


@each_dtype
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(("names", "apart"), [("k", 4096), ("v", 4096), ("kv", 3072)])
def test_rows_apart(isa: str, options: dict[str, Any], names: str, apart: int, dtype: torch.dtype) -> None:
    """Rows so many bytes apart, which are copied because caches hold few of them, give the bits of rows in place."""
    q, k, v = Case(2, 8, 2, ROWS, 1000, 64, 48).inputs(dtype)
    v[:, :, 65] = math.nan
    contiguous = {"k": k, "v": v}
    keys = contiguous.copy()
    for name in names:
        x = keys[name]
        wide = x.new_empty(2, 1000, apart // x.element_size())
        keys[name] = wide[..., : 2 * x.shape[-1]].unflatten(-1, (2, -1)).transpose(1, 2).copy_(x)
    torch.testing.assert_close(
        attention(q, **keys, **options), attention(q, **contiguous, **options), rtol=0, atol=0, equal_nan=True
    )
