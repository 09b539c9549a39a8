"""Promise: threads share the work; neither their number, nor their own state, nor a repeat changes a bit."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from support.assertions import DETECTS_RACES, assert_threads_change_no_bit
from support.backends import Backend
from support.cases import Case, each_dtype, run

from pyattn import _C, attention

CASES = [
    Case(1, 1, 1, 700, 700, 32, 32),
    Case(1, 8, 1, 300, 300, 32, 16),
    Case(3, 6, 2, 130, 190, 33, 20, dropout_p=0.1),
    Case(2, 4, 2, 3, 2500, 64, 64),
    Case(1, 2, 1, 300, 400, 32, 32, window=(60, -1), sinks=True),
    Case(2, 4, 2, 130, 190, 33, 20, causal=False, key_ranges="random", bias="bands hqk", alibi="h", relative="h 99"),
    Case(2, 4, 1, 130, 500, 16, 16, causal=False, key_ranges="pieces", bias="float qk"),
    Case(2, 2, 2, 130, 190, 16, 16, bias="float bhqk", softcap=2.0, sinks=True, dropout_p=0.1),
    Case(2, 4, 2, 4, 2100, 16, 16, mask="random bqk", alibi="bh", sinks=True),
    Case(2, 2, 2, 65, 140, 16, 16, mask="random qk", bias="bands bhqk", dropout_p=0.2),
    Case(2, 2, 1, 50, 70, 16, 16, mask="random bq strided", bias="bands qk strided", key_ranges="random"),
    Case(1, 6, 2, 3, 1300, 32, 16, mask="random bhqk", bias="bands bhqk", key_ranges="random"),
]


@each_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("isa", "threads")
def test_same_bits_for_any_number_of_threads(dtype: torch.dtype, case: Case) -> None:
    drawn, options = case.drawn(dtype), case.given(dtype)
    assert_threads_change_no_bit(lambda: run(attention, *drawn, **options), repeats=2)


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
    """Half of v is subnormal, so a thread that did not flush it would give other bits, whichever items it runs."""
    case = Case(2, 4, 2, 300, 300, 32, 32)
    (q, k, v), dout, _ = case.drawn(dtype)
    v[..., ::2] *= torch.finfo(dtype).tiny / 16
    with flushing():
        assert (attention(q, k, v)[..., ::2] == 0).all()
        assert_threads_change_no_bit(lambda: run(attention, (q, k, v), dout), repeats=5)


@pytest.mark.usefixtures("isa", "threads")
def test_threads_keep_their_own_way_with_subnormal_numbers() -> None:
    """attention restores the flags of torch's threads when it returns: torch's own product does not flush there."""
    torch.set_num_threads(2)
    small = torch.full((2**20,), torch.finfo(torch.float32).tiny)
    with flushing():
        attention(*Case(1, 4, 2, 300, 300, 32, 32).inputs(torch.float32))
    assert (small * 0.5 != 0).all()


@pytest.mark.usefixtures("threads")
def test_a_new_python_thread_is_alone_if_torch_has_one_thread() -> None:
    """OpenMP's number of threads belongs to the thread that set it; torch's holds for threads that come later."""
    torch.set_num_threads(1)
    inputs = Case(1, 4, 2, 300, 300, 32, 32).inputs(torch.float32)
    _C.start_profile()
    for _ in range(20):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(attention, *inputs).result()
    assert [task.pass_name for task in _C.stop_profile()] == ["forward"] * 20


@pytest.mark.usefixtures("threads")
def test_same_bits_over_a_hundred_repeats(native: Backend) -> None:
    """The case is small enough to repeat and large enough for threads; its one head has split keys."""
    case = Case(1, 1, 1, 130, 250, 32, 20)
    qkv, dout, dlse = case.drawn(torch.float32)
    torch.set_num_threads(3)
    once = run(native.attention, qkv, dout, dlse)
    for _ in range(1 if DETECTS_RACES else 100):
        native.assert_same(run(native.attention, qkv, dout, dlse), once)


@pytest.mark.usefixtures("isa", "threads")
def test_two_threads_are_used() -> None:
    """Forward and backward divide one head among threads.

    On a busy machine one thread may finish a call before the other wakes, so the
    threads are counted over up to 100 calls.
    """
    torch.set_num_threads(2)
    qkv, dout, _ = Case(1, 1, 1, 2048, 2048, 64, 64).drawn(torch.float32)
    threads: dict[str, set[int]] = {"forward": set(), "backward": set()}
    for _ in range(100):
        _C.start_profile()
        run(attention, qkv, dout)
        for task in _C.stop_profile():
            threads.setdefault(task.pass_name, set()).add(task.thread)
        if all(len(threads[name]) == 2 for name in ("forward", "backward")):
            return
    pytest.fail(f"threads of each pass: {threads}")
