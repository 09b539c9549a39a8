"""The rows of a benchmark: each contender's times at one shape or size.

A row is a dictionary, as in results.json: ``what`` (the comparison) and ``side`` (the contender), then ``forward``,
``forward_backward`` (the fields of :class:`pyattn.cli.timing.Time`) and ``peak_bytes``, or the reason ``left_out``.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pyattn.cli import contenders, decoding, features, kv_caches, packed, runtimes, sentences
from pyattn.cli.info import DTYPES
from pyattn.cli.timing import in_turn, peak_memory

LARGEST_SCORES = 2**30
"""Bytes of a score matrix beyond which plain torch, which makes one, is left out."""

FUNCTION_SECONDS, MODULE_SECONDS, TOKEN_SECONDS = 1.0, 2.0, 2.0
"""Time for the forward of a side without a time limit; its forward and backward gets twice that."""

LIMITED_SHARE = 1 / 6
"""Share of limited time for timing forwards; forward and backward gets twice that, first calls and memory the rest."""

Call = Callable[[], Any]
Row = dict[str, Any]
Peaks = dict[tuple[str, str], float]
"""FLOP/s by dtype and instruction set."""


def usable(calls: dict[str, Call], ends: float = math.inf) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls that return, and why the others don't; no call starts after ``ends`` of ``time.perf_counter()``."""
    good, reasons = {}, {}
    for name, call in calls.items():
        if time.perf_counter() >= ends:
            reasons[name] = "no time left"
            continue
        try:
            call()
        except Exception as error:  # whatever another library raises where it can't
            reasons[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            good[name] = call
    return good, reasons


def measure(
    what: str,
    base: str,
    forwards: dict[str, Call],
    trainings: dict[str, Call],
    seconds: float,
    ends: float,
    device: str,
) -> list[Row]:
    """A row for each side: its forward, and its forward and backward.

    Args:
        what: name of the comparison.
        base: the side that speed-ups are over.
        forwards, trainings: a call of each, by side; a side without a backward has no training.
        seconds: for a side's forward, if there is time.
        ends: ``time.perf_counter()`` after which no side is started, and one round is enough; inf for no limit.
        device: whose clock counts.
    """
    seconds = min(seconds, LIMITED_SHARE * max(0.0, ends - time.perf_counter()) / len(forwards))
    rows: dict[str, Row] = {name: {"what": what, "side": name} for name in forwards}
    reasons: dict[str, str] = {}
    remaining = sorted(forwards, key=lambda name: name != base)  # the base first: nothing compares without it
    for key, calls, backward in (("forward", forwards, ""), ("forward_backward", trainings, ", backward")):
        with torch.set_grad_enabled(bool(backward)):
            good, why = usable({name: calls[name] for name in remaining if name in calls}, ends)
            if base not in good:
                why |= dict.fromkeys(good, f"no {base} to compare with")
                good = {}
            fewest = 3 if ends == math.inf else 1
            times = in_turn(good, base, seconds * (2 if backward else 1), device, fewest) if good else {}
            for name, taken in times.items():
                rows[name][key] = dataclasses.asdict(taken)
        reasons |= {f"{name}{backward}": reason for name, reason in why.items()}
        remaining = list(times)
    for name in remaining:
        if time.perf_counter() < ends:
            rows[name]["peak_bytes"] = peak_memory(trainings[name], device)
    left_out = [{"what": what, "side": name, "left_out": reason} for name, reason in reasons.items()]
    return [row for row in rows.values() if "forward" in row] + left_out


def rated(rows: list[Row], flops: float, dtype: str, peaks: Peaks) -> list[Row]:
    """The rows with operations a second, ``flops`` in a forward, and with their share of the peak."""
    by_isa = {isa: peak for (of, isa), peak in peaks.items() if of == dtype}
    for row in rows:
        for key, share in (("forward", 1.0), ("forward_backward", 3.5)):
            if key in row:
                rate = row[key]["flops_per_second"] = share * flops / row[key]["seconds"]
                if by_isa:
                    row[key]["of_peak"] = rate / by_isa.get(row["side"].removeprefix("pyattn "), max(by_isa.values()))
    return rows


def of_functions(
    what: str, shape: tuple[int, ...], dtype: str, device: str, ends: float, *, flex: bool, peaks: Peaks
) -> list[Row]:
    """Rows of the functions on q, k, v of ``shape`` (B, H, T, D)."""
    batch, heads, seqlen, head_dim = shape
    q, k, v = (torch.randn(shape, dtype=DTYPES[dtype], device=device, requires_grad=True) for _ in range(3))
    inputs, dout = (q.detach(), k.detach(), v.detach()), torch.randn_like(q)

    def both(attention: contenders.Attention) -> Any:
        return torch.autograd.grad(attention(q, k, v), (q, k, v), dout)

    functions = contenders.functions(device, flex)
    if batch * heads * seqlen**2 * q.itemsize > LARGEST_SCORES:
        del functions["plain torch"]
    forwards: dict[str, Call] = {n: partial(f, *inputs) for n, f in functions.items()}
    trainings: dict[str, Call] = {n: partial(both, f) for n, f in functions.items()}
    forwards |= runtimes.forwards(*inputs)
    rows = measure(what, "torch sdpa", forwards, trainings, FUNCTION_SECONDS, ends, device)
    return rated(rows, 2 * batch * heads * seqlen * (seqlen + 1) * head_dim, dtype, peaks)


def of_modules(what: str, sizes: tuple[int, ...], dtype: str, device: str, ends: float, *, flex: bool) -> list[Row]:
    """Rows of the modules at ``sizes``: batch, seqlen, width, heads."""
    batch, seqlen, width, heads = sizes
    to: Any = {"dtype": DTYPES[dtype], "device": device}
    x = torch.randn(batch, seqlen, width, **to, requires_grad=True)

    def both(module: torch.nn.Module) -> Any:
        return torch.autograd.grad(module(x).sum(), (x, *module.parameters()))

    modules = {n: m.to(**to) for n, m in contenders.modules(width, heads, seqlen, flex).items()}
    forwards: dict[str, Call] = {n: partial(m, x.detach()) for n, m in modules.items()}
    trainings: dict[str, Call] = {n: partial(both, m) for n, m in modules.items()}
    return measure(what, "5 sdpa", forwards, trainings, MODULE_SECONDS, ends, device)


def of_features(what: str, shape: tuple[int, ...], dtype: str, device: str, ends: float) -> list[Row]:
    """Rows of the masks and scores on q, k, v of ``shape`` (B, H, T, D), over our own causal attention."""
    q, k, v = (torch.randn(shape, dtype=DTYPES[dtype], device=device, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    dense = math.prod(shape[1:3]) * shape[2] * q.itemsize <= LARGEST_SCORES
    sides = features.sides(shape, DTYPES[dtype], device, dense)

    def both(function: Callable[..., Any], named: dict[str, Any]) -> Any:
        inputs = (q, k, v, *(t for t in named.values() if isinstance(t, torch.Tensor) and t.requires_grad))
        return torch.autograd.grad(function(q, k, v, **named), inputs, dout)

    forwards: dict[str, Call] = {n: partial(f, q, k, v, **named) for n, (f, named) in sides.items()}
    trainings: dict[str, Call] = {n: partial(both, *side) for n, side in sides.items()}
    return measure(what, next(iter(sides)), forwards, trainings, FUNCTION_SECONDS, ends, device)


def of_packed(what: str, text: str, dtype: str, device: str, ends: float, *, peaks: Peaks) -> list[Row]:
    """Rows of attention of sequences as long as real texts; operations on padding don't count as work."""
    lengths = sentences.lengths(text, packed.SEQUENCES)
    sides = packed.sides(lengths, DTYPES[dtype], device)
    forwards: dict[str, Call] = {name: side.forward for name, side in sides.items()}
    trainings: dict[str, Call] = {name: side.gradients for name, side in sides.items()}
    rows = measure(what, packed.BASE, forwards, trainings, FUNCTION_SECONDS, ends, device)
    return rated(rows, packed.flops(lengths), dtype, peaks)


def of_token(
    what: str, base: str, calls: dict[str, Call], done: dict[str, float], device: str, ends: float
) -> list[Row]:
    """Rows of one more token, forward alone; ``done``: what a call does, by the name of what is done a second."""
    seconds = min(TOKEN_SECONDS, max(0.0, ends - time.perf_counter()) / len(calls))
    times = in_turn(calls, base, seconds, device, 3 if ends == math.inf else 1)
    rows: list[Row] = [{"what": what, "side": name, "forward": dataclasses.asdict(t)} for name, t in times.items()]
    for row in rows:
        row["forward"] |= {f"{name}_per_second": n / row["forward"]["seconds"] for name, n in done.items()}
    return rows


@torch.no_grad()
def of_caches(what: str, sizes: tuple[int, ...], dtype: str, device: str, ends: float) -> list[Row]:
    """Rows of one token over a KV cache, at the sizes of :data:`pyattn.cli.kv_caches.SIZES`."""
    calls = kv_caches.sides(sizes, DTYPES[dtype], device)
    done = {"bytes": float(kv_caches.bytes_read(sizes, DTYPES[dtype]))}
    return of_token(what, kv_caches.BASE, calls, done, device, ends)


def of_decoding(what: str, context: int, dtype: str, device: str, ends: float) -> list[Row]:
    """Rows of one token of a model behind ``context`` others."""
    calls: dict[str, Call] = dict(decoding.sides(context, DTYPES[dtype], device))
    return of_token(what, decoding.BASE, calls, {"tokens": 1.0}, device, ends)
