"""Transforms of torch.func, two deep, of a function and of the plain formula that it must equal."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Function = Callable[..., tuple[Tensor, ...]]


def pattern(shape: Sequence[int]) -> Tensor:
    """Numbers without symmetry; torch.randn would raise inside vmap."""
    return (1.7 * torch.arange(math.prod(shape), dtype=torch.float64) + 0.4).sin().view(tuple(shape))


def flat(function: Callable[..., Any]) -> Function:
    """The function with a flat tuple of results, which every transform takes."""
    return lambda *inputs: tuple(tree_leaves(function(*inputs)))


def total(function: Function) -> Callable[..., Tensor]:
    """A scalar that depends on every result, with a different weight for each entry."""

    def of(*inputs: Tensor) -> Tensor:
        results = function(*inputs)
        return sum(((pattern(x.shape) + i) * x.sin()).sum() for i, x in enumerate(results))  # type: ignore[return-value]

    return of


def every(inputs: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple(range(len(inputs)))


def stacked(inputs: tuple[Tensor, ...]) -> tuple[list[Tensor], list[int]]:
    """Two different values of each input, stacked along its first or last dimension in turn."""
    dims = [0 if i % 2 else -1 for i in range(len(inputs))]
    others = (1.5 * x.flip(-1).cos() for x in inputs)
    return [torch.stack(pair, dim) for *pair, dim in zip(inputs, others, dims, strict=True)], dims


def mapped(function: Function) -> Function:
    def of(*inputs: Tensor) -> Any:
        stacks, dims = stacked(inputs)
        return torch.vmap(function, tuple(dims))(*stacks)

    return of


def one_by_one(function: Function) -> Function:
    """The results of vmap without vmap: plain PyTorch's formula reads values."""

    def of(*inputs: Tensor) -> Any:
        stacks, dims = stacked(inputs)
        slices = zip(*(x.unbind(dim) for x, dim in zip(stacks, dims, strict=True)), strict=True)
        return [torch.stack(parts) for parts in zip(*(function(*one) for one in slices), strict=True)]

    return of


def jvp(function: Function) -> Function:
    return lambda *inputs: torch.func.jvp(function, inputs, tuple(x.sin() + 0.5 for x in inputs))


def vjp(function: Function) -> Function:
    def of(*inputs: Tensor) -> Any:
        results, pull = torch.func.vjp(function, *inputs)
        return results, pull(tuple(x.cos() + pattern(x.shape) + i for i, x in enumerate(results)))

    return of


# Each transform: the order of its derivatives, and the function that applies it.
TRANSFORMS: dict[str, tuple[int, Callable[[Function], Callable[..., Any]]]] = {
    "vmap": (0, mapped),
    "grad": (1, lambda f: lambda *x: torch.func.grad(total(f), every(x))(*x)),
    "vjp": (1, vjp),
    "jvp": (1, jvp),
    "jacfwd": (1, lambda f: lambda *x: torch.func.jacfwd(f, every(x))(*x)),
    "jacrev": (1, lambda f: lambda *x: torch.func.jacrev(f, every(x))(*x)),
    "hessian": (2, lambda f: lambda *x: torch.func.hessian(total(f), every(x))(*x)),
}


FEW = ("vmap", "grad", "jvp")


def assert_two_deep(
    ours: Function,
    truth: Function,
    shapes: Sequence[tuple[int, ...]],
    outer: str,
    tried: Sequence[str],
    any_order: bool = False,
) -> None:
    """The ``outer`` transform of each one tried gives the formula's results; third derivatives only in any order."""
    inputs = tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)
    outer_order, transform = TRANSFORMS[outer]
    for inner in tried:
        inner_order, first = TRANSFORMS[inner]
        both = transform(flat(first(flat(ours))))
        if not any_order and outer_order + inner_order > 2:
            with pytest.raises(NotImplementedError, match=r"^pyattn: third derivatives of attention are not impl"):
                both(*inputs)
            continue
        a, b = (one_by_one if each == "vmap" else TRANSFORMS[each][1] for each in (outer, inner))
        expected = flat(a(flat(b(flat(truth)))))(*inputs)
        torch.testing.assert_close(
            flat(both)(*inputs), expected, rtol=0, atol=1e-10, msg=partial("{}: {}".format, inner)
        )
