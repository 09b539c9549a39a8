"""Functions whose backward computes them again instead of keeping what they computed."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pyattn.derivatives.transforms import transforming

Result = TypeVar("Result")


def recomputing(function: Callable[..., Result], reads: Iterable[Any]) -> Callable[..., Result]:
    """``function`` with such a backward; in compiled graphs and transforms of torch.func, the function itself.

    Autograd would not see that a tensor changed in place before it is read again, so this compares versions.

    Args:
        function: draws no random numbers.
        reads: the tensors that it reads, among other values.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or transforming():
        return function
    versions = [(x, x._version) for x in reads if isinstance(x, Tensor) and not x.is_inference()]

    def checked(*args: Any) -> Result:
        for tensor, version in versions:
            if tensor._version != version:
                raise RuntimeError(
                    "pyattn: one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: {tensor.type()} {list(tensor.shape)} must be at version {version} in backward, got "
                    f"version {tensor._version}"
                )
        return function(*args)

    return partial(checkpoint, checked, use_reentrant=False, preserve_rng_state=False)
