"""Promise: if arguments of one rank or of all are wrong, every rank raises before any waits for another's data."""

import re
from typing import Any

import pytest
import torch
from support.ranks import wrong
from support.ranks.pool import pool

from pyattn import KVCache

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
"""The suite runs one of so many cases: all take a minute, and with eight processes another three."""


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


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("ring_attention", {"softcap": -1.0}, "softcap must be finite and at least 0, got -1.0"),
        ("ring_attention", {"causal": "yes"}, "causal must be bool, got 'yes'"),
        ("ring_attention", {"sinks": [1.0, 2.0]}, "sinks must be Tensor, got [1.0, 2.0]"),
        ("ring_attention", {"sinks": torch.zeros(4, device="meta")}, "sinks must be on q's device, got meta and cpu"),
        ("ring_attention", {"softmax": 1.0}, "ring_attention has no argument softmax"),
        (
            "ring_attention",
            {"q": torch.zeros(4, 4, 8)},
            "q must be (batch, heads, positions, head_dim), got shape (4, ",
        ),
        ("ring_attention", {"k": None}, "k must be Tensor, got None"),
        ("ring_attention_varlen", {"q": torch.zeros(4, 8)}, "q must be (positions, heads, head_dim), got shape (4, 8)"),
        (
            "ulysses_attention",
            {"mask": torch.ones(3, 1, 1).bool()},
            "mask must have 1 to 4 dimensions, each 1 or that ",
        ),
        ("attention_with_cache", {"q": None}, "q must be Tensor, got None"),
        ("attention_with_cache", {"cache": "k"}, "cache must be KVCache, got 'k'"),
        (
            "attention_with_cache",
            {"cache": KVCache(2, 2, 6, 8, window=(3, 0))},
            "a ring buffer on several ranks is not",
        ),
        ("attention_with_cache", {"window": (-2, 0)}, "window must be (left, right), each at least -1, got [-2, 0]"),
    ],
)
def test_arguments_of_a_graph(name: str, changes: dict[str, Any], message: str) -> None:
    """Also one that shows while the rank compiles: its graph raises the error when it runs, on all ranks."""
    (first, *faults), (last, *others) = pool().run(2, wrong.compiled_errors, name, changes)
    assert last.partition(": ")[2].startswith(f"pyattn: {message}")
    assert first == f"ValueError: pyattn: {name} failed on rank 1: {last.partition('pyattn: ')[2]}"
    assert faults == others == [""]
