from collections.abc import Iterator

import pytest
import torch

from pyattn.adapters import scratch
from pyattn.adapters.scratch import native


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products of any number of scores are recorded, and none is counted yet."""
    monkeypatch.setattr(native, "MIN_SCORES", 0)
    monkeypatch.setattr(native, "MIN_SCORES_READ", 0)
    monkeypatch.setattr(native, "MIN_QUERIES", 0)
    scratch.reset_counts()
    yield
    scratch.reset_counts()


@pytest.fixture
def fresh() -> Iterator[None]:
    """Compiled code of other tests is forgotten."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def found() -> list[int]:
    """How many calls of attention each compiled graph has."""
    return []
