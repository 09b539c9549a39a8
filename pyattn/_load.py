"""Loads the native libraries; if that fails, one sentence says why and which command fixes it."""

from pathlib import Path

_REBUILD = "'pip install --no-build-isolation --force-reinstall --no-deps .' in the checkout"

try:
    from pyattn import _C, _build
except ImportError as error:
    if error.name != "pyattn":  # _C is here, and the system names the library or symbol that it lacks
        raise ImportError(
            f"pyattn: the native module must load on this system, got '{error}'; rebuild it here with {_REBUILD}"
        ) from error
    raise ImportError(
        "pyattn: this folder holds the package's source without its native module; install it with "
        "'pip install -e .' in the checkout, or start Python from another folder to use the installed package"
    ) from error


def _listed(minors: list[str]) -> str:
    return ", ".join(minors[:-1]) + " or " * (len(minors) > 1) + minors[-1]


_minors = list(_build.torches)
_command = f"pip install 'torch=={_minors[-1]}.*'"

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(f'pyattn: needs torch; install it with "{_command}"') from error

_minor = ".".join(torch.__version__.split(".")[:2])

# A nightly's interfaces may be older or newer than those of the release after it.
if _minor not in _minors or (".dev" in torch.__version__ and torch.__version__ not in _build.torches.values()):
    raise ImportError(
        f"pyattn: built for torch {_listed(_minors)}, got torch {torch.__version__}; rebuild for it with {_REBUILD}, "
        f'or install a torch that it was built for with "{_command}"'
    )

_loaded = [path for path in torch.ops.loaded_libraries if "libpyattn_torch_" in path]
if _loaded:
    raise ImportError(
        f"pyattn: this process has registered the operators of {_loaded[0]} already, and torch takes one copy's; "
        f"import {Path(__file__).parent} in a new process"
    )

_folder = Path(_C.__file__).parent  # not this file's: an editable install keeps the libraries elsewhere
torch.ops.load_library(next(_folder.glob(f"libpyattn_torch_{_minor}.*")))
