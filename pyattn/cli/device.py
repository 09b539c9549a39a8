"""The ``--device`` option of all commands, and the names of the hardware."""

import platform
from pathlib import Path

import torch

from pyattn import _C
from pyattn.cli import InputError

DEVICES = ("cpu", "cuda")


def check_device(device: str) -> None:
    """Raise InputError where ``device`` is a GPU and torch finds none, or this build has no kernels for one."""
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise InputError("--device cuda needs a GPU that this torch can use", f"torch {torch.__version__} without one")
    if not _C.cuda_archs:
        raise InputError("--device cuda needs a build of pyattn with CUDA kernels (PYATTN_CUDA=ON)", "a build without")


def cpu() -> str:
    """The processor's name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def hardware(device: str, threads: int) -> str:
    """The name of the GPU, or of the processor and the number of threads."""
    return (
        torch.cuda.get_device_name() if device == "cuda" else f"{cpu()}, {threads} thread{'s' if threads > 1 else ''}"
    )
