"""Promise: if one rank's arguments are wrong, or those of all, every rank raises before any waits for another's data."""

import re

import pytest
import torch
from distributed import wrong
from distributed.pool import pool

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")

ANSWERS = {"return_lse False", "return_lse alone", "causal alone", "q_offset torch.int32", "dropout_seed list"}
ROWS = {"key_ranges size 1: 1", "mask size 2: 1", "bias size 2: 1", "layout alone"}
RIGHT = {
    "ring_attention": ANSWERS | ROWS,
    "ulysses_attention": ANSWERS | ROWS,
    "usp_attention": ANSWERS | ROWS,
    "ring_attention_varlen": ANSWERS | {"layout alone", "cu_seqlens_q torch.int32", "cu_seqlens_k torch.int32"},
    "attention_with_cache": ANSWERS
    | {"return_max_score False", "return_max_score alone", "key_ranges size 1: 1", "mask size 3: 1", "bias size 3: 1"},
    "unshard": {"tensor size 1: 4", "tensor size 1: 2", "dim 1", "layout alone"},
}
"""Changes of one rank that are no mistakes: its own results, another spelling, one row or column for all."""
RULE = re.compile(r"(TypeError|ValueError|NotImplementedError): pyattn: .*\b(got|has)\b .+", re.DOTALL)


STEPS = {"ring_attention": 5, "ulysses_attention": 5, "ring_attention_varlen": 5, "attention_with_cache": 3}
STEPS |= {"usp_attention": 41, "unshard": 1}
"""Of so many cases, the suite runs one: all take a minute, and with eight processes another three."""


def check(name: str, begin: int, step: int) -> None:
    """Every ``step``th case of a function, on one rank and on all."""
    for every in (False, True):
        by_rank = pool().run(8 if name == "usp_attention" else 2, wrong.outcomes, name, every, begin, step)
        assert by_rank[0]
        for found in zip(*by_rank, strict=True):
            errors = [outcome.error for outcome in found]
            assert len({bool(error) for error in errors}) == 1, found
            assert all(RULE.match(error) for error in errors if error), found
            assert not (any(errors) and any(outcome.messages for outcome in found)), found
            assert not any(outcome.fault for outcome in found), found
            assert every or bool(errors[0]) != (found[0].label in RIGHT[name]), found


@pytest.mark.parametrize("name", RIGHT)
def test_some_arguments(name: str) -> None:
    """The errors name the rule and the values; the next call has the bits of the one before them."""
    check(name, [*RIGHT].index(name), STEPS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_every_argument(name: str) -> None:
    """The same for all cases."""
    check(name, 0, 1)
