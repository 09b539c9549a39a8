"""Options that commands share: how to define one, devices and dtypes with the hardware's names, windows, shapes."""

import argparse
import platform
from pathlib import Path
from typing import Any

import torch

from pyattn import _C
from pyattn.cli.limits import INT64, InputError
from pyattn.options import UNBOUNDED

DEVICES = ("cpu", "cuda")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
}


def command(name: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of ``pyattn name``, whose --help says ``about``."""
    return argparse.ArgumentParser(
        prog=f"pyattn {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def option(to: argparse._ActionsContainer, name: str, default: object, meaning: str, **more: Any) -> None:
    """Adds ``--name`` with the type of its default, which --help shows after the meaning."""
    to.add_argument(f"--{name}", type=type(default), default=default, help=f"{meaning}; default: %(default)s", **more)


def window(to: argparse._ActionsContainer) -> None:
    """Adds ``--window LEFT RIGHT``, as :func:`pyattn.attention` takes it."""
    meaning = "positions to see before and after a token's own, -1: all; a causal mask hides those after it in any case"
    to.add_argument(
        "--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), default=UNBOUNDED, help=f"{meaning}; default: -1 -1"
    )


def check_device(device: str) -> None:
    """Raise InputError if ``device`` is a GPU and torch finds none, or this build has no CUDA kernels."""
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise InputError("--device cuda needs a GPU that this torch can use", f"torch {torch.__version__} without one")
    if not _C.cuda_archs:
        raise InputError("--device cuda needs a build of pyattn with CUDA kernels (PYATTN_CUDA=ON)", "a build without")


def cpu() -> str:
    """The processor's name as the system reports it."""
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


def shape_of(text: str) -> tuple[int, ...]:
    """B, H, T and D from ``BxHxTxD``."""
    sizes = tuple(int(n) if n.isascii() and n.isdecimal() and len(n) < 20 else 0 for n in text.split("x"))
    if len(sizes) != 4 or min(sizes) < 1 or max(sizes) > INT64:
        got = text if len(text) <= 80 else f"{text[:80]}..."
        raise InputError("--shapes must be of the form BxHxTxD, each at least 1 and below 2^63", got)
    return sizes
