"""The kinds of comparisons in ``pyattn bench``: their sides and their sizes."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from pyattn.cli.bench.sides import causal, decode, kv_caches, mask_cost, overhead, ring, short, varlen
from pyattn.cli.bench.sides.calls import Calls, Peaks, Run
from pyattn.cli.bench.table import Row, measure
from pyattn.cli.options import shape_of

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

SECONDS = 1.0
"""Time for a side's forward when there is no time limit; its forward and backward gets twice that."""


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
        causal.of_functions,
        "{}x{}x{}x{}",
        lambda options: shapes(options, (QUICK_SHAPES if options.quick else SHAPES)[options.device]),
    ),
    "modules": Kind(
        "multi-head modules",
        causal.of_modules,
        "module {}x{}x{}, {} heads,",
        lambda options: QUICK_MODULES if options.quick else MODULES,
    ),
    "features": Kind(
        "what masks and scores cost",
        mask_cost.calls,
        "features {}x{}x{}x{}",
        lambda options: shapes(options, FEATURE_SHAPES),
        mask_cost.BASE,
    ),
    "short": Kind(
        "batches of short sequences",
        short.calls,
        "{0}, {1}x{2}x{3}x{5} over {4} keys,",
        lambda options: few(options, short.SIZES),
        short.BASE,
    ),
    "overhead": Kind(
        "the fixed cost of small calls",
        overhead.calls,
        "{0} {1[0]}x{1[1]}x{1[2]}x{1[3]}",
        lambda options: few(options, overhead.SIZES),
        overhead.BASE,
    ),
    "varlen": Kind(
        "sequences as long as real texts, packed and padded",
        varlen.calls,
        "varlen {}",
        lambda options: few(options, [(text,) for text in varlen.TEXTS]),
        varlen.BASE,
    ),
    "cache": Kind(
        "one token over a KV cache",
        kv_caches.calls,
        "cache {}/{} heads, {} tokens,",
        lambda options: few(options, kv_caches.SIZES),
        kv_caches.BASE,
        "bytes",
    ),
    "decode": Kind(
        "a token of a model with and without a cache",
        decode.calls,
        "decode {}",
        lambda options: few(options, [(context,) for context in decode.CONTEXTS]),
        decode.BASE,
        "tokens",
    ),
    "distributed": Kind(
        "one process with --threads and as many ranks with one thread; bytes that ranks send",
        ring.calls,
        "distributed, {} positions,",
        lambda options: few(options, [(seqlen,) for seqlen in SEQLENS]),
        "pyattn attention, one process",
    ),
}
"""The kinds of comparisons by name. Without --only, the first two run."""

SHAPED = ("functions", "features")
"""Kinds that take their shapes from --shapes."""

AGAINST = ("functions", "cache")
"""Kinds with which two builds are compared unless --only names another."""

Comparison = Callable[[float], list[Row]]
"""Computes the rows of one comparison; its argument is the ``ends`` of :func:`pyattn.cli.bench.table.measure`."""


def planned(options: argparse.Namespace, peaks: Peaks, kinds: Sequence[str]) -> dict[str, tuple[Kind, Run, Any]]:
    """The kind, run and sizes of each comparison, by name; --quick runs modules and ranks in the first dtype only."""
    found: dict[str, tuple[Kind, Run, Any]] = {}
    for dtype in options.dtype:
        for name in kinds:
            if name in ("modules", "distributed") and options.quick and dtype != options.dtype[0]:
                continue
            kind = KINDS[name]
            for sizes in kind.sizes(options):
                what = f"{kind.name.format(*sizes)} {dtype}"
                found[what] = kind, Run(what, dtype, options.device, options.flex, peaks), sizes
    return found


def comparisons(options: argparse.Namespace, peaks: Peaks) -> dict[str, Comparison]:
    """The comparisons that the options ask for, by name."""
    plans = planned(options, peaks, [options.only] if options.only else list(KINDS)[:2])
    return {what: partial(kind.rows, run, sizes) for what, (kind, run, sizes) in plans.items()}
