"""Promise: a rule of a mask that the adapter does not know is evaluated, whatever kind of function it is."""

from collections.abc import Callable
from functools import lru_cache, partial

import pytest
import torch
from support.adapters.transformers_masks import shown
from torch import Tensor
from transformers import masking_utils as theirs

from pyattn.adapters.transformers import mask_function


def sliding_window_overlay(sliding_window: int) -> Callable[..., Tensor]:
    """Counts as another version of transformers might."""

    def inner_mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k >= q - sliding_window

    inner_mask.__module__ = theirs.__name__
    return inner_mask


def test_a_rule_that_means_something_else_is_evaluated():
    arguments = {"mask_function": theirs.and_masks(sliding_window_overlay(3), theirs.causal_mask_function)}
    truth = theirs.sdpa_mask(1, 9, 9, allow_is_causal_skip=False, **arguments)
    assert torch.equal(shown(mask_function(1, 9, 9, **arguments), 9, 9, causal=True)[:1], truth)


class Hides:
    """Hides one key from one query, which no row that is compared shows."""

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q != 5) | (k != 3)

    def method(self, *places: Tensor) -> Tensor:
        return self(*places)


OTHERS = Hides(), Hides().method, partial(Hides.__call__, Hides()), lru_cache(Hides().method)


@pytest.mark.parametrize("rule", OTHERS, ids=["object", "method", "partial", "cached"])
def test_a_rule_that_is_no_plain_function_is_evaluated(rule):
    arguments = {"mask_function": theirs.and_masks(theirs.causal_mask_function, rule)}
    truth = theirs.sdpa_mask(1, 12, 12, allow_is_causal_skip=False, **arguments)
    assert torch.equal(shown(mask_function(1, 12, 12, **arguments), 12, 12, causal=True)[:1], truth)


def test_sequences_whose_numbers_do_not_rise():
    """ESMC's chains have their user's numbers; the first, middle and last row, which are compared, agree."""
    chains = torch.tensor([[0, 2, 2, 1, 1, 1, 3, 3, 3, 3, 3, 3]])
    rule = theirs.and_masks(theirs.bidirectional_mask_function, theirs.packed_sequence_mask_function(chains))
    arguments = {"mask_function": rule, "allow_is_causal_skip": False}
    truth = theirs.sdpa_mask(1, 12, 12, **arguments)
    assert torch.equal(shown(mask_function(1, 12, 12, **arguments), 12, 12, causal=False)[:1], truth)
