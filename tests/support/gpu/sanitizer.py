"""compute-sanitizer over small shapes: out-of-bounds accesses, and races in shared memory.

It watches ``python -m support.gpu.sanitizer DEVICE DTYPE CASES``. Inputs come from the CPU and every tensor has
separate memory, so only our kernels run, and no neighbour hides an out-of-bounds access.
"""

import os
import shutil
import subprocess
import sys
from functools import partial

import torch
from support.cases import Case, run
from support.gpu.child import Check, LeftOutError
from support.gpu.device import DEVICES, Device
from torch import Tensor

from pyattn import attention, attention_varlen, set_deterministic

TOOLS = ("memcheck", "racecheck")
FOUND = 9
"""The sanitizer's exit status if it has found something."""

LONGEST = 110
"""Seconds of a run; the sanitizer slows kernels down up to a hundredfold."""


def batches(dtype: torch.dtype, device: str, head_dim: int, head_dim_v: int) -> None:
    """Each mask and score, some heads split."""
    for case in (
        Case(1, 2, 1, 70, 97, head_dim, head_dim_v),
        Case(1, 2, 2, 33, 150, head_dim, head_dim_v, causal=False, dropout_p=0.5),
        Case(1, 2, 1, 70, 97, head_dim, head_dim_v, window=(40, -1), key_ranges="documents", mask="random hqk"),
        Case(1, 2, 1, 40, 70, head_dim, head_dim_v, softcap=3.0, bias="bands qk", alibi="h", sinks=True),
        Case(1, 2, 1, 5, 530, head_dim, head_dim_v, sinks=True, dropout_p=0.5),
        Case(1, 2, 1, 1, 530, head_dim, head_dim_v, softcap=3.0, key_ranges="documents"),
    ):
        qkv = tuple(x.to(device) for x in case.inputs(dtype))
        known = case.options | case.tensors(dtype)
        options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in known.items()}
        gradients = tuple(x.to(device) for x in case.gradients(dtype))
        for deterministic in (False, True):
            set_deterministic(deterministic)
            run(attention, qkv, *gradients, **options)


def packed(dtype: torch.dtype, device: str, head_dim: int, head_dim_v: int) -> None:
    """Packed sequences, one of them empty and one with unused keys, and tokens after them."""
    starts = torch.tensor([0, 33, 33, 60], device=device)
    q, k, v = (torch.randn(70, 2, n).to(dtype).to(device) for n in (head_dim, head_dim, head_dim_v))
    used = torch.tensor([33, 0, 20], device=device)
    for options in ({}, {"softcap": 3.0, "alibi_slopes": torch.rand(2).to(dtype).to(device), "window": (9, -1)}):
        for deterministic in (False, True):
            set_deterministic(deterministic)
            call = partial(attention_varlen, seqused_k=used)
            run(lambda *qkv, call=call, **named: call(*qkv, starts, starts, 40, 40, **named), (q, k, v), v, **options)


PROGRAMS = {"batches": (batches,), "packed": (packed,), "all": (batches, packed)}


def command(tool: str, *arguments: str) -> list[str]:
    """The sanitizer's command line. API errors are no findings: torch probes drivers, and our launches raise."""
    options = ["--tool", tool, "--report-api-errors", "no", "--error-exitcode", str(FOUND), "--print-limit", "5"]
    return ["compute-sanitizer", *options, sys.executable, "-m", "support.gpu.sanitizer", *arguments]


def watched(tool: str, *arguments: str) -> None:
    """Runs the program under the sanitizer; its findings raise."""
    if shutil.which("compute-sanitizer") is None:
        raise LeftOutError("compute-sanitizer not found")
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        result = subprocess.run(
            command(tool, *arguments), env=environment, capture_output=True, text=True, check=False, timeout=LONGEST
        )
    except subprocess.TimeoutExpired as error:
        raise LeftOutError(f"out of time after {LONGEST} s") from error
    if "Device not supported" in result.stdout:
        raise LeftOutError("compute-sanitizer says: device not supported")
    shown = result.stdout[:1500] + result.stderr[-500:]
    assert result.returncode == 0, f"{tool}, status {result.returncode}: {shown}"


def checks(device: Device) -> dict[str, Check]:
    return {
        f"{tool} {dtype}": partial(watched, tool, device.name, dtype, "all")
        for dtype in device.dtypes
        for tool in TOOLS
    }


def main(name: str, dtype: str, cases: str) -> None:
    for dims in DEVICES[name].watched:
        for program in PROGRAMS[cases]:
            program(getattr(torch, dtype), name, *dims)


if __name__ == "__main__":
    main(*sys.argv[1:])
