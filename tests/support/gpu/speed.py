"""TFLOP/s of forward and of backward, ours and each of torch's kernels, in turn in one process.

The causal half of the products counts, as in FlashAttention's papers: forward 4
B H T^2 D / 2 operations, backward 2.5 times as many.
"""

import dataclasses
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from support.gpu.child import Check
from support.gpu.device import Device
from torch import Tensor

import pyattn
from pyattn.cli.bench.sides import contenders
from pyattn.cli.bench.table import usable
from pyattn.cli.timing import Time, in_turn

BACKWARD = 2.5
"""Backward has five products, forward has two."""

Shape = tuple[int, int, int, int]
"""B, H, T, D."""


def forward_flops(shape: Shape) -> int:
    batch, heads, seqlen, head_dim = shape
    return 4 * batch * heads * seqlen**2 * head_dim // 2


def backward_of(name: str, attend: contenders.Attention, qkv: tuple[Tensor, ...], dout: Tensor) -> Callable[[], Any]:
    """Backward alone; its forward runs at the first call."""
    out = cache(partial(attend, *qkv))

    def call() -> Any:
        pyattn.set_deterministic(name != "pyattn nondeterministic")
        return torch.autograd.grad(out(), qkv, dout, retain_graph=True)

    return call


def measure(device: Device, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """The time of each side, and the reasons why others were left out."""
    *qkv, dout = (torch.randn(shape, dtype=dtype, device=device.name) for _ in range(4))
    leaves = tuple(x.requires_grad_() for x in qkv)
    functions = contenders.functions(device.name, flex=False)
    del functions["plain torch"]
    passes: dict[str, tuple[int, dict[str, Callable[[], Any]]]] = {
        "forward": (
            forward_flops(shape),
            {name: partial(attend, *(x.detach() for x in qkv)) for name, attend in functions.items()},
        ),
        "backward": (
            int(BACKWARD * forward_flops(shape)),
            {name: backward_of(name, attend, leaves, dout) for name, attend in functions.items()},
        ),
    }
    row: dict[str, Any] = {"shape": "x".join(map(str, shape)), "dtype": str(dtype).removeprefix("torch.")}
    for which, (flops, calls) in passes.items():
        with warnings.catch_warnings(), contenders.settings_kept():
            warnings.simplefilter("ignore")  # torch warns about kernels that it lacks for this dtype
            good, row[f"{which}_left_out"] = usable(calls)
            times = in_turn(good, "torch sdpa", device.seconds, device.name)
        row[which] = {name: rated(time, flops) for name, time in times.items()}
    return row


def rated(time: Time, flops: int) -> dict[str, float]:
    """The time, and the operations per second."""
    return dataclasses.asdict(time) | {"tflops": flops / time.seconds / 1e12}


def checks(device: Device) -> dict[str, Check]:
    return {
        f"{'x'.join(map(str, shape))} {dtype}": partial(measure, device, shape, getattr(torch, dtype))
        for shape, dtype in device.speed
    }
