"""Results of an adapter's function with its gradients, and how accurate they are beside plain PyTorch's."""

from collections.abc import Callable
from typing import Any

import torch
from support import yardstick
from torch import Tensor


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def with_gradients(function: Callable[..., Any], *inputs: Any) -> tuple[Tensor, ...]:
    """The results of ``function``, and for one gradient of the first result that of each floating-point input."""
    leaves = [x.detach().requires_grad_() if is_float(x) else x for x in inputs]
    results = function(*leaves)
    out, *others = results if isinstance(results, tuple) else (results,)
    dout = torch.arange(out.numel()).reshape(out.shape).sin().to(out.dtype)
    gradients = torch.autograd.grad(out, [x for x in leaves if is_float(x)], dout, materialize_grads=True)
    return out.detach(), *others, *gradients


def of_weighted_sum(code: Callable[..., Tensor], inputs: list[Tensor], *others: Tensor) -> list[Tensor]:
    """The result of ``code``, and gradients of a weighted sum of it: of inputs and others, 0 where there is none."""
    out = code(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    found = torch.autograd.grad((out * weights).sum(), [*inputs, *others], allow_unused=True)
    return [out.detach() + 0, *(torch.zeros(()) if g is None else g for g in found)]


def assert_accurate(native: Callable[..., Any], plain: Callable[..., Any], *inputs: Any) -> None:
    """Asserts that results and gradients of ``native`` are accurate by the rule of yardstick.py.

    ``plain`` computes the same with PyTorch: in the inputs' dtype it is the yardstick, in float64 it is exact.
    """
    ours, others = (with_gradients(function, *inputs) for function in (native, plain))
    exact = with_gradients(plain, *(x.double() if is_float(x) else x for x in inputs))
    for i, (mine, other, truth) in enumerate(zip(ours, others, exact, strict=True)):
        assert mine.dtype == other.dtype
        yardstick.assert_accurate(f"result {i}", mine, other, truth)
