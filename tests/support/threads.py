"""Work in several Python threads at once."""

import sysconfig
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

THREADS = 8
WITHOUT_GIL = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


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
    """q, k, v and the gradient of out, whose size depends on the seed."""
    generator = torch.Generator().manual_seed(seed)
    size = 3 + 17 * seed
    return tuple(torch.randn(2, heads, size, 16, generator=generator) for heads in (4, 2, 2, 4))
