"""The kinds of comparisons that ``pyattn bench`` makes: who is beside whom, and at which sizes."""

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyattn.cli import contenders, decoding, features, kv_caches, packed, runtimes
from pyattn.cli.options import DTYPES, shape_of
from pyattn.cli.rows import Call, Row, measure
from pyattn.cli.timing import in_turn

SHAPES = {
    "cpu": ["1x8x128x64", "1x8x512x64", "1x4x1024x64", "1x2x2048x64", "1x1x4096x64", "1x4x1024x32", "1x4x1024x128"],
    "cuda": [f"{bht}x{d}" for bht in ("4x16x2048", "2x16x4096", "1x16x8192", "1x16x16384") for d in (64, 128)],
}
QUICK_SHAPES = {"cpu": ["1x8x128x64", "1x4x1024x64"], "cuda": ["4x16x2048x64", "4x16x2048x128"]}
FEATURE_SHAPES = ["1x4x2048x64"]
MODULES = ((8, 256, 256, 8), (4, 1024, 768, 12))
"""batch, seqlen, width, heads of a small model and of GPT-2 small."""
QUICK_MODULES = ((2, 256, 256, 8),)

LARGEST_SCORES = 2**30
"""Bytes of a score matrix beyond which plain torch, which makes one, is left out."""

FUNCTION_SECONDS, MODULE_SECONDS, TOKEN_SECONDS = 1.0, 2.0, 2.0
"""Time for the forward of a side without a time limit; its forward and backward gets twice that."""

Sizes = tuple[int, ...]
Peaks = dict[tuple[str, str], float]
"""FLOP/s by dtype and instruction set."""


class Run(NamedTuple):
    """What a comparison is called, and how it is made, FlexAttention with it where ``flex``."""

    what: str
    dtype: str
    device: str
    flex: bool = False
    peaks: Peaks = {}  # noqa: RUF012  (nobody writes to it)

    def tensor(self, **more: Any) -> dict[str, Any]:
        """How its tensors are made."""
        return {"dtype": DTYPES[self.dtype], "device": self.device, **more}


def rated(rows: list[Row], flops: float, run: Run) -> list[Row]:
    """The rows with operations a second, ``flops`` in a forward, and with their share of the peak."""
    by_isa = {isa: peak for (dtype, isa), peak in run.peaks.items() if dtype == run.dtype}
    for row in rows:
        for key, share in (("forward", 1.0), ("forward_backward", 3.5)):
            if key in row:
                rate = row[key]["flops_per_second"] = share * flops / row[key]["seconds"]
                if by_isa:
                    row[key]["of_peak"] = rate / by_isa.get(row["side"].removeprefix("pyattn "), max(by_isa.values()))
    return rows


def of_sides(
    run: Run, base: str, sides: dict[str, features.Side], qkv: Sequence[Tensor], ends: float, others: dict[str, Call]
) -> list[Row]:
    """Rows of functions of q, k, v, each with its options, and of ``others``, which have no backward."""
    dout, inputs = torch.randn_like(qkv[0]), [t.detach() for t in qkv]

    def both(function: Callable[..., Any], options: dict[str, Any]) -> Any:
        leaves = [t for t in (*qkv, *options.values()) if isinstance(t, Tensor) and t.requires_grad]
        return torch.autograd.grad(function(*qkv, **options), leaves, dout)

    forwards: dict[str, Call] = {n: partial(f, *inputs, **options) for n, (f, options) in sides.items()}
    trainings: dict[str, Call] = {n: partial(both, *side) for n, side in sides.items()}
    return measure(run.what, base, forwards | others, trainings, FUNCTION_SECONDS, ends, run.device)


def of_functions(run: Run, shape: Sizes, ends: float) -> list[Row]:
    """Rows of the functions on q, k, v of ``shape`` (B, H, T, D)."""
    batch, heads, seqlen, head_dim = shape
    qkv = [torch.randn(shape, **run.tensor(requires_grad=True)) for _ in range(3)]
    functions = contenders.functions(run.device, run.flex)
    if batch * heads * seqlen**2 * qkv[0].itemsize > LARGEST_SCORES:
        del functions["plain torch"]
    sides: dict[str, features.Side] = {name: (function, {}) for name, function in functions.items()}
    rows = of_sides(run, "torch sdpa", sides, qkv, ends, dict(runtimes.forwards(*(t.detach() for t in qkv))))
    return rated(rows, 2 * batch * heads * seqlen * (seqlen + 1) * head_dim, run)


def of_modules(run: Run, sizes: Sizes, ends: float) -> list[Row]:
    """Rows of the modules at ``sizes``: batch, seqlen, width, heads."""
    batch, seqlen, width, heads = sizes
    x = torch.randn(batch, seqlen, width, **run.tensor(requires_grad=True))

    def both(module: torch.nn.Module) -> Any:
        return torch.autograd.grad(module(x).sum(), (x, *module.parameters()))

    modules = {n: m.to(**run.tensor()) for n, m in contenders.modules(width, heads, seqlen, run.flex).items()}
    forwards: dict[str, Call] = {n: partial(m, x.detach()) for n, m in modules.items()}
    trainings: dict[str, Call] = {n: partial(both, m) for n, m in modules.items()}
    return measure(run.what, "5 sdpa", forwards, trainings, MODULE_SECONDS, ends, run.device)


