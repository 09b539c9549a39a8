"""One small case of every kernel, judged by the accuracy rule, then two programs under compute-sanitizer.

If these fail, the suite's minutes would be wasted.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from support.backends import exact_products
from support.cases import Case, assert_case_accurate
from support.gpu.child import Check
from support.gpu.device import Device
from support.gpu.sanitizer import watched
from support.packed import Unpadded

from pyattn import attention, attention_varlen, set_deterministic

GENERAL: dict[str, Any] = {"softcap": 3.0, "alibi": "h", "sinks": True}
FEW = 3
"""Only the last three head dimensions have kernels for general scores, splits and packed sequences."""

WATCHED = (("bfloat16", "batches"), ("float32", "packed"))


def cases(dims: tuple[int, ...]) -> Iterator[tuple[str, Case]]:
    """Batches: plain and general forward and backward, splits, and a bias's gradient by either kernel."""
    for d in dims:
        yield f"plain {d}", Case(2, 4, 2, 130, 197, d, d, dropout_p=0.2)
    for d in dims[-FEW:]:
        yield f"general {d}", Case(2, 4, 2, 130, 197, d, d, bias="bands hqk", key_ranges="documents", **GENERAL)
        yield f"split {d}", Case(2, 8, 2, 1, 700, d, d)
        yield f"general split {d}", Case(2, 8, 2, 3, 700, d, d, **GENERAL)
    yield "a bias for each score", Case(2, 4, 2, 70, 97, dims[-1], dims[-1], bias="float bhqk")


def packed_cases(dims: tuple[int, ...]) -> Iterator[tuple[str, Case]]:
    """Packed sequences, one split."""
    for d in dims[-FEW:]:
        yield f"packed plain {d}", Case(3, 4, 2, 130, 700, d, d)
        yield f"packed general {d}", Case(3, 4, 2, 130, 700, d, d, window=(90, -1), **GENERAL)


def on_device(device: Device, check: Callable[[], None], deterministic: bool) -> None:
    """Runs the check with tensors created there and exact products in torch, which are the yardstick."""
    exact_products()
    torch.manual_seed(0)
    set_deterministic(deterministic)
    with torch.device(device.name):
        check()


def packed_is_accurate(case: Case, dtype: torch.dtype) -> None:
    unpadded = Unpadded(case, [130, 0, 5], [130, 40, 700])
    unpadded.truth(dtype).assert_allows(partial(unpadded.attend, attention_varlen))


def checks(device: Device) -> dict[str, Check]:
    found: dict[str, Check] = {}
    for word, deterministic in itertools.product(device.dtypes, (True, False)):
        dtype = getattr(torch, word)
        if not deterministic and dtype.itemsize != 2:
            continue  # dQ is added up atomically only in 16 bits
        dims = device.dims if dtype != torch.float64 else device.dims[-1:]
        way = word if deterministic else f"{word} adding"
        known = [(name, partial(assert_case_accurate, case, dtype, attention)) for name, case in cases(dims)]
        known += [(name, partial(packed_is_accurate, case, dtype)) for name, case in packed_cases(dims)]
        found |= {f"{way} {name}": partial(on_device, device, check, deterministic) for name, check in known}
    return found | {f"memcheck {' '.join(what)}": partial(watched, "memcheck", device.name, *what) for what in WATCHED}
