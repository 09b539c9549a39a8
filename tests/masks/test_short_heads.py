"""Promise: many short heads get the gradient of a bias that they share, and tensors that mask no key change no bit."""

import pytest
import torch
from support.backends import Backend
from support.cases import Case, assert_case_accurate, assert_equal, each_dtype, run

GROUPS = [
    # Backward sums dS of several heads at a time: of 140 in 47 groups, of 2 x 70 in 2 x 35, of 66 x 2 in 66.
    Case(70, 2, 2, 9, 20, 16, 16, causal=False, bias="float qk"),
    Case(70, 2, 2, 9, 20, 16, 20, bias="float hqk", softcap=2.0, alibi="h", sinks=True),
    Case(66, 2, 2, 17, 20, 16, 16, bias="float bqk", dropout_p=0.2),
    # Grouped heads, elements that queries or keys share, rows without keys, -inf.
    Case(34, 4, 2, 9, 20, 16, 16, causal=False, bias="bands hk"),
    Case(34, 4, 2, 9, 20, 16, 16, bias="bands q", mask="random qk"),
    Case(9, 2, 1, 70, 200, 24, 16, q_offset=-5, bias="bands hqk", key_ranges="random"),
]


@each_dtype
@pytest.mark.parametrize("case", GROUPS, ids=str)
def test_a_bias_that_heads_share(repeatable: Backend, case: Case, dtype: torch.dtype) -> None:
    assert_case_accurate(case, dtype, repeatable.attention)


@each_dtype
@pytest.mark.parametrize("window", [(-1, -1), (30, 4)])
def test_masks_of_visible_keys(repeatable: Backend, dtype: torch.dtype, window: tuple[int, int]) -> None:
    """A mask that is True at every key that the formulas leave visible has the bits of none."""
    drawn, formulas = Case(2, 2, 1, 70, 130, 16, 24).drawn(dtype), {"causal": True, "window": window}
    expected = run(repeatable.attention, *drawn, **formulas)
    rows, keys = torch.arange(70)[:, None] + 60, torch.arange(130)
    left = window[0] if window[0] >= 0 else 130
    inside = (keys <= rows) & (keys >= rows - left)
    for mask in (
        torch.ones(130, dtype=torch.bool),
        torch.ones(2, 1, 70, 1, dtype=torch.bool).expand(2, 2, 70, 130),
        inside,
    ):
        assert_equal(run(repeatable.attention, *drawn, **formulas, mask=mask), expected)
    inside[40, 90] = False
    hidden = run(repeatable.attention, *drawn, **formulas, mask=inside)
    assert not torch.equal(hidden[0][:, :, 40], expected[0][:, :, 40])
    assert torch.equal(hidden[0][:, :, 39], expected[0][:, :, 39])
