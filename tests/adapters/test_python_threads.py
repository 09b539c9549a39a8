"""Promise: eight Python threads at once, with or without the GIL, get what one thread gets, also of what they share.

Races are made to happen where they can: a step between a check and what follows from it is slowed down.
"""

import importlib
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.cases import assert_equal
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import pyattn
from pyattn import _C
from pyattn.adapters import flash_attn, sdpa, torch_varlen
from pyattn.adapters.flash_attn.rotary_embedding import RotaryEmbedding
from pyattn.adapters.flex import create_block_mask, flex_attention
from pyattn.adapters.flex.compiled import masks as flex_masks
from pyattn.adapters.flex.compiled import programs
from pyattn.adapters.tally import Tally
from pyattn.derivatives import autograd
from pyattn.ops import row_invariance
from pyattn.options import polarity

THREADS = 8
WITHOUT_GIL = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


@pytest.fixture(autouse=True)
def many_switches() -> Iterator[None]:
    """Python changes threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """The results of ``work(0)``, ``work(1)``, ... in threads that begin together; the first error is raised."""
    gate = threading.Barrier(threads)

    def run(number: int) -> Any:
        gate.wait()
        return work(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(run, range(threads)))


def slow(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with time for another thread before it returns."""

    def slowed(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        time.sleep(0.02)
        return result

    return slowed


def case(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    size = 3 + 17 * seed
    return tuple(torch.randn(2, heads, size, 16, generator=generator) for heads in (4, 2, 2, 4))


def with_gradients(seed: int, **options: Any) -> list[Tensor]:
    *qkv, dout = case(seed)
    qkv = [t.requires_grad_() for t in qkv]
    out = pyattn.attention(*qkv, **options)
    return [out.detach(), *torch.autograd.grad(out, qkv, dout)]


def test_the_gil_stays_off() -> None:
    """The extension says that it needs none; without that, its import would switch the GIL on."""
    if WITHOUT_GIL:
        assert not sys._is_gil_enabled()  # type: ignore[attr-defined]
    importlib.import_module("pyattn._C")


@pytest.mark.parametrize("options", [{}, {"window": (9, 0), "softcap": 5.0}, {"dropout_p": 0.3, "dropout_seed": 7}])
def test_calls(options: dict[str, Any]) -> None:
    """Same bits forward and backward, whatever other threads compute."""
    expected = [with_gradients(seed, **options) for seed in range(THREADS)]
    for _ in range(5):
        for found, one in zip(at_once(lambda seed: with_gradients(seed, **options)), expected, strict=True):
            assert_equal(found, one)


def test_instruction_sets_change_meanwhile() -> None:
    """Each call takes one of them, from its plan to its last pass."""
    isas = _C.available_isas()
    before, expected = _C.active_isa(), []
    for isa in isas:
        _C.set_isa(isa)
        expected.append(with_gradients(6)[0])

    def work(number: int) -> bool:
        for turn in range(20):
            if number == 0:
                _C.set_isa(isas[turn % len(isas)])
            out = with_gradients(6)[0]
            if not any(torch.equal(out, one) for one in expected):
                return False
        return True

    try:
        assert all(at_once(work))
    finally:
        _C.set_isa(before)


def test_profiles() -> None:
    """Threads that record and read the profile at once each get whole records, and none twice."""

    def work(number: int) -> list[Any]:
        found = []
        for _ in range(20):
            _C.start_profile()
            with_gradients(number)
            found += _C.stop_profile()
        return found

    records = [record for each in at_once(work) for record in each]
    _C.stop_profile()
    assert records
    keys = Counter((r.pass_name, r.thread, r.begin_ns, r.end_ns, tuple(r.ticks)) for r in records)
    assert max(keys.values()) == 1
    assert all(r.items > 0 and r.begin_ns <= r.end_ns and r.isa in _C.available_isas() for r in records)


def test_no_record_is_lost() -> None:
    """Threads that add to one profile: it has as many records of each call as one thread's has."""
    q, k, v, _ = case(0)

    def work(_: int) -> None:
        for _ in range(2000):
            pyattn.attention(q, k, v)

    _C.start_profile()
    work(0)
    alone = len(_C.stop_profile())
    _C.start_profile()
    at_once(work)
    assert len(_C.stop_profile()) == THREADS * alone > 0


def test_sdpa_is_switched() -> None:
    """Every call is torch's or ours, whole, and the switch is off in the end."""
    q, k, v, _ = case(4)
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)

    def work(number: int) -> None:
        for _ in range(10):
            if number % 2:
                with sdpa.enabled():
                    assert sdpa.is_enabled()
                    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, is_causal=True), expected)
            else:
                torch.testing.assert_close(scaled_dot_product_attention(q, k, v, is_causal=True), expected)

    at_once(work)
    assert not sdpa.is_enabled()


