"""ncu's counters of three kernels: forward, and backward's passes over keys and over queries.

ncu watches the program ``python -m support.gpu.counters DEVICE``.
"""

import csv
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from support.cases import Case, run
from support.gpu.child import Check, LeftOutError
from support.gpu.device import DEVICES, Device

from pyattn import attention

KERNELS = ("forward", "backward_keys", "backward_queries")

LONGEST = 100
"""Seconds; each kernel runs some forty times, once per few counters."""

NAME = re.compile(r"(\w+?)(?:_together)?(?=[<(]|$)")
"""A kernel's bare name within its full name, which has namespaces, template arguments and parameters. On compute
capability 9.0 another kernel computes forward, ``forward_together``."""

NOT_HERE = re.compile(r"^==ERROR== (?!The application)(.*)", re.MULTILINE)
"""ncu's message if it can't count; messages about a failed program begin differently."""

Counters = dict[str, dict[str, str]]
"""Values with their units, by kernel and counter."""


def command(device: Device) -> list[str]:
    """ncu's command line. Clocks don't change: the machine may be shared, and other steps were timed with them."""
    names = f"regex:^({'|'.join(KERNELS)})(_together)?$"
    options = ["--csv", "--print-units", "base", "--set", "detailed", "--clock-control", "none"]
    options += ["--kernel-name", names, "--launch-count", str(len(KERNELS))]
    return ["ncu", *options, sys.executable, "-m", "support.gpu.counters", device.name]


def rows(shown: str) -> Iterator[dict[str, str]]:
    """The table in ncu's output, which follows ncu's own notes and the program's output."""
    lines = shown.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    yield from csv.DictReader(line for line in lines[begin:] if line.startswith('"'))


def counters(shown: str) -> Counters:
    """The counters of each kernel, by ncu's names."""
    found: Counters = {}
    for row in rows(shown):
        if row.get("Metric Name"):
            (name,) = NAME.search(row["Kernel Name"]).groups()
            found.setdefault(name, {})[row["Metric Name"]] = f"{row['Metric Value']} {row['Metric Unit']}".strip()
    return found


def count(device: Device) -> dict[str, Any]:
    if shutil.which("ncu") is None:
        raise LeftOutError("ncu not found")
    result = subprocess.run(command(device), capture_output=True, text=True, check=False, timeout=LONGEST)
    found = counters(result.stdout)
    shown = result.stdout + result.stderr
    if not found and (reason := NOT_HERE.search(shown)):
        raise LeftOutError(f"ncu says: {reason[1]}")
    missing = [name for name in KERNELS if name not in found]
    assert not missing, f"nothing counted of {missing}, status {result.returncode}: {shown[-1500:]}"
    return {"kernels": found}


def checks(device: Device) -> dict[str, Check]:
    return {"x".join(map(str, device.counted)): partial(count, device)}


def main(name: str) -> None:
    device = DEVICES[name]
    batch, heads, seqlen, head_dim = device.counted
    case = Case(batch, heads, heads, seqlen, seqlen, head_dim, head_dim)
    with torch.device(name):
        run(attention, case.inputs(torch.bfloat16), case.gradients(torch.bfloat16)[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
