"""Promise: short sequences and small calls are compared with the same computation in torch, switch included."""

import math
import re

import pytest
import torch
from support.assertions import assert_close
from torch.nn import functional

from pyattn.adapters import sdpa as switch
from pyattn.cli.bench import comparisons, table
from pyattn.cli.bench.sides import contenders, overhead, short
from pyattn.cli.bench.sides.calls import Run

RUN = Run("x", "float64", "cpu")


@pytest.mark.parametrize("sizes", short.SIZES, ids=lambda sizes: sizes.purpose)
def test_sides_of_short_sequences_compute_the_same(sizes):
    """Output and all gradients; a learned bias has one, a fixed bias has none."""
    sides = short.sides(sizes._replace(batch=3), torch.float64, "cpu")
    ours, theirs = sides["pyattn"], sides[short.BASE]
    assert ours.forward().shape == (3, sizes.heads, sizes.queries, sizes.head_dim)
    assert_close(ours.forward(), theirs.forward())
    gradients = ours.gradients()
    assert len(gradients) == (4 if sizes.bias == "learned" else 3)
    for gradient, other in zip(gradients, theirs.gradients(), strict=True):
        assert_close(gradient, other)


def test_padding_hides_a_part_of_the_keys():
    mask = short.sides(short.Batch("padded", 4, 1, 8, 8, 2, padded=True), torch.float32, "cpu")["pyattn"].options[
        "mask"
    ]
    assert mask.sum(-1).flatten().tolist() == [4, 5, 6, 8]


@pytest.mark.parametrize(("name", "shape"), overhead.SIZES)
def test_sides_of_small_calls_compute_the_same_each_time(name, shape):
    forwards, trainings = overhead.sides(name, shape, torch.float64, "cpu")
    assert set(trainings) == (set(forwards) if name == "attention" else set())
    with contenders.settings_kept():
        for calls in (forwards, trainings):
            for _ in range(2 if calls else 0):
                assert_close(calls["pyattn"](), calls[overhead.BASE]())


def test_the_switch_is_on_for_our_side_alone(monkeypatch):
    met = []
    monkeypatch.setattr(overhead, "sdpa", lambda *qkv: met.append(switch.is_enabled()))
    forwards, _ = overhead.sides("F.sdpa under the switch", (1, 1, 2, 2), torch.float32, "cpu")
    with contenders.settings_kept():
        for side in ("pyattn", "pyattn", overhead.BASE, "pyattn"):
            forwards[side]()
    assert met == [True, True, False, True]
    assert not switch.is_enabled()
    assert functional.scaled_dot_product_attention(*torch.ones(3, 1, 1, 2, 2)).shape == (1, 1, 2, 2)


def test_a_switch_that_is_on_stays_on():
    switch.enable()
    try:
        with contenders.settings_kept():
            switch.disable()
        assert switch.is_enabled()
    finally:
        switch.disable()


@pytest.mark.parametrize("kind", ["short", "overhead"])
def test_rows(kind, capsys, monkeypatch):
    """Both kinds have a row of ours and a base; times below a millisecond are shown in microseconds."""
    monkeypatch.setattr(comparisons, "SECONDS", 0.0)
    sizes = short.Batch("x", 1, 1, 2, 3, 2) if kind == "short" else ("attention", (1, 1, 2, 2))
    rows = comparisons.KINDS[kind].rows(RUN, sizes, math.inf)
    assert [row["side"] for row in rows] == ["pyattn", "torch sdpa"]
    assert ("flops_per_second" in rows[0]["forward"]) == (kind == "short")
    for row in rows:
        row["forward"]["seconds"], row["forward_backward"]["seconds"] = 9.5e-6, 99e-6
    table.show(rows)
    shown = capsys.readouterr().out
    assert re.search(r"^forward +us ", shown, re.MULTILINE)
    assert "    9.500" in shown
    rows[0]["forward_backward"]["seconds"] = 1.01e-3
    table.show(rows)
    assert re.search(r"^forward\+backward +ms ", capsys.readouterr().out, re.MULTILINE)
