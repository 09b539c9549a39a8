"""The page of a comparison, made from its record alone."""

import math
import statistics
from collections.abc import Iterator
from typing import Any

Record = dict[str, Any]

TITLES = {
    "layer": "Attention of a layer",
    "token": "One token over a cache",
    "step": "Whole training steps",
}
COUNTED = ("torch SDPA", "FlexAttention, compiled", "OpenVINO")
"""Sides whose memory is compared with ours; onnxruntime's arena keeps its memory, so it rises by nothing."""

HEAD = """# pyattn beside other ways to compute attention

{date}: {cpu}, {cores} cores, {threads} thread{s}, {isa}; {versions}.
Load before and after: {load_before:.1f} and {load_after:.1f}; {minutes:.0f} minutes. This page is made from
[results.json](results.json), which has every round, by

    {command}

All sides run in turn, in random order, in one process; a time is the median of the rounds. "times pyattn" is a side's
time over pyattn's within a round, its median and quartiles: above 1, pyattn is faster, and **below 1 it is not**. With
one thread, times are that thread's CPU time. MB is the rise of resident memory during a call; onnxruntime keeps its
memory, so that rises by nothing. Results of all sides agree, or the side is left out with its difference. Compiled
sides are compiled for these sizes (`dynamic=False`) before the clock starts; onnxruntime and OpenVINO have their inputs
and outputs bound once, in the layout that they read.
"""


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The quartiles; of a single value, itself."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def ratios(side: Record, ours: Record, key: str) -> list[float]:
    """A side's times over ours, round by round; empty if one of the two has none."""
    theirs, base = (record.get(key, {}).get("rounds", []) for record in (side, ours))
    return [a / b for a, b in zip(theirs, base, strict=False)]


def keys(case: Record) -> list[str]:
    """The passes that some side of the case has."""
    return [
        key for key in ("forward", "training") if any("rounds" in side.get(key, {}) for side in case["sides"].values())
    ]


def lost(record: Record) -> Iterator[tuple[float, str]]:
    """The comparisons in which a side is faster than pyattn, with its time over pyattn's."""
    for case in record["cases"]:
        for name, side in case["sides"].items():
            for key in keys(case):
                values = ratios(side, case["sides"]["pyattn"], key)
                if not name.startswith("pyattn") and values and (ratio := statistics.median(values)) < 1:
                    what = f"{case['name']}, {case['dtype']}" + (f", {key}" if case["kind"] != "step" else "")
                    yield ratio, f"{name}: {what}"


def heavier(record: Record) -> Iterator[tuple[float, str]]:
    """The calls of torch in which memory rises by less than in pyattn's, by a tenth and a megabyte, with the ratio."""
    for case in record["cases"]:
        for name, side in case["sides"].items():
            for key in keys(case):
                theirs, ours = (each.get(key, {}).get("peak_bytes") for each in (side, case["sides"]["pyattn"]))
                if name in COUNTED and theirs and ours and ours > max(1.1 * theirs, theirs + 1e6):
                    yield theirs / ours, f"{name}: {case['name']}, {case['dtype']}, {key}"


def means(record: Record) -> Iterator[str]:
    """For each kind, pass and dtype, the geometric mean of each side's time over pyattn's."""
    for kind in TITLES:
        mine = [case for case in record["cases"] if case["kind"] == kind]
        for dtype in dict.fromkeys(case["dtype"] for case in mine):
            for key in ("forward", "training"):
                found: dict[str, list[float]] = {}
                for case in (case for case in mine if case["dtype"] == dtype):
                    for name, side in case["sides"].items():
                        if name != "pyattn" and (values := ratios(side, case["sides"]["pyattn"], key)):
                            found.setdefault(name, []).append(math.log(statistics.median(values)))
                for name, logs in found.items():
                    mean = math.exp(statistics.mean(logs))
                    yield f"| {TITLES[kind]}, {key} | {dtype} | {name} | {mean:.2f} | {len(logs)} |"


def cells(name: str, side: Record, ours: Record, key: str) -> str:
    """The columns of one pass: milliseconds, times pyattn, MB."""
    found = side.get(key, {})
    if "rounds" not in found:
        return " | | |"
    low, median, high = quartiles(ratios(side, ours, key) or [1.0])
    ratio = f"{median:.2f} ({low:.2f} to {high:.2f})"
    faster = median < 1 and not name.startswith("pyattn")
    peak = found.get("peak_bytes")
    memory = "" if peak is None else f"{peak / 1e6:.1f}"
    milliseconds = 1e3 * statistics.median(found["rounds"])
    return f" {milliseconds:.3f} | {f'**{ratio}**' if faster else ratio} | {memory} |"


def table(case: Record) -> Iterator[str]:
    """The lines of one case."""
    there = keys(case)
    ours = case["sides"]["pyattn"]
    rounds = min(len(ours[key]["rounds"]) for key in there)
    yield f"**{case['name']}**, {case['dtype']}: {case['sizes']}; {rounds} rounds or more."
    yield ""
    head = "".join(f" {key} ms | times pyattn | MB |" for key in there)
    steps = case["kind"] == "step"
    yield "| |" + head + (" loss after 3 steps |" if steps else " differs by |")
    yield "|---|" + "---|---|---|" * len(there) + "---|"
    for name, side in case["sides"].items():
        last = f"{side['losses'][-1]:.4f}" if "losses" in side else ""
        if not steps and "difference" in side and name != "pyattn":
            last = f"{side['difference']:.0e}"
        yield f"| {name} |" + "".join(cells(name, side, ours, key) for key in there) + f" {last} |"
    for name, side in case["sides"].items():
        for key in ("left_out", *(f"{key}_left_out" for key in there)):
            if key in side:
                yield f"\nLeft out: {name}{', ' + key.split('_')[0] if key != 'left_out' else ''}: {side[key][:160]}"
    yield ""


def page(record: Record) -> str:
    """The whole page."""
    described = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    plural = "s" if record["threads"] > 1 else ""
    lines = [HEAD.format(**record | {"versions": described, "s": plural, "minutes": record["seconds"] / 60})]
    lines += ["## Where pyattn is not the fastest", ""]
    losses = sorted(lost(record))
    lines += [f"- {what}: {ratio:.2f} of pyattn's time" for ratio, what in losses] or ["Nowhere in this run."]
    lines += ["", "## Where pyattn needs more memory", ""]
    heavy = sorted(heavier(record))
    lines += [f"- {what}: {ratio:.2f} of pyattn's" for ratio, what in heavy] or ["Nowhere in this run."]
    lines += ["", "## Means", "", 'Geometric means of "times pyattn" over the cases that a side takes part in.', ""]
    lines += ["| | dtype | side | times pyattn | cases |", "|---|---|---|---|---|", *means(record), ""]
    for kind, title in TITLES.items():
        lines += [f"## {title}", ""]
        for case in (case for case in record["cases"] if case["kind"] == kind):
            lines += table(case)
    return "\n".join(lines).rstrip() + "\n"
