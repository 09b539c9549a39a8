"""Promise: a long-lived process does not grow, and threads share no state."""

import gc
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.cases import Case, assert_equal, run

from pyattn import attention

STATM = Path("/proc/self/statm")
"""Linux reports the pages of this process here."""


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not STATM.exists(), reason="this system does not report resident memory")
def test_three_thousand_calls_grow_by_less_than_half_a_mebibyte() -> None:
    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))

    def call(times: int) -> int:
        for _ in range(times):
            torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
        gc.collect()
        return resident_bytes()

    def grows() -> bool:
        before = call(1000)
        return call(3000) - before >= 2**19

    assert not all(grows() for _ in range(3))  # a leak grows each time; other threads of the process allocate too


@pytest.mark.usefixtures("isa")
def test_eight_python_threads_at_once() -> None:
    cases = [Case(1, 2, 1, 50 + 40 * i, 90 + 30 * i, 8 + 4 * i, 16) for i in range(8)]
    inputs = [case.drawn(torch.float32) for case in cases]
    alone = [run(attention, *x) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for together, expected in zip(pool.map(lambda x: run(attention, *x), inputs), alone, strict=True):
                assert_equal(together, expected)
