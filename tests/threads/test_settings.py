"""Promise: settings, counts and warnings that Python threads share are changed as a whole.

Races are made to happen where they can: a step between a check and what follows from it is slowed down.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from support.threads import THREADS, at_once, slow

import pyattn
from pyattn.adapters.tally import Tally
from pyattn.derivatives import autograd
from pyattn.ops import row_invariance
from pyattn.options import polarity


@pytest.fixture
def default_settings() -> Iterator[None]:
    yield
    pyattn.set_deterministic(True)
    pyattn.set_row_invariant(False)


@pytest.mark.usefixtures("default_settings")
def test_set_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    def changes() -> list[Callable[[], Any]]:
        return [partial(pyattn.set_deterministic, number % 2 == 0) for number in range(THREADS)]

    settings_agree(monkeypatch, autograd, "set_deterministic", changes, autograd.deterministic)


@pytest.mark.usefixtures("default_settings")
def test_set_row_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that end at once, each with the value before it."""

    def changes() -> list[Callable[[], Any]]:
        blocks = [pyattn.set_row_invariant(number % 2 == 0) for number in range(THREADS)]
        return [partial(block.__exit__, None, None, None) for block in blocks]

    settings_agree(monkeypatch, row_invariance, "set_row_invariant", changes, row_invariance.row_invariant)


def settings_agree(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    operator: str,
    changes: Callable[[], list[Callable[[], Any]]],
    setting: Callable[[], bool],
) -> None:
    """Asserts that Python's copy of a setting and the operators' agree whichever change came last."""
    held = []

    def set_native(value: bool) -> None:
        time.sleep(0.003 * value)
        held.append(value)

    with monkeypatch.context() as patched:
        patched.setattr(module.ops, operator, set_native)
        for _ in range(10):
            each = changes()
            at_once(lambda number, each=each: each[number]())
            assert setting() is held[-1]


def test_counts() -> None:
    """No call is lost between the reading of a count and its writing."""

    class Counts(Counter[str]):
        def __getitem__(self, outcome: str) -> int:
            return slow(super().__getitem__)(outcome)

    tally = Tally()
    tally._counted = Counts()
    at_once(lambda _: [tally.count("call") for _ in range(3)])
    assert tally.counted() == {"call": 3 * THREADS}


def test_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowlyFalse:
        __bool__ = slow(lambda _: False)

    told = list[object]()
    monkeypatch.setattr(polarity, "_warned", SlowlyFalse())
    monkeypatch.setattr(polarity.warnings, "warn", lambda *args, **_: told.append(args))
    at_once(lambda _: polarity.warn_if_all_hidden(torch.full((1, 1, 4), -torch.inf), 4))
    assert len(told) == 1
