"""Assertions beyond equality: closeness, one-sentence refusals, one graph, same bits for any number of threads."""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch
from support.cases import assert_equal
from torch import Tensor

import pyattn

Refusals = list[tuple[Any, type[Exception], str]]
"""Arguments, and the error that each must raise."""

DETECTS_RACES = "libtsan" in os.environ.get("LD_PRELOAD", "")
"""Whether the thread sanitizer watches: it reports a race in the first run, so repeats would show it nothing new."""


def assert_close(ours: Any, expected: Any, atol: float = 1e-12) -> None:
    """Asserts that two results, however nested, differ by at most ``atol``."""
    torch.testing.assert_close(ours, expected, rtol=0, atol=atol)


def assert_threads_change_no_bit(call: Callable[[], Iterable[Tensor]], repeats: int = 1) -> None:
    torch.set_num_threads(1)
    once = tuple(call())
    for n in (2, 3, 4, 5, 7):
        torch.set_num_threads(n)
        for _ in range(1 if DETECTS_RACES else repeats):
            assert_equal(call(), once)


def graph_of(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The function freshly compiled into a single graph."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


@contextmanager
def nan_filled() -> Iterator[None]:
    """Inside the block, torch.empty is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def finite(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Both, with -inf replaced by 0, because -inf has no differences."""
    return out, lse.masked_fill(lse == -math.inf, 0.0)


def refused(kind: type[Exception], message: str, inside: bool = False) -> Any:
    """A block that must raise one sentence: the library's name, then ``message``, anywhere if ``inside``."""
    return pytest.raises(kind, match=f"^pyattn: {'.*' * inside}{re.escape(message)}")


def each_refusal(refusals: Refusals) -> pytest.MarkDecorator:
    """Parametrises ``changes``, ``kind`` and ``message`` of each refusal."""
    return pytest.mark.parametrize(("changes", "kind", "message"), refusals, ids=[m[:40] for *_, m in refusals])


def check_examples(request: pytest.FixtureRequest, count: int, check: Callable[[Random], None]) -> None:
    """Runs ``check``, which may set the instruction set, with ``count`` generators, the same ones each time.

    ``--examples`` sets another count, with new ones each time. A failed test prints its generator.
    """
    asked, isa = request.config.getoption("examples"), pyattn.isa()
    first = seed = Random().getrandbits(32) if asked else 0
    try:
        for seed in range(first, first + (asked or count)):
            check(Random(seed))
    except BaseException:
        print(f"in the example of Random({seed})")
        raise
    finally:
        pyattn.set_isa(isa)


def assert_as_exact(ours: Tensor, plain: Tensor, exact: Tensor) -> None:
    """``ours`` has the dtype of ``plain``, and about its distance from ``exact``, which is in float64."""
    assert ours.dtype == plain.dtype
    error, theirs = ((x.double() - exact).abs().max() for x in (ours, plain))
    assert error <= 2 * theirs + 4 * torch.finfo(ours.dtype).eps * exact.abs().max()
