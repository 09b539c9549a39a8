"""Promise: a mod means what its operations compute, in every type of numbers, whatever is recognised in it.

``pytest tests/adapters/flex/test_random.py --examples 20000`` draws that many new cases of each kind.
"""

from random import Random

import pytest
import torch
from support.adapters import random_mods
from support.adapters.any_scores import by_formula
from support.assertions import check_examples
from torch.nn.attention import flex_attention as torch_flex

from pyattn.adapters.flex import create_block_mask, flex_attention
from pyattn.adapters.flex.masks.block_mask import mask_in
from pyattn.adapters.flex.native_forms import key_ranges_of
from pyattn.masks.key_ranges import by_interval


def shown(mask, sizes):
    """bool (B, Hq, Sq, Sk)."""
    begin, end = by_interval(key_ranges_of(mask, *sizes[2:], torch.device("cpu")))[:, None, ..., None].unbind(4)
    keys = torch.arange(sizes[3])
    seen = ((begin <= keys) & (keys < end)).any(3)
    for holes in mask.holes:
        seen = seen & holes.bits()
    return seen.expand(sizes)


def test_masks(request: pytest.FixtureRequest) -> None:
    drawn = computed = 0

    def check(draw: Random) -> None:
        nonlocal drawn, computed
        drawn += 1
        mask_mod = random_mods.mask_mod(draw)
        sizes = 2, 2, draw.choice([1, 9, 24]), draw.choice([1, 9, 24])
        try:
            expected = torch_flex.create_mask(mask_mod, *sizes, device="cpu")
        except (RuntimeError, TypeError, NotImplementedError, ValueError):  # a function that has no such type
            return
        computed += 1
        block_mask = create_block_mask(mask_mod, *sizes, device="cpu")
        assert torch.equal(shown(mask_in(block_mask, *sizes[:2]), sizes), expected)

    check_examples(request, 300, check)
    print(f"{computed} of {drawn} masks are computed by torch")
    assert computed > drawn / 3


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_scores(request: pytest.FixtureRequest) -> None:
    drawn = computed = 0

    def check(draw: Random) -> None:
        nonlocal drawn, computed
        drawn += 1
        score_mod = random_mods.score_mod(draw)
        q, k, v = (torch.randn(2, 2, draw.choice([1, 9, 24]) if n else 24, 4, dtype=torch.float64) for n in (1, 0, 0))
        try:
            expected = by_formula(q, k, v, score_mod)
        except (RuntimeError, TypeError, NotImplementedError, ValueError):
            return
        computed += 1
        out, lse = flex_attention(q, k, v, score_mod, return_lse=True)
        kept = ~expected[1].isnan()  # elsewhere a score is NaN, or perhaps masked: -inf masks whatever is added
        lse = torch.where(expected[1] == torch.inf, torch.inf, lse)  # of such a row, only out is defined
        torch.testing.assert_close(
            (out[kept], lse[kept]), tuple(x[kept] for x in expected), rtol=1e-5, atol=1e-5, equal_nan=True
        )

    check_examples(request, 200, check)
    print(f"{computed} of {drawn} score_mods are computed by torch")
    assert computed > drawn / 3
