"""Promise: eight Python threads at once, with or without the GIL, get what one thread gets."""

import importlib
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from support.cases import assert_equal
from support.threads import THREADS, WITHOUT_GIL, at_once, case
from torch import Tensor

import pyattn
from pyattn import _C


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


@pytest.mark.skipif(WITHOUT_GIL and sys.version_info < (3, 14), reason="torch.compile needs the GIL in Python 3.13")
def test_compiled_code() -> None:
    """Functions compiled in several threads, with score_mods of their own."""

    def work(number: int) -> tuple[Tensor, Tensor]:
        q, k, v, _ = case(number)
        function = torch.compile(lambda *x: pyattn.attention(*x, window=(number, 0)) * 2, backend="aot_eager")
        return function(q, k, v), pyattn.attention(q, k, v, window=(number, 0)) * 2

    for found, one in at_once(work, 4):
        assert_equal([found], [one])
