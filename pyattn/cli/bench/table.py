"""The rows of a benchmark, each with one contender's times at one shape or size, and the table that shows them.

A row is a dictionary, as in results.json: ``what`` (the comparison) and ``side`` (the contender), then ``forward``,
``forward_backward`` (the fields of :class:`pyattn.cli.timing.Time`) and ``peak_bytes``, or the reason ``left_out``.
"""

import dataclasses
import math
import textwrap
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from pyattn.cli.contention import busy, is_busy
from pyattn.cli.timing import in_turn, peak_memory

LIMITED_SHARE = 1 / 6
"""Share of limited time for forwards; forward and backward gets twice that, first calls and memory the remainder."""

Call = Callable[[], Any]
Row = dict[str, Any]


def usable(calls: Mapping[str, Call], ends: float = math.inf) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls that return, and why the others don't; no call starts after ``ends`` by ``time.perf_counter()``."""
    good, reasons = {}, {}
    for name, call in calls.items():
        if time.perf_counter() >= ends:
            reasons[name] = NO_TIME
            continue
        try:
            call()
        except Exception as error:  # whatever another library raises for a case it can't handle
            reasons[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            good[name] = call
    return good, reasons


def measure(
    what: str,
    base: str,
    forwards: Mapping[str, Call],
    trainings: Mapping[str, Call],
    seconds: float,
    ends: float,
    device: str,
) -> list[Row]:
    """A row for each side: its forward, and its forward and backward together.

    Args:
        what: name of the comparison.
        base: the side that speed-ups are relative to.
        forwards, trainings: one call of each kind, by side; a side without a backward has no training.
        seconds: for one side's forward, time permitting.
        ends: ``time.perf_counter()`` after which no side starts and one round is enough; inf for no limit.
        device: whose clock counts.
    """
    share = LIMITED_SHARE if trainings else 1.0
    seconds = min(seconds, share * max(0.0, ends - time.perf_counter()) / len(forwards))
    rows: dict[str, Row] = {name: {"what": what, "side": name} for name in forwards}
    reasons: dict[str, str] = {}
    remaining = sorted(forwards, key=lambda name: name != base)  # the base first: there is no speed-up without it
    for key, calls, backward in (("forward", forwards, ""), ("forward_backward", trainings, BACKWARD)):
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
        remaining = [name for name in times if name in trainings]
    for name in remaining:
        if time.perf_counter() < ends:
            rows[name]["peak_bytes"] = peak_memory(trainings[name], device)
    left_out = [{"what": what, "side": name, "left_out": reason} for name, reason in reasons.items()]
    return [row for row in rows.values() if "forward" in row] + left_out


REASON = 200
"""Most characters of a reason: enough to get past onnxruntime's preamble."""

WIDTH = 80
"""Columns of a terminal that nobody has widened."""

SIDE = 39
"""Width of a side's name, indented by two."""

PASSES = {"forward": "forward", "forward_backward": "forward+backward"}
"""The headings of a row's times."""

BACKWARD = ", backward"
"""How the side of a row ends that was left out of forward and backward."""

NO_TIME = "no time left"

SHORTEST_MS = 1e-3
"""Seconds below which all times of a comparison are shown in microseconds."""

BUSY_SIGN = "?"


def paragraph(text: str, first: str = "", later: str | None = None) -> str:
    """The text in lines of at most ``WIDTH`` columns, which begin with ``first`` and then with ``later``."""
    later = first if later is None else later
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


def spread(time: Row) -> str:
    """Half the interquartile range in percent of the median, or why it is not meaningful.

    On a busy machine rounds can agree to the microsecond and mean nothing: a barrier waits for a thread without a core
    until the scheduler's next tick, so times are multiples of 4 ms. :func:`busy_note` explains the sign.
    """
    if is_busy(time["waited"]):
        return BUSY_SIGN
    if time["rounds"] < 3:
        return f"{time['rounds']} round{'s' if time['rounds'] > 1 else ''}"
    return f"±{(time['high'] - time['low']) / 2 / time['seconds']:3.0%}"


RATES: dict[str, tuple[str, int, Callable[[float], str]]] = {
    "tokens_per_second": ("tokens/s", 10, lambda rate: f"{rate:,.1f}"),
    "bytes_per_second": ("GB/s", 7, lambda rate: f"{rate / 1e9:.1f}"),
    "of_peak": ("peak", 6, lambda share: f"{share:.0%}"),
    "flops_per_second": ("TFLOP/s", 9, lambda rate: f"{rate / 1e12:.1f}"),
}
"""A field of a time with its heading, column width and format; the first that a time has is shown."""

ONE_TOKEN = ("tokens_per_second", "bytes_per_second")
"""Rates of comparisons without a backward, with one token per call."""


def show(rows: list[Row]) -> None:
    """Print one comparison: a table of forwards, then one of forward and backward together."""
    times = [row[key] for row in rows for key in PASSES if key in row]
    rate = next((name for name in RATES if any(name in time for time in times)), "")
    heading, width, figure = RATES.get(rate, ("", 0, str))
    passes = {"forward": "token"} if rate in ONE_TOKEN else PASSES
    short = max((time["seconds"] for time in times), default=1.0) < SHORTEST_MS
    scale, unit = (1e6, "us") if short else (1e3, "ms")
    tqdm.write(f"\n{rows[0]['what']}")
    for key, name in passes.items():
        mine = [row for row in rows if key in row]
        late = [row for row in rows if "left_out" in row and row["side"].endswith(BACKWARD) == (key != "forward")]
        memory = any(row.get("peak_bytes") is not None for row in mine) and key == list(passes)[-1]
        if mine:
            head = f"{unit:>9}{'':9}{'speed-up':>8}{heading:>{width}}" + f"{'MB':>6}" * memory
            tqdm.write(f"{name:{SIDE}}{head}".rstrip())
        for row in mine:
            time = row[key]
            shown = figure(time[rate]) if rate in time else ""
            line = f"{scale * time['seconds']:9.3f}{spread(time):>9}{time['speedup']:7.2f}x{shown:>{width}}"
            if memory and row.get("peak_bytes") is not None:
                line += f"{row['peak_bytes'] / 2**20:6.0f}"
            tqdm.write(f"  {row['side']:{SIDE - 2}}{line}".rstrip())
        show_left_out(name, late, nothing=not mine)


def show_left_out(name: str, rows: list[Row], nothing: bool) -> None:
    """Print why sides are missing in a table, or why there is none; sides without time share a line."""
    others = [row for row in rows if row["left_out"] != NO_TIME]
    for row in others:
        tqdm.write(paragraph(f"{row['side']}  left out: {row['left_out'][:REASON]}", "  ", "    "))
    sides = [row["side"].removesuffix(BACKWARD) for row in rows if row["left_out"] == NO_TIME]
    if sides and nothing and not others:
        tqdm.write(f"{name}: {NO_TIME}")
    elif sides:
        tqdm.write(paragraph(f"{NO_TIME} for {', '.join(sides)}", "  ", "    "))


def worst_wait(rows: list[Row]) -> float:
    """The largest share of time that the threads of any comparison waited for a core."""
    shares = [row[key]["waited"] for row in rows for key in ("forward", "forward_backward") if key in row]
    return max((share for share in shares if share is not None), default=0.0)


def busy_note(wait: float) -> str:
    """The meaning of :data:`BUSY_SIGN`, with the largest share of time that threads waited."""
    note = f"{BUSY_SIGN}  {busy(wait)}: these are times of the scheduler; --threads 1 is timed by CPU time"
    return paragraph(note, later="   ")
