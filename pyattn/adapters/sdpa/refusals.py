"""The reasons for which torch computes a call of ``scaled_dot_product_attention`` while the switch is on."""

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, get_unwrapped, is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_TRACERS = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE


def refusal(query: Tensor, key: Tensor, *others: object) -> str | None:
    """Why torch computes a call that the rules of the adapter would take, or None if it doesn't."""
    for given in (query, key, *others):
        if given is None:
            continue
        tensor = _innermost(given)
        if type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor):
            return f"tensors of type {type(tensor).__name__}"  # such as DTensor: wrapper tensors have their own rules
    return unsuitable(query, key)


def unsuitable(query: Tensor, key: Tensor) -> str | None:
    """:func:`refusal` apart from the tensors' types."""
    if not torch.backends.cuda.flash_sdp_enabled():  # despite its name, the flag applies on the CPU too
        return "torch.nn.attention.sdpa_kernel without FLASH_ATTENTION"
    reason = _untransformable()
    if reason is not None:
        return reason
    if not (query.numel() and key.numel()):  # torch does not broadcast empty tensors
        return "query or key without elements"
    return None


def _innermost(given: object) -> object:
    """The tensor inside the wrappers of torch.func's transforms."""
    while isinstance(given, Tensor) and is_functorch_wrapped_tensor(given):
        given = get_unwrapped(given)
    return given


def _untransformable() -> str | None:
    """Why the native kernels have no rule for the transforms that are active, or None if they have."""
    if not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0:
        return None
    stack = [transform.key() for transform in get_interpreter_stack() or ()]
    if stack and torch.compiler.is_compiling():
        return "transforms of torch.func in compiled code"
    if TransformType.Functionalize in stack:
        return "torch.func.functionalize"
    forward = TransformType.Jvp in stack or forward_ad._current_level >= 0
    derivatives = stack.count(TransformType.Grad) + max(stack.count(TransformType.Jvp), forward)
    if derivatives > 2:
        return "third derivatives"
    if (forward or derivatives == 2) and any(map(torch._C._get_dispatch_mode, _TRACERS)):
        return "forward mode or second derivatives under a tracer, such as torch.func.linearize"
    return None


def rule_of(error: Exception) -> str:
    """The rule in an error of pyattn, without the values that break it; any other error is raised."""
    if not str(error).startswith("pyattn: "):
        raise error
    return str(error).removeprefix("pyattn: ").split(", got ")[0]
