from collections.abc import Iterator

import pytest
import torch

pytest.register_assert_rewrite("helpers", "module_cases")

from pyattn import _C  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", type=int, help="random cases for test_random.py, others each time")


@pytest.fixture(params=_C.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once on each instruction set that this machine has."""
    before = _C.active_isa()
    _C.set_isa(request.param)
    assert _C.active_isa() == request.param
    yield request.param
    _C.set_isa(before)


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
