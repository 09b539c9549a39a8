"""The kinds of comparisons in ``pyattn bench``: their sides and their sizes."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyattn.cli.bench.sides import contenders, decode, kv_caches, mask_cost, runtimes, varlen
from pyattn.cli.bench.sides.contenders import Side
from pyattn.cli.bench.table import Call, Row, measure
from pyattn.cli.options import DTYPES, shape_of

SHAPES = {
    "cpu": ["1x8x128x64", "1x8x512x64", "1x4x1024x64", "1x2x2048x64", "1x1x4096x64", "1x4x1024x32", "1x4x1024x128"],
    "cuda": [f"{bht}x{d}" for bht in ("4x16x2048", "2x16x4096", "1x16x8192", "1x16x16384") for d in (64, 128)],
}
QUICK_SHAPES = {"cpu": ["1x8x128x64", "1x4x1024x64"], "cuda": ["4x16x2048x64", "4x16x2048x128"]}
FEATURE_SHAPES = ["1x4x2048x64"]
MODULES = ((8, 256, 256, 8), (4, 1024, 768, 12))
"""batch, seqlen, width and heads of a small model and of GPT-2 small."""
QUICK_MODULES = ((2, 256, 256, 8),)
SEQLENS = (8192, 32768)
"""Positions of all ranks together."""

LARGEST_SCORES = 2**30
"""Bytes of a score matrix beyond which plain torch, which stores one, is left out."""

SECONDS = 1.0
"""Time for a side's forward when there is no time limit; its forward and backward gets twice that."""

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


class Kind(NamedTuple):
    """A kind of comparison.

    Attributes:
        purpose: its description in --help.
        calls: makes the calls of one comparison.
        name: the name of one comparison, with its sizes.
        sizes: the sizes of all comparisons that the options ask for.
        base: the side that speed-ups are relative to.
        unit: what a forward gets done.
    """

    purpose: str
    calls: Callable[[Run, Any], Calls]
    name: str
    sizes: Callable[[argparse.Namespace], Sequence[Any]]
    base: str = "torch sdpa"
    unit: str = "flops"

    def rows(self, run: Run, sizes: Any, ends: float) -> list[Row]:
        """The rows of one comparison, with the rate of each side, and its share of the peak if that counts operations.

        ``ends`` as in :func:`pyattn.cli.bench.table.measure`.
        """
        forwards, trainings, done, peak_bytes = self.calls(run, sizes)
        rows = measure(run.what, self.base, forwards, trainings, SECONDS, ends, run.device)
        by_isa = {isa: peak for (dtype, isa), peak in run.peaks.items() if (dtype, self.unit) == (run.dtype, "flops")}
        for row in rows:
            if "peak_bytes" in row and row["side"] in peak_bytes:
                row["peak_bytes"] = peak_bytes[row["side"]]
        for row in rows if done else ():
            for key, share in (("forward", 1.0), ("forward_backward", 3.5)):
                if key in row:
                    rate = row[key][f"{self.unit}_per_second"] = share * done / row[key]["seconds"]
                    if by_isa:
                        isa = row["side"].removeprefix("pyattn ")
                        row[key]["of_peak"] = rate / by_isa.get(isa, max(by_isa.values()))
        return rows


def shapes(options: argparse.Namespace, defaults: Sequence[str]) -> list[tuple[int, ...]]:
    """The shapes of the options, or else the defaults."""
    return [shape_of(text) for text in options.shapes or defaults]


def few(options: argparse.Namespace, sizes: Sequence[Any]) -> Sequence[Any]:
    """All of ``sizes``, or only the first with --quick."""
    return sizes[:1] if options.quick else sizes


KINDS = {
    "functions": Kind(
        "attention",
        of_functions,
        "{}x{}x{}x{}",
        lambda options: shapes(options, (QUICK_SHAPES if options.quick else SHAPES)[options.device]),
    ),
    "modules": Kind(
        "multi-head modules",
        of_modules,
        "module {}x{}x{}, {} heads,",
        lambda options: QUICK_MODULES if options.quick else MODULES,
    ),
    "features": Kind(
        "what masks and scores cost",
        of_features,
        "features {}x{}x{}x{}",
        lambda options: shapes(options, FEATURE_SHAPES),
        mask_cost.BASE,
    ),
    "varlen": Kind(
        "sequences as long as real texts, packed and padded",
        of_packed,
        "varlen {}",
        lambda options: few(options, [(text,) for text in varlen.TEXTS]),
        varlen.BASE,
    ),
    "cache": Kind(
        "one token over a KV cache",
        of_caches,
        "cache {}/{} heads, {} tokens,",
        lambda options: few(options, kv_caches.SIZES),
        kv_caches.BASE,
        "bytes",
    ),
    "decode": Kind(
        "a token of a model with and without a cache",
        of_decoding,
        "decode {}",
        lambda options: few(options, [(context,) for context in decode.CONTEXTS]),
        decode.BASE,
        "tokens",
    ),
    "distributed": Kind(
        "one process with --threads and as many ranks with one thread; bytes that ranks send",
        of_ranks,
        "distributed, {} positions,",
        lambda options: few(options, [(seqlen,) for seqlen in SEQLENS]),
        "pyattn attention, one process",
    ),
}
"""The kinds of comparisons by name. Without --only, the first two run."""

SHAPED = ("functions", "features")
"""Kinds that take their shapes from --shapes."""

Comparison = Callable[[float], list[Row]]
"""Computes the rows of one comparison; its argument is the ``ends`` of :func:`pyattn.cli.bench.table.measure`."""


def comparisons(options: argparse.Namespace, peaks: Peaks) -> dict[str, Comparison]:
    """The comparisons that the options ask for, by name; --quick runs modules and ranks in the first dtype only."""
    todo: dict[str, Comparison] = {}
    for dtype in options.dtype:
        for name in [options.only] if options.only else list(KINDS)[:2]:
            if name in ("modules", "distributed") and options.quick and dtype != options.dtype[0]:
                continue
            kind = KINDS[name]
            for sizes in kind.sizes(options):
                what = f"{kind.name.format(*sizes)} {dtype}"
                run = Run(what, dtype, options.device, options.flex, peaks)
                todo[what] = partial(kind.rows, run, sizes)
    return todo