def test_the_alias() -> None:
    """Blocks overlap: the first that ends leaves the alias to the others, the last one switches it off."""

    def work(number: int) -> None:
        for _ in range(5):
            with flash_attn.alias():
                time.sleep(0.001 * number)
                assert flash_attn.enabled()
                module = importlib.import_module("flash_attn_interface")
                assert module.flash_attn_func.__module__ == "pyattn.adapters.flash_attn.hopper.dense"

    at_once(work)
    assert not flash_attn.enabled()
    assert not [name for name in sys.modules if name.startswith("flash_attn")]


def test_torchs_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is activated once: two threads that find it inactive do not both activate it."""
    activated, state = [], {"name": None}

    def activate(name: str) -> None:
        time.sleep(0.02)
        activated.append(name)
        state["name"] = name

    torchs = SimpleNamespace(
        register_flash_attention_impl=lambda *_, **__: None,
        current_flash_attention_impl=lambda: state["name"],
        activate_flash_attention_impl=activate,
    )
    monkeypatch.setattr(torch_varlen, "torch_attention", torchs)
    at_once(lambda _: torch_varlen.activate())
    assert activated == [torch_varlen.NAME]


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


def test_names_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that share their names: each program has a separate name, or a graph runs another's."""
    monkeypatch.setattr(programs, "PROGRAMS", {})
    monkeypatch.setattr(programs, "_names", {})
    monkeypatch.setattr(programs, "Program", slow(lambda calls, *_: calls))

    def function_of(number: int) -> Callable[[], int]:
        def same_name() -> int:
            return number

        return same_name

    functions = [function_of(number) for number in range(THREADS)]
    names = at_once(lambda number: programs.name_of(((functions[number], (), {}),), "%0"))
    assert len(set(names)) == THREADS
    for number, name in enumerate(names):
        assert programs.PROGRAMS[name][0][0] is functions[number]


def test_numbers_of_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph refers to block masks by number, which no two share."""

    class Numbers:
        """Counts as itertools.count does without the GIL: it reads, and then writes."""

        last = 0

        def __next__(self) -> int:
            now = self.last
            time.sleep(0.005)
            self.last = now + 1
            return now

    monkeypatch.setattr(flex_masks, "_numbers", Numbers())
    monkeypatch.setattr(flex_masks, "NUMBERED", type(flex_masks.NUMBERED)())

    def work(number: int) -> Any:
        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q * 3 + k) % (2 + number) == 0

        return create_block_mask(mask_mod, None, None, 32, 32, device="cpu")

    found = at_once(work)
    assert len({mask.numbered.number for mask in found}) == THREADS
    assert all(flex_masks.NUMBERED[mask.numbered.number] is mask for mask in found)


def test_one_mask_in_all_threads() -> None:
    """A mask that is remembered, and evaluated again when its tensor has changed: each thread sees a whole one."""
    limit = torch.tensor([5])
    mask = create_block_mask(lambda b, h, q, k: (q * k) % limit[0] != 1, None, None, 64, 64, device="cpu")
    q, k, v = torch.randn(3, 1, 2, 64, 16).unbind()
    expected = []
    for value in (5, 7):
        limit[0] = value
        expected.append(flex_attention(q, k, v, None, mask))

    def work(number: int) -> None:
        for turn in range(10):
            if number == 0:
                limit[0] = (5, 7)[turn % 2]
            found = flex_attention(q, k, v, None, mask)
            assert found.shape == expected[0].shape

    at_once(work)
    for value, one in zip((5, 7), expected, strict=True):
        limit[0] = value
        for found in at_once(lambda _: flex_attention(q, k, v, None, mask)):
            assert_equal([found], [one])


def test_one_rotary_embedding_in_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tables grow while others read them, in two dtypes."""
    module, fresh = RotaryEmbedding(8), [RotaryEmbedding(8) for _ in range(THREADS)]
    monkeypatch.setattr(RotaryEmbedding, "_update_cos_sin_cache", slow(RotaryEmbedding._update_cos_sin_cache))

    def turned(rotary: RotaryEmbedding, number: int) -> Tensor:
        torch.manual_seed(number)
        x = torch.ones(1, 4 + 5 * number, 3, 2, 8, dtype=(torch.float32, torch.float64)[number % 2])
        return rotary(x)

    expected = [turned(fresh[number], number) for number in range(THREADS)]
    for found, one in zip(at_once(lambda number: turned(module, number)), expected, strict=True):
        assert_equal([found], [one])


@pytest.mark.skipif(WITHOUT_GIL and sys.version_info < (3, 14), reason="torch.compile needs the GIL in Python 3.13")
def test_compiled_code() -> None:
    """Functions compiled in several threads, with score_mods of their own."""

    def work(number: int) -> tuple[Tensor, Tensor]:
        q, k, v, _ = case(number)
        function = torch.compile(lambda *x: pyattn.attention(*x, window=(number, 0)) * 2, backend="aot_eager")
        return function(q, k, v), pyattn.attention(q, k, v, window=(number, 0)) * 2

    for found, one in at_once(work, 4):
        assert_equal([found], [one])
