"""``pyattn info``: versions, instruction sets, threads, dtypes, in a form to paste into a bug report."""

import argparse
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from pyattn import _C, attention

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def supported(dtype: torch.dtype) -> bool:
    """Whether the native attention takes ``dtype``: asked of itself."""
    probe = torch.ones(1, 1, 1, 1, dtype=dtype)
    try:
        attention(probe, probe, probe)
    except TypeError:
        return False
    return True


def cpu() -> str:
    """The processor's name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def facts() -> dict[str, str]:
    """What this build is and runs on, each fact under the name it is shown with."""
    return {
        "pyattn": _C.version,
        "torch": f"{torch.__version__} (built for {_C.torch_version})",
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "cpu": cpu(),
        "compiler": _C.compiler,
        "ISAs compiled": " ".join(_C.compiled_isas()),
        "ISAs available": " ".join(_C.available_isas()),
        "ISA active": _C.active_isa(),
        "threads": str(torch.get_num_threads()),
        "dtypes": " ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES if supported(dtype)),
    }


def run(argv: Sequence[str]) -> int:
    """Print the facts, one a line."""
    argparse.ArgumentParser(prog="pyattn info", description=__doc__).parse_args(argv)
    known = facts()
    width = max(map(len, known))
    for name, value in known.items():
        print(f"{name:{width}}  {value}")
    return 0
