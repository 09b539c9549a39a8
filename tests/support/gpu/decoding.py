"""GB/s at which one query per sequence reads its keys and values: ours, torch's attention and torch.sum, in turn.

K and V are read once, whatever the number of query heads, so the rate of ``torch.sum`` over as much memory is the upper
limit for attention. Each side is a graph of several calls, over keys and values that together exceed any cache: only
the kernels are timed, and memory.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from support.gpu import hardware
from support.gpu.child import Check
from support.gpu.device import Device
from support.gpu.hardware import Call
from torch.nn import functional

from pyattn import attention
from pyattn.cli.bench.table import usable
from pyattn.cli.timing import Time, in_turn

CACHES = 4
"""Size of a graph's keys and values, in caches: the last call's have left the cache when the first call repeats."""

Shape = tuple[int, int, int, int, int]
"""B, Hq, Hkv, Sk, D."""


def in_graphs(device: Device, sides: dict[str, list[Call]]) -> tuple[dict[str, Call], dict[str, str]]:
    """A call for each side that can be captured, and the reasons why others can't."""
    graphs: dict[str, Call] = {}

    def capture(name: str) -> None:
        graphs[name] = hardware.together(device, sides[name])

    _, reasons = usable({name: partial(capture, name) for name in sides})
    return graphs, reasons


@torch.no_grad()
def measure(device: Device, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """The time of each side, and the bytes of K and V over it."""
    batch, heads, num_heads_kv, seqlen, head_dim = shape
    size = 2 * batch * num_heads_kv * seqlen * head_dim * dtype.itemsize
    copies = 1 + CACHES * hardware.cache_bytes(device) // size
    q = torch.randn(batch, heads, 1, head_dim, dtype=dtype, device=device.name)
    keys_and_values = torch.randn(copies, 2, batch, num_heads_kv, seqlen, head_dim, dtype=dtype, device=device.name)
    sdpa: Callable[..., Any] = partial(functional.scaled_dot_product_attention, enable_gqa=heads != num_heads_kv)
    sides: dict[str, list[Call]] = {
        "torch sum": [kv.sum for kv in keys_and_values],
        "pyattn": [partial(attention, q, *kv) for kv in keys_and_values],
        "torch sdpa": [partial(sdpa, q, *kv) for kv in keys_and_values],
    }
    graphs, reasons = in_graphs(device, sides)
    times = in_turn(graphs, "torch sum", device.seconds, device.name)
    rates = {name: rated(time, copies, size) for name, time in times.items()}
    named = {"shape": "x".join(map(str, shape)), "dtype": str(dtype).removeprefix("torch.")}
    return named | {"calls": copies, "sides": rates, "left_out": reasons}


def rated(time: Time, calls: int, size: int) -> dict[str, float]:
    """The time of one of a graph's calls, and the bytes that it reads over it."""
    taken = {name: getattr(time, name) / calls for name in ("seconds", "low", "high")}
    return dataclasses.asdict(time) | taken | {"gb_per_s": size / taken["seconds"] / 1e9}


def checks(device: Device) -> dict[str, Check]:
    return {
        f"{'x'.join(map(str, shape))} {dtype}": partial(measure, device, shape, dtype)
        for shape in device.decoding
        for dtype in (torch.bfloat16, torch.float32)
    }
