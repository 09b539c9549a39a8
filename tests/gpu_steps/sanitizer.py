"""compute-sanitizer over small shapes: accesses out of bounds, and races in shared memory.

``python -m gpu_steps.sanitizer DTYPE`` is what it watches. Inputs come from the CPU and every tensor has memory of its
own, so that nothing but our kernels runs, and no neighbour hides an access that is out of bounds.
"""

import os
import shutil
import subprocess
import sys
from functools import partial

import torch
from gpu_steps.child import Check, LeftOutError
from helpers import Case, run
from torch import Tensor

from pyattn import attention, attention_varlen, set_deterministic

TOOLS = ("memcheck", "racecheck")
FOUND = 9
"""The sanitizer's exit status where it has found something."""

LONGEST = 90
"""Seconds of a run; the sanitizer slows kernels down up to a hundredfold."""


def small(dtype: torch.dtype, device: str) -> None:
    for head_dim, head_dim_v in ((64, 64), (128, 128), (256, 256), (20, 33)):
        for case in (
            Case(1, 2, 1, 70, 97, head_dim, head_dim_v),
            Case(1, 2, 2, 33, 150, head_dim, head_dim_v, causal=False, dropout_p=0.5),
            Case(1, 2, 1, 70, 97, head_dim, head_dim_v, window=(40, -1), key_ranges="documents", bias="bool hqk"),
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
        packed(dtype, device, head_dim, head_dim_v)


def packed(dtype: torch.dtype, device: str, head_dim: int, head_dim_v: int) -> None:
    """Packed sequences, one of them empty and one with keys that are not used, and tokens behind them."""
    starts = torch.tensor([0, 33, 33, 60], device=device)
    q, k, v = (torch.randn(70, 2, n).to(dtype).to(device) for n in (head_dim, head_dim, head_dim_v))
    used = torch.tensor([33, 0, 20], device=device)
    for options in ({}, {"softcap": 3.0, "alibi_slopes": torch.rand(2).to(dtype).to(device), "window": (9, -1)}):
        for deterministic in (False, True):
            set_deterministic(deterministic)
            call = partial(attention_varlen, seqused_k=used)
            run(lambda *qkv, call=call, **named: call(*qkv, starts, starts, 40, 40, **named), (q, k, v), v, **options)


def watched(tool: str, dtype: str) -> None:
    program = shutil.which("compute-sanitizer")
    if program is None:
        raise LeftOutError("compute-sanitizer not found")
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "5"]
    command += [sys.executable, "-m", "gpu_steps.sanitizer", dtype]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LONGEST)
    except subprocess.TimeoutExpired as error:
        raise LeftOutError(f"out of time after {LONGEST} s") from error
    if "Device not supported" in result.stdout:
        raise LeftOutError("compute-sanitizer says: device not supported")
    assert result.returncode == 0, f"{tool}, status {result.returncode}: {result.stdout[:1500]}"


def checks(*dtypes: str) -> dict[str, Check]:
    return {f"{tool} {dtype}": partial(watched, tool, dtype) for dtype in dtypes for tool in TOOLS}


if __name__ == "__main__":
    small(getattr(torch, sys.argv[1]), "cuda")
