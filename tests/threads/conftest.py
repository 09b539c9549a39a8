"""Tests of several Python threads."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def many_switches() -> Iterator[None]:
    """Python changes threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
