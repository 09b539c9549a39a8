"""Tests of several Python threads."""

import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def many_switches() -> Iterator[None]:
    """Python changes threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(autouse=True, scope="session")
def loaded_rules() -> None:
    """torch loads the rules of vmap in its first call, and makes the lock for that without a lock."""
    torch.vmap(torch.neg)(torch.zeros(1))
