"""Batches of short sequences: ``pyattn bench --only short``, beside torch's SDPA with the same mask or bias.

Vision models attend within windows or over a few hundred patches, models of molecules and tables over a few tokens:
packing a tile and storing it takes as long there as the products.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import pyattn
from pyattn.cli.bench.sides.calls import Calls, Run, Side, both

BASE = "torch sdpa"


class Batch(NamedTuple):
    """Sequences of one length, without a causal mask.

    Attributes:
        purpose: the model that has them.
        bias: "fixed" or "learned" scores added for each head and pair of positions, or "" for none.
        padded: whether sequence b ends after a part of its keys, the rest of which a bool mask hides.
    """

    purpose: str
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    bias: str = ""
    padded: bool = False


SIZES = (
    Batch("windows", 256, 3, 49, 49, 32, bias="fixed"),
    Batch("windows, learned bias", 256, 3, 49, 49, 32, bias="learned"),
    Batch("few tokens", 1024, 8, 16, 16, 16),
    Batch("narrow heads", 256, 8, 30, 30, 8),
    Batch("encoder, padded", 16, 12, 128, 128, 64, padded=True),
    Batch("encoder of patches", 4, 12, 197, 197, 64),
    Batch("few queries", 4, 12, 64, 1500, 64),
    Batch("pairs, learned bias", 64, 4, 128, 128, 32, bias="learned"),
)


def flops(sizes: Batch) -> int:
    """Floating-point operations of a forward, hidden keys included."""
    return 4 * sizes.batch * sizes.heads * sizes.queries * sizes.keys * sizes.head_dim


def sides(sizes: Batch, dtype: torch.dtype, device: str) -> dict[str, Side]:
    """Ours and BASE, by name, with the same inputs."""
    where: dict[str, Any] = {"dtype": dtype, "device": device}

    def random(rows: int) -> Tensor:
        return torch.randn(sizes.batch, sizes.heads, rows, sizes.head_dim, **where, requires_grad=True)

    q, k, v = random(sizes.queries), random(sizes.keys), random(sizes.keys)
    ours: dict[str, Any] = {"causal": False}
    theirs: dict[str, Any] = {}
    if sizes.bias:
        bias = torch.randn(1, sizes.heads, sizes.queries, sizes.keys, **where, requires_grad=sizes.bias == "learned")
        ours["bias"] = theirs["attn_mask"] = bias
    if sizes.padded:
        lengths = torch.linspace(sizes.keys // 2, sizes.keys, sizes.batch, device=device).long()
        mask = torch.arange(sizes.keys, device=device) < lengths[:, None, None, None]
        ours["mask"] = theirs["attn_mask"] = mask
    dout = torch.randn_like(q)
    return {
        "pyattn": Side(pyattn.attention, (q, k, v), dout, ours),
        BASE: Side(functional.scaled_dot_product_attention, (q, k, v), dout, theirs),
    }


def calls(run: Run, sizes: Batch) -> Calls:
    """A batch of short sequences."""
    return both(sides(sizes, *run.place), flops(sizes))
