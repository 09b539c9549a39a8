"""GB/s at which one query a sequence reads its keys and values, ours beside torch's attention and torch.sum, in turn.

K and V are read once, whatever the number of query heads, so that the rate of ``torch.sum`` over as much memory is what
attention can have.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_steps.child import Check
from torch.nn import functional

from pyattn import attention
from pyattn.cli.timing import in_turn

SECONDS = 0.25
"""Time for each side of a comparison."""

Shape = tuple[int, int, int, int, int]
"""B, Hq, Hkv, Sk, D."""

SHAPES: tuple[Shape, ...] = (
    (1, 8, 8, 16384, 128),
    (1, 32, 8, 16384, 128),
    (1, 32, 8, 131072, 128),
    (1, 32, 1, 131072, 64),
    (16, 32, 8, 4096, 128),
)


def measure(shape: Shape, dtype: torch.dtype, device: str, seconds: float) -> dict[str, Any]:
    """What each side took, and the bytes of K and V over it."""
    batch, heads, heads_kv, seqlen, head_dim = shape
    q = torch.randn(batch, heads, 1, head_dim, dtype=dtype, device=device)
    keys_and_values = torch.randn(2, batch, heads_kv, seqlen, head_dim, dtype=dtype, device=device)
    k, v = keys_and_values
    sides: dict[str, Callable[[], Any]] = {
        "torch sum": keys_and_values.sum,
        "pyattn": partial(attention, q, k, v),
        "torch sdpa": partial(functional.scaled_dot_product_attention, q, k, v, enable_gqa=heads != heads_kv),
    }
    times = in_turn(sides, "torch sum", seconds, device)
    size = keys_and_values.numel() * dtype.itemsize
    rates = {name: dataclasses.asdict(time) | {"gb_per_s": size / time.seconds / 1e9} for name, time in times.items()}
    return {"shape": "x".join(map(str, shape)), "dtype": str(dtype).removeprefix("torch."), "sides": rates}


def checks(device: str) -> dict[str, Check]:
    return {
        f"{'x'.join(map(str, shape))} {dtype}": partial(measure, shape, dtype, device, SECONDS)
        for shape in SHAPES
        for dtype in (torch.bfloat16, torch.float32)
    }