def of_features(run: Run, shape: Sizes, ends: float) -> list[Row]:
    """Rows of the masks and scores on q, k, v of ``shape`` (B, H, T, D), over our own causal attention."""
    qkv = [torch.randn(shape, **run.tensor(requires_grad=True)) for _ in range(3)]
    dense = math.prod(shape[1:3]) * shape[2] * qkv[0].itemsize <= LARGEST_SCORES
    sides = features.sides(shape, DTYPES[run.dtype], run.device, dense)
    return of_sides(run, next(iter(sides)), sides, qkv, ends, {})


def of_packed(run: Run, texts: tuple[str], ends: float) -> list[Row]:
    """Rows of attention of sequences as long as real texts; operations on padding don't count as work."""
    lengths = packed.lengths_of(*texts, packed.SEQUENCES)
    sides = packed.sides(lengths, DTYPES[run.dtype], run.device)
    forwards: dict[str, Call] = {name: side.forward for name, side in sides.items()}
    trainings: dict[str, Call] = {name: side.gradients for name, side in sides.items()}
    rows = measure(run.what, packed.BASE, forwards, trainings, FUNCTION_SECONDS, ends, run.device)
    return rated(rows, packed.flops(lengths), run)


def of_token(run: Run, base: str, calls: Mapping[str, Call], name: str, done: float, ends: float) -> list[Row]:
    """Rows of one more token, forward alone; ``done``: what a call does, of what is ``name`` done a second."""
    seconds = min(TOKEN_SECONDS, max(0.0, ends - time.perf_counter()) / len(calls))
    times = in_turn(dict(calls), base, seconds, run.device, 3 if ends == math.inf else 1)
    return [
        {"what": run.what, "side": side, "forward": dataclasses.asdict(t) | {f"{name}_per_second": done / t.seconds}}
        for side, t in times.items()
    ]


@torch.no_grad()
def of_caches(run: Run, sizes: Sizes, ends: float) -> list[Row]:
    """Rows of one token over a KV cache, at the sizes of :data:`pyattn.cli.kv_caches.SIZES`."""
    calls = kv_caches.sides(sizes, DTYPES[run.dtype], run.device)
    return of_token(run, kv_caches.BASE, calls, "bytes", kv_caches.bytes_read(sizes, DTYPES[run.dtype]), ends)


def of_decoding(run: Run, contexts: tuple[int], ends: float) -> list[Row]:
    """Rows of one token of a model behind as many others as the context says."""
    return of_token(run, decoding.BASE, decoding.sides(*contexts, DTYPES[run.dtype], run.device), "tokens", 1.0, ends)


class Kind(NamedTuple):
    """A kind of comparisons.

    Attributes:
        purpose: what --help says.
        make: the rows of one comparison.
        name: of a comparison, with its sizes.
        sizes: those of all comparisons that the options ask for.
        base: what speed-ups are over.
    """

    purpose: str
    make: Callable[[Run, Any, float], list[Row]]
    name: str
    sizes: Callable[[argparse.Namespace], Sequence[Any]]
    base: str = "torch's sdpa"


def shapes(options: argparse.Namespace, defaults: Sequence[str]) -> list[tuple[int, ...]]:
    """The shapes that are given, or else these."""
    return [shape_of(text) for text in options.shapes or defaults]


def few(options: argparse.Namespace, sizes: Sequence[Any]) -> Sequence[Any]:
    """All of ``sizes``, or the first for --quick."""
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
        "our causal attention",
    ),
    "varlen": Kind(
        "sequences as long as real texts, packed and padded",
        of_packed,
        "varlen {}",
        lambda options: few(options, [(text,) for text in packed.TEXTS]),
        packed.BASE,
    ),
    "cache": Kind(
        "one token over a KV cache",
        of_caches,
        "cache {}/{} heads, {} tokens,",
        lambda options: few(options, kv_caches.SIZES),
        kv_caches.BASE,
    ),
    "decode": Kind(
        "a token of a model with and without a cache",
        of_decoding,
        "decode {}",
        lambda options: few(options, [(context,) for context in decoding.CONTEXTS]),
        decoding.BASE,
    ),
}
"""Comparisons by kind. Without --only, the first two are made."""

SHAPED = ("functions", "features")
"""Kinds whose comparisons --shapes chooses."""

Comparison = Callable[[float], list[Row]]
"""Makes the rows of one comparison; its argument is the ``ends`` of :func:`pyattn.cli.rows.measure`."""


def comparisons(options: argparse.Namespace, peaks: Peaks) -> dict[str, Comparison]:
    """The comparisons that the options ask for, by name; --quick has modules in the first dtype only."""
    todo: dict[str, Comparison] = {}
    for dtype in options.dtype:
        for name in [options.only] if options.only else list(KINDS)[:2]:
            if name == "modules" and options.quick and dtype != options.dtype[0]:
                continue
            kind = KINDS[name]
            for sizes in kind.sizes(options):
                what = f"{kind.name.format(*sizes)} {dtype}"
                run = Run(what, dtype, options.device, options.flex, peaks)
                todo[what] = partial(kind.make, run, sizes)
    return todo
