"""Random cases by hypothesis."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings

import pyattn


def check_examples(request: pytest.FixtureRequest, count: int, check: Callable[[], None]) -> None:
    """``check``, which may set the instruction set, of ``count`` cases, the same each time.

    With ``--examples`` of that many, others each time.
    """
    asked, isa = request.config.getoption("examples"), pyattn.isa()
    drawn = settings(
        max_examples=asked or count,
        derandomize=not asked,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    try:
        drawn(check)()
    finally:
        pyattn.set_isa(isa)
