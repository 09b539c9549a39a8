"""Dynamic metadata: a wheel requires the torch minor it was built with, whose C++ ABI it uses."""

from collections.abc import Mapping
from typing import Any


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """The package's dependencies, for the torch that builds it."""
    import torch

    major, minor, *_ = torch.__version__.split(".")
    return {"dependencies": [f"torch=={major}.{minor}.*"]}


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    """The dependencies of an sdist are not known before it is built."""
    return {"dependencies": True}
