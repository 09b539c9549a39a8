"""Transforms of torch.func and forward-mode differentiation: whether one is active, and what none of them takes."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

NO_NESTED = "pyattn: nested tensors are not supported in transforms of torch.func"


def transforming() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def constant(tensor: Tensor) -> Tensor:
    """``tensor`` without gradients and without tangents of the innermost level."""
    if forward_ad._current_level >= 0:
        tensor = forward_ad.unpack_dual(tensor).primal
    return tensor.detach() if tensor.requires_grad else tensor


def check_not_nested(**tensors: Tensor) -> None:
    """NotImplementedError for a nested tensor inside a transform, where it looks like a dense one."""
    functorch = torch._C._functorch
    for name, tensor in tensors.items():
        inner = tensor
        while isinstance(inner, Tensor) and functorch.is_functorch_wrapped_tensor(inner):
            inner = functorch.get_unwrapped(inner)
        if inner is not tensor and inner.is_nested:
            raise NotImplementedError(f"{NO_NESTED}, got {name} of layout {inner.layout}")
