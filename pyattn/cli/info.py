"""``pyattn info``: versions, instruction sets, GPUs, threads and dtypes, ready for a bug report."""

import platform
import textwrap
from collections.abc import Sequence

import torch

from pyattn import _C, _build, attention, isa, isas
from pyattn.adapters.sdpa import call_counts, switch
from pyattn.adapters.transformers import models
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
    state, counted = "on" if switch.is_enabled() else "off", call_counts.described()
    return f"{state}: {counted}" if counted else state


def transformers_coverage() -> dict[str, str]:
    """The installed transformers, and how many architectures ``attn_implementation="pyattn"`` does not reach."""
    described = models.described()
    return {} if described is None else {"transformers": described}


def keeping() -> dict[str, str]:
    """The architectures that ``attn_implementation="pyattn"`` does not reach."""
    return {"own attention": " ".join(models.keeping() or ["transformers is not installed"])}


def without_avx2() -> dict[str, str]:
    """The speed that a CPU without AVX2, or a build without its kernels, loses; factors measured on a Zen 5."""
    if isas() != ["scalar"]:
        return {}
    return {"lost": "speed: scalar code takes 2 to 2.5 times as long as AVX2's; results differ by rounding alone"}


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
        **without_avx2(),
        "CUDA kernels": " ".join(f"sm_{arch}" for arch in _C.cuda_archs) or "none",
        "GPU": ", ".join(map(gpu, range(torch.cuda.device_count()))) or "none",
        "threads": str(torch.get_num_threads()),
        **transformers_coverage(),
        "SDPA switch": sdpa_switch_state(),
        "dtypes": " ".join(name for name, dtype in DTYPES.items() if supported(dtype, device)),
    }


def run(argv: Sequence[str]) -> int:
    """Print the facts, each on a line, or on several of at most 80 columns."""
    parser = Command("info", __doc__)
    parser.option("device", "cpu", "whose dtypes to show", check_device, choices=DEVICES)
    meaning = "name transformers' models that keep their own attention"
    parser.add_argument("--architectures", action="store_true", help=meaning)
    options = parser.checked(argv)
    known = facts(options.device)
    if options.architectures:
        known |= keeping()
    elif "transformers" in known:
        known["transformers"] += " (--architectures)"
    width = max(map(len, known)) + 2
    for name, value in known.items():
        lines = textwrap.wrap(value, 80 - width, break_long_words=False, break_on_hyphens=False)
        print(f"{name:{width}}" + f"\n{'':{width}}".join(lines))
    return 0
