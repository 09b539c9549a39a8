import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Waiting threads sleep: on a busy machine, spinning ones take processors from the threads they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

pytest.register_assert_rewrite(
    "support.adapters.models",
    "support.adapters.softmaxes",
    "support.backends",
    "support.caches",
    "support.calls",
    "support.cases",
    "support.modules",
    "support.packed",
    "support.yardstick",
)

import emulated  # noqa: E402
import races  # noqa: E402
from support import fresh  # noqa: E402
from support.backends import Backend, chosen  # noqa: E402
from support.cases import seeded  # noqa: E402

FIXTURES: dict[str, Callable[[Backend], bool]] = {
    "backend": lambda b: b.family != "rehearsed",
    "repeatable": lambda b: b.repeatable and b.family != "rehearsed",  # once if two backends differ only in dq
    "native": lambda b: b.family in ("cpu", "cuda"),  # reached by torch's operators
    "emulation": lambda b: b.family == "emulated",
    "emulator": lambda b: b.family == "emulated" and b.repeatable,  # tests of the emulator, not of its kernels
    "cuda": lambda b: b.family == "cuda",
    "graphs": lambda b: b.family in ("cuda", "rehearsed"),
    "cuda_kernels": lambda b: b.cuda_kernels and b.repeatable,  # emulated or on a GPU
    "isa": lambda b: b.family == "cpu",
}
"""A test chooses its backends by the fixture it requests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", type=int, help="cases for each test of random cases, others each time")
    parser.addoption(
        "--backend", action="append", default=[], help="cpu, an instruction set, emulated, cuda: only tests of these"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collects GPU-only tests only with ``--backend cuda``, and transformers' tests only without ``--backend``.

    The latter depend on no backend, and a machine that tests a single backend may lack the library.
    """
    backends = config.getoption("backend")
    gpu = collection_path.name == "test_on_gpu.py" and "cuda" not in backends
    library = collection_path.parent.name == "transformers"
    return True if gpu or (library and backends) else None


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Backends come last, so all backends run a case one after the other and share its references."""
    backends = chosen(metafunc.config.getoption("backend"))
    for fixture, suits in FIXTURES.items():
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, list(filter(suits, backends)), ids=str, indirect=True)
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", sorted({b.device for b in backends}), indirect=True)


def backend_of(item: pytest.Item) -> Backend | None:
    """The test's backend; None if it requests none, or if none is chosen."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return next((x for name in FIXTURES if isinstance(x := parameters.get(name), Backend)), None)


def is_chosen(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether the test's backend takes its case; ``--backend`` excludes tests that depend on no backend."""
    backend, parameters = backend_of(item), getattr(item, "callspec", None)
    if backend is not None:
        return backend.takes(parameters.params.get("dtype"), parameters.params.get("case"))
    asks = set(item.fixturenames) & FIXTURES.keys()
    return not asks and (not config.getoption("backend") or "device" in item.fixturenames)


def in_turn(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The tests without half of the emulated ones in 16 bits, where float16 and bfloat16 share the kernels' source.

    If a test runs both with dQ added up atomically and without, then each case does one with either dtype. If it runs
    in one way, each case but the first takes one dtype. The Thue-Morse sequence says which: no option recurs with it.
    """
    numbers: dict[str, dict[str, int]] = defaultdict(dict)
    for item in items:
        backend, parameters = backend_of(item), getattr(item, "callspec", None)
        dtype = parameters.params.get("dtype") if parameters else None
        if dtype not in (torch.bfloat16, torch.float16) or library_of(item) is not emulated.library:
            yield item
            continue
        cases = numbers[item.nodeid.partition("[")[0]]
        number = cases.setdefault(item.callspec.id.replace(str(dtype), "").removesuffix(str(backend)), len(cases))
        is_its_turn = (number.bit_count() + (dtype == torch.float16)) % 2 == 1
        both_ways = {"backend", "emulation"} & set(item.fixturenames)
        if is_its_turn == backend.repeatable if both_ways else is_its_turn or number == 0:
            yield item


def library_of(item: pytest.Item) -> Callable[[], Any] | None:
    """The function that builds the emulated kernels for the test, if it needs any."""
    if item.path.name == "test_cuda_races.py":
        return races.library
    backend = backend_of(item)
    return emulated.library if backend is not None and backend.family == "emulated" else None


COMPILED: dict[Callable[[], Any], Future[Any]] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests that are not chosen or not in turn, and moves those that need emulated kernels to the end."""
    kept = list(in_turn([item for item in items if is_chosen(item, config)]))
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    order = (None, emulated.library, races.library)
    items[:] = sorted(kept, key=lambda item: order.index(library_of(item)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compiles the emulated kernels, half a minute each, on another processor while other tests run."""
    fresh.collect_rarely()  # modules and tests stay until the end
    if not session.config.option.collectonly:
        pool = ThreadPoolExecutor(1)
        for library in dict.fromkeys(filter(None, map(library_of, session.items))):
            COMPILED[library] = pool.submit(library)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if library := library_of(item):
        COMPILED[library].result()


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Runs the test once on each backend."""
    with request.param.selected():
        yield request.param


repeatable = native = emulation = emulator = cuda = graphs = cuda_kernels = backend


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once on each instruction set that this machine has."""
    with request.param.selected():
        yield request.param.name


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once on each device, where tensors are created; the test does not depend on its kernels."""
    with torch.device(request.param):
        yield request.param


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seeded_alike() -> None:
    seeded(0)


@pytest.fixture(autouse=True)
def compiled_afresh() -> Iterator[None]:
    """Discards the test's graphs: a function with eight of them runs uncompiled, or is refused with ``fullgraph``."""
    yield
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo and dynamo.input_codes.seen:
        torch.compiler.reset()
