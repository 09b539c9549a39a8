"""Loads the native module; if that fails, one sentence says why and which command fixes it."""

try:
    from pyattn import _build
except ImportError as error:
    raise ImportError(
        "pyattn: this folder holds the package's source without its native module; install it with "
        "'pip install -e .' in the checkout, or start Python from another folder to use the installed package"
    ) from error


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


_needed = f"torch=={_minor(_build.torch_version)}.*"

try:
    import torch
except ImportError as error:
    raise ImportError(f"pyattn: needs torch; install it with \"pip install '{_needed}'\"") from error

if _minor(torch.__version__) != _minor(_build.torch_version):
    raise ImportError(
        f"pyattn: built for torch {_minor(_build.torch_version)}, got torch {torch.__version__}; rebuild for it with "
        "'pip install --no-build-isolation --force-reinstall --no-deps .' in the checkout, or install "
        f"the torch it was built for with \"pip install '{_needed}'\""
    )

from pyattn import _C  # noqa: E402, F401  (registers torch.ops.pyattn.*)
