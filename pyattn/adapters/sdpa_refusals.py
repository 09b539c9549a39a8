"""The reasons for which torch computes a call of ``scaled_dot_product_attention`` while the switch is on."""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def refusal(query: Tensor, key: Tensor, *others: object) -> str | None:
    """Why torch computes a call that the rules of the adapter would take, or None if it doesn't."""
    for tensor in (query, key, *others):
        if type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor):
            return f"tensors of type {type(tensor).__name__}"  # such as DTensor: wrapper tensors have their own rules
    return unsuitable(query, key)


def unsuitable(query: Tensor, key: Tensor) -> str | None:
    """:func:`refusal` apart from the tensors' types."""
    if not torch.backends.cuda.flash_sdp_enabled():  # despite its name, the flag applies on the CPU too
        return "torch.nn.attention.sdpa_kernel without FLASH_ATTENTION"
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "a transform of torch.func, or forward-mode differentiation"
    if not (query.numel() and key.numel()):  # torch does not broadcast empty tensors
        return "query or key without elements"
    return None


def rule_of(error: Exception) -> str:
    """The rule in an error of pyattn, without the values that break it; any other error is raised."""
    if not str(error).startswith("pyattn: "):
        raise error
    return str(error).removeprefix("pyattn: ").split(", got ")[0]
