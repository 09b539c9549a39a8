"""Threads share the work and change no bit, whatever their own state; neither do repeats."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from backends import Backend
from helpers import Case, assert_equal, each_dtype, run

from pyattn import _C, attention


@each_dtype
@pytest.mark.parametrize(
    "case",
    [Case(1, 1, 1, 700, 700, 32, 32), Case(1, 8, 1, 300, 300, 32, 16), Case(5, 6, 2, 130, 190, 33, 20, dropout_p=0.1)],
    ids=str,
)
@pytest.mark.usefixtures("isa", "threads")
def test_same_bits_for_any_number_of_threads(dtype: torch.dtype, case: Case) -> None:
    qkv, (dout, dlse) = case.inputs(dtype), case.gradients(dtype)
    torch.set_num_threads(1)
    once = run(attention, qkv, dout, dlse, **case.options)
    for n in (2, 3, 4, 7):
        torch.set_num_threads(n)
        for _ in range(3):
            assert_equal(run(attention, qkv, dout, dlse, **case.options), once)


@contextmanager
def flushing() -> Iterator[None]:
    """Subnormal numbers count as 0 in the calling thread."""
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.usefixtures("isa", "threads")
def test_threads_flush_subnormal_numbers_as_their_caller_does(dtype: torch.dtype) -> None:
    """Half of v is subnormal, so a thread that did not flush it would give other bits, wherever its items lie."""
    case = Case(2, 4, 2, 300, 300, 32, 32)
    (q, k, v), (dout, _) = case.inputs(dtype), case.gradients(dtype)
    v[..., ::2] *= torch.finfo(dtype).tiny / 16
    with flushing():
        torch.set_num_threads(1)
        once = run(attention, (q, k, v), dout)
        assert (once[0][..., ::2] == 0).all()
        for n in (2, 3, 4):
            torch.set_num_threads(n)
            for _ in range(5):
                assert_equal(run(attention, (q, k, v), dout), once)


@pytest.mark.usefixtures("isa", "threads")
def test_threads_keep_their_own_way_with_subnormal_numbers() -> None:
    """Torch's threads have their own flag back when attention returns: torch's own product does not flush there."""
    torch.set_num_threads(2)
    small = torch.full((2**20,), torch.finfo(torch.float32).tiny)
    with flushing():
        attention(*Case(1, 4, 2, 300, 300, 32, 32).inputs(torch.float32))
    assert (small * 0.5 != 0).all()


@pytest.mark.usefixtures("threads")
def test_same_bits_over_a_hundred_repeats(native: Backend) -> None:
    """The case is small enough to repeat and large enough for threads; its one head has its keys split."""
    case = Case(1, 1, 1, 130, 250, 32, 20)
    qkv, (dout, dlse) = case.inputs(torch.float32), case.gradients(torch.float32)
    torch.set_num_threads(3)
    once = run(native.attention, qkv, dout, dlse)
    for _ in range(100):
        native.assert_same(run(native.attention, qkv, dout, dlse), once)


@pytest.mark.usefixtures("isa", "threads")
def test_two_threads_are_used() -> None:
    """Forward and backward share one head between threads.

    On a busy machine one thread may finish a call before the other wakes, so the threads of up to 100 calls count.
    """
    torch.set_num_threads(2)
    qkv, (dout, _) = (case := Case(1, 1, 1, 2048, 2048, 64, 64)).inputs(torch.float32), case.gradients(torch.float32)
    threads: dict[str, set[int]] = {"forward": set(), "backward": set()}
    for _ in range(100):
        _C.start_profile()
        run(attention, qkv, dout)
        for task in _C.stop_profile():
            threads.setdefault(task.pass_name, set()).add(task.thread)
        if all(len(threads[name]) == 2 for name in ("forward", "backward")):
            return
    pytest.fail(f"threads of each pass: {threads}")
