"""The emulated CUDA kernels under the race detector of ``emulation/races.cpp``."""

import ctypes
import functools
import re
import subprocess
from pathlib import Path
from typing import Any

import emulated
import torch
from cuda_resources import readable
from once import built
from support.cases import run
from torch import Tensor

DTYPES = (torch.float32, torch.float16)
"""bfloat16 has the accesses of float16, and kernels of float64 have no shared memory."""

INSTRUMENTED = ("-fsanitize=thread", "-O1")
"""The compiler calls the detector before each access to memory."""


@functools.cache
def library() -> tuple[ctypes.CDLL, dict[int, str]]:
    """The kernels, and their names by address."""

    def build(folder: Path) -> Path:
        detector = "-DPYATTN_RACES", "tests/tools/emulation/races.cpp"
        return emulated.compile_kernels(emulated.ROOT, folder, INSTRUMENTED, *detector, dtypes=DTYPES)

    path = built("races", build)
    kernels = emulated.load(path)
    symbols = subprocess.run(["nm", path], check=True, capture_output=True, text=True).stdout
    kernels.races_found.restype = kernels.places_seen.restype = ctypes.c_char_p
    return kernels, {int(at, 16): readable(name) for at, name in re.findall(r"^(\w+) t (\S+)", symbols, re.MULTILINE)}


def places() -> list[str]:
    """Barriers and waits for copies that kernels have passed: "barrier csrc/cuda/products/matrix.h:107"."""
    return library()[0].places_seen().decode().splitlines()


def races(qkv: tuple[Tensor, Tensor, Tensor], dout: Tensor, *, without: str = "", **options: Any) -> list[str]:
    """The races of a forward and a backward, each as "kernel, place in shared memory: who and who". The barrier or
    wait named in ``without`` counts as if it were not in the kernels.
    """
    kernels, names = library()
    kernels.take_out(without.encode())
    run(functools.partial(emulated.attention, kernels=kernels), qkv, dout, **options)
    kernels.take_out(b"")
    found = kernels.races_found().decode()
    return [re.sub(r"^\w+", lambda at: names[int(at[0], 16)], line) for line in found.splitlines()]
