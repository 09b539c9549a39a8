"""The records of all steps as a short table."""

from collections import Counter
from typing import Any

from gpu_steps.child import FAILED, LEFT_OUT, PASSED

MOST_FAILURES = 12
"""Failures that are shown; the rest is in the file."""


def cell(row: dict[str, Any], side: str) -> str:
    rates = (row[which].get(side, {}).get("tflops") for which in ("forward", "backward"))
    return "/".join("-" if rate is None else f"{rate:.0f}" for rate in rates)


def speeds(rows: list[dict[str, Any]]) -> list[str]:
    """TFLOP/s, a line for each shape and a column for each side."""
    sides = list(dict.fromkeys(side for row in rows for side in row["forward"]))
    shown = [side.removeprefix("torch ").replace("pyattn non", "non") for side in sides]
    lines = [f"{'TFLOP/s, forward/backward':28}" + "".join(f"{name:>18}" for name in shown)]
    for row in rows:
        lines.append(f"{row['shape']} {row['dtype']}".ljust(28) + "".join(f"{cell(row, side):>18}" for side in sides))
    return lines


def rates(rows: list[dict[str, Any]]) -> list[str]:
    """GB/s of decoding, likewise."""
    sides = list(dict.fromkeys(side for row in rows for side in row["sides"]))
    lines = [f"{'GB/s, decoding':28}" + "".join(f"{side.removeprefix('torch '):>18}" for side in sides)]
    for row in rows:
        numbers = "".join(f"{row['sides'][side]['gb_per_s']:>18.0f}" for side in sides)
        lines.append(f"{row['shape']} {row['dtype']}".ljust(28) + numbers)
    return lines


def reasons(checks: list[dict[str, Any]]) -> str:
    """Why checks were left out, each reason once."""
    counts = Counter(check["message"] for check in checks if check["status"] == LEFT_OUT)
    return ", ".join(f"{reason} ({count})" for reason, count in counts.items())


TABLES = {"speed": speeds, "decoding": rates}
"""What is shown of a step's figures."""


def table(result: dict[str, Any]) -> str:
    """Speeds, failures, then a line for each step."""
    lines: list[str] = []
    failures: list[str] = []
    for step in result["steps"]:
        counts = Counter(check["status"] for check in step["checks"])
        numbers = "".join(f"{counts[status]:>10}" for status in (PASSED, FAILED, LEFT_OUT))
        lines.append(f"{step['step']:12}{step['seconds']:8.1f}{numbers}   {reasons(step['checks'])}".rstrip())
        failures += [
            f"{step['step']}: {check['check']}: {check['message'][:300]}"
            for check in step["checks"]
            if check["status"] == FAILED
        ]
        rows = [check["figures"] for check in step["checks"] if "figures" in check]
        if rows and step["step"] in TABLES:
            lines = [*TABLES[step["step"]](rows), "", *lines]
    more = [f"... and {len(failures) - MOST_FAILURES} more failures"] if len(failures) > MOST_FAILURES else []
    head = f"{'step':12}{'seconds':>8}{PASSED:>10}{FAILED:>10}{LEFT_OUT:>10}"
    title = f"{result['gpu']}, torch {result['torch']}, driver {result['driver']}, {result['seconds']:.0f} s"
    return "\n".join([*failures[:MOST_FAILURES], *more, title, head, *lines])
