"""``pyattn info``: versions, instruction sets, GPUs, threads and dtypes, ready for a bug report."""

import platform
from collections.abc import Sequence

import torch

from pyattn import _C, _build, attention, isa, isas
from pyattn.adapters import sdpa_counts, sdpa_switch, transformers_models
from pyattn.cli.options import DEVICES, DTYPES, Command, check_device, cpu


def supported(dtype: torch.dtype, device: str) -> bool:
    """Whether the native attention takes ``dtype`` on ``device``, determined by calling it."""
    probe = torch.ones(1, 1, 1, 64, dtype=dtype, device=device)
    try:
        attention(probe, probe, probe)
    except TypeError:
        return False
    return True


def gpu(index: int) -> str:
    """A GPU's name and its compute capability, spelled as nvcc spells architectures."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})"


def sdpa_switch_state() -> str:
    """Whether :func:`pyattn.adapters.sdpa.enable` is in effect in this process, and its counts."""
    state, counted = "on" if sdpa_switch.is_enabled() else "off", sdpa_counts.described()
    return f"{state}: {counted}" if counted else state


def transformers_coverage() -> dict[str, str]:
    """The installed transformers, and the architectures that ``attn_implementation="pyattn"`` does not reach."""
    described = transformers_models.described()
    return {} if described is None else {"transformers": described}


def without_vectors() -> dict[str, str]:
    """What is lost on a CPU, or in a build, that has scalar kernels alone."""
    if isas() != ["scalar"]:
        return {}
    missing = "AVX2" if platform.machine() in ("x86_64", "AMD64") else "NEON"
    return {"lost": f"speed: scalar code takes SCALAR_RATIO times as long as {missing}; results differ by rounding alone"}


def facts(device: str) -> dict[str, str]:
    """The facts by their displayed names; the dtypes are those that ``device`` takes."""
    return {
        "pyattn": _C.version,
        "torch": f"{torch.__version__} (built for {', '.join(_build.torches.values())})",
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "cpu": cpu(),
        "compiler": _C.compiler,
        "ISAs compiled": " ".join(_C.compiled_isas()),
        "ISAs available": " ".join(isas()),
        "ISA active": isa(),
        **without_vectors(),
        "CUDA kernels": " ".join(f"sm_{arch}" for arch in _C.cuda_archs) or "none",
        "GPU": ", ".join(map(gpu, range(torch.cuda.device_count()))) or "none",
        "threads": str(torch.get_num_threads()),
        **transformers_coverage(),
        "SDPA switch": sdpa_switch_state(),
        "dtypes": " ".join(name for name, dtype in DTYPES.items() if supported(dtype, device)),
    }


def run(argv: Sequence[str]) -> int:
    """Print the facts, one per line."""
    parser = Command("info", __doc__)
    parser.option("device", "cpu", "whose dtypes to show", check_device, choices=DEVICES)
    options = parser.checked(argv)
    known = facts(options.device)
    width = max(map(len, known))
    for name, value in known.items():
        print(f"{name:{width}}  {value}")
    return 0
