"""The calls of each kind of comparison in ``pyattn bench``: one of each side, and the work that they do."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pyattn.cli.bench.sides import contenders, decode, kv_caches, mask_cost, runtimes, varlen
from pyattn.cli.bench.sides.contenders import Side
from pyattn.cli.bench.table import Call
from pyattn.cli.options import DTYPES

LARGEST_SCORES = 2**30
"""Bytes of a score matrix beyond which plain torch, which stores one, is left out."""

Sizes = tuple[int, ...]
Peaks = dict[tuple[str, str], float]
"""FLOP/s by dtype and instruction set."""


class Run(NamedTuple):
    """The name of a comparison and how to run it, with FlexAttention if ``flex``."""

    what: str
    dtype: str
    device: str
    flex: bool = False
    peaks: Peaks = {}  # noqa: RUF012  (nobody writes to it)

    @property
    def place(self) -> tuple[torch.dtype, str]:
        """dtype and device of the tensors."""
        return DTYPES[self.dtype], self.device

    def random(self, *shape: int) -> Tensor:
        """A random leaf of this shape."""
        return torch.randn(shape, dtype=DTYPES[self.dtype], device=self.device, requires_grad=True)


class Calls(NamedTuple):
    """One call of each side of a comparison.

    Attributes:
        forwards: by side.
        trainings: forward and backward, by side; a side without a backward has none.
        done: the operations, bytes or tokens of a forward; 0 if they are not counted.
        peak_bytes: memory of the sides that other processes compute.
    """

    forwards: Mapping[str, Call]
    trainings: Mapping[str, Call] = {}
    done: float = 0
    peak_bytes: Mapping[str, int | None] = {}


def both(sides: Mapping[str, Side], done: float = 0, others: Mapping[str, Call] = {}) -> Calls:
    """The calls of ``sides``, and of ``others``, which have no backward."""
    forwards = {name: side.forward for name, side in sides.items()} | dict(others)
    return Calls(forwards, {name: side.gradients for name, side in sides.items()}, done)


def of_functions(run: Run, shape: Sizes) -> Calls:
    """The functions on q, k, v of ``shape`` (B, H, T, D)."""
    batch, heads, seqlen, head_dim = shape
    *qkv, dout = (run.random(*shape) for _ in range(4))
    functions = contenders.functions(run.device, run.flex)
    if batch * heads * seqlen**2 * dout.itemsize > LARGEST_SCORES:
        del functions["plain torch"]
    sides = {name: Side(function, qkv, dout.detach()) for name, function in functions.items()}
    others = runtimes.forwards(*(t.detach() for t in qkv))
    return both(sides, 2 * batch * heads * seqlen * (seqlen + 1) * head_dim, others)


def of_modules(run: Run, sizes: Sizes) -> Calls:
    """The modules at ``sizes``: batch, seqlen, width, heads."""
    batch, seqlen, width, heads = sizes
    x, dout = (run.random(batch, seqlen, width) for _ in range(2))
    modules = contenders.modules(width, heads, seqlen, run.flex)
    return both({n: Side(m.to(device=run.device, dtype=x.dtype), [x], dout.detach()) for n, m in modules.items()})


def of_features(run: Run, shape: Sizes) -> Calls:
    """The masks and scores on q, k, v of ``shape`` (B, H, T, D), over our own causal attention."""
    *qkv, dout = (run.random(*shape) for _ in range(4))
    dense = math.prod(shape[1:3]) * shape[2] * dout.itemsize <= LARGEST_SCORES
    return both(mask_cost.sides(qkv, dout.detach(), dense))


def of_packed(run: Run, texts: tuple[str]) -> Calls:
    """Attention over sequences as long as real texts; operations on padding are not counted."""
    lengths = varlen.lengths_of(*texts, varlen.SEQUENCES)
    return both(varlen.sides(lengths, *run.place), varlen.flops(lengths))


def of_caches(run: Run, sizes: Sizes) -> Calls:
    """One token over a KV cache, at the sizes in :data:`pyattn.cli.bench.sides.kv_caches.SIZES`."""
    return Calls(kv_caches.sides(sizes, *run.place), done=kv_caches.bytes_read(sizes, run.place[0]))


def of_decoding(run: Run, contexts: tuple[int]) -> Calls:
    """Decoding one token of a model at the given context."""
    return Calls(decode.sides(contexts[0], *run.place), done=1)


def of_ranks(run: Run, seqlens: tuple[int]) -> Calls:
    """Attention over as many ranks as there are threads, at the given length of the whole sequence."""
    from pyattn.cli.bench.sides import ring

    found = ring.sides(seqlens[0], run.dtype, torch.get_num_threads())
    return Calls(found.forwards, found.trainings, ring.flops(seqlens[0]), found.peak_bytes)
