"""The records of all steps as a short table."""

from collections import Counter
from typing import Any

from support.gpu.child import FAILED, LEFT_OUT, PASSED

MOST_FAILURES = 12
"""Most failures to show; the others are in the file."""


def cell(row: dict[str, Any], side: str) -> str:
    rates = (row[which].get(side, {}).get("tflops") for which in ("forward", "backward"))
    return "/".join("-" if rate is None else f"{rate:.0f}" for rate in rates)


def speeds(rows: list[dict[str, Any]]) -> list[str]:
    """TFLOP/s, one line per shape and one column per side."""
    sides = list(dict.fromkeys(side for row in rows for side in row["forward"]))
    shown = [side.removeprefix("torch ").replace("pyattn non", "non") for side in sides]
    lines = [f"{'TFLOP/s, forward/backward':28}" + "".join(f"{name:>18}" for name in shown)]
    for row in rows:
        lines.append(f"{row['shape']} {row['dtype']}".ljust(28) + "".join(f"{cell(row, side):>18}" for side in sides))
    return lines


def rates(rows: list[dict[str, Any]]) -> list[str]:
    """GB/s of decoding, in the same layout."""
    sides = list(dict.fromkeys(side for row in rows for side in row["sides"]))
    lines = [f"{'GB/s, decoding':28}" + "".join(f"{side.removeprefix('torch '):>18}" for side in sides)]
    for row in rows:
        found = (row["sides"].get(side, {}).get("gb_per_s") for side in sides)
        numbers = "".join(f"{'-' if rate is None else f'{rate:.0f}':>18}" for rate in found)
        lines.append(f"{row['shape']} {row['dtype']}".ljust(28) + numbers)
    return lines


def reasons(checks: list[dict[str, Any]]) -> str:
    """The reasons why checks were left out, each once."""
    counts = Counter(check["message"] for check in checks if check["status"] == LEFT_OUT)
    return ", ".join(f"{reason} ({count})" for reason, count in counts.items())


COUNTED = ("Duration", "Compute (SM) Throughput", "Memory Throughput", "Registers Per Thread", "Achieved Occupancy")
"""The counters to show."""


def counted(rows: list[dict[str, Any]]) -> list[str]:
    """One line per kernel."""
    lines = [f"{'ncu':20}" + "".join(f"{name:>26}" for name in COUNTED)]
    for row in rows:
        for kernel, known in row["kernels"].items():
            lines.append(f"{kernel:20}" + "".join(f"{known.get(name, '-'):>26}" for name in COUNTED))
    return lines


TABLES = {"speed": speeds, "decoding": rates, "ncu": counted}
"""The tables to show for a step's figures."""


def line_of(step: dict[str, Any]) -> str:
    counts = Counter(check["status"] for check in step["checks"])
    numbers = "".join(f"{counts[status]:>10}" for status in (PASSED, FAILED, LEFT_OUT))
    going = "" if step["ended"] else "stopped before its end "
    return f"{step['step']:12}{step['seconds']:8.1f}{numbers}   {going}{reasons(step['checks'])}".rstrip()


def failures(steps: list[dict[str, Any]]) -> list[str]:
    """The failures, first those after which the GPU refused all further work."""
    failed = [(step["step"], check) for step in steps for check in step["checks"] if check["status"] == FAILED]
    lines = [
        f"{step}: {check['check']}: {'the GPU was lost: ' * check.get('lost', False)}{check['message'][:300]}"
        for step, check in sorted(failed, key=lambda pair: not pair[1].get("lost"))
    ]
    more = len(lines) - MOST_FAILURES
    return [*lines[:MOST_FAILURES], *([f"... and {more} more failures"] if more > 0 else [])]


def table(result: dict[str, Any]) -> str:
    """Failures, speeds, then one line per step."""
    steps = result["steps"]
    title = f"{result['gpu']}, torch {result['torch']}, driver {result['driver']}, commit {result['commit']}"
    head = f"{'step':12}{'seconds':>8}{PASSED:>10}{FAILED:>10}{LEFT_OUT:>10}"
    lines = [*failures(steps), title]
    for step in steps:
        rows = [check["figures"] for check in step["checks"] if "figures" in check]
        if rows and step["step"] in TABLES:
            lines += ["", *TABLES[step["step"]](rows)]
    return "\n".join([*lines, "", head, *map(line_of, steps)])
