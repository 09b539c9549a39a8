"""Operators by which compiled graphs run mods: dynamo takes each as one call and looks at nothing inside."""

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

Operator = OpOverload[..., Any]
"""The type of the operators."""

_library = torch.library.Library("pyattn_flex", "DEF")


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
) -> Operator:
    """Defines the operator of this schema, and returns it.

    Args:
        run: computes its results, on any device.
        fake: gives tensors of the same sizes and strides, for the compiler.
        backward, save: its derivative, as :func:`torch.library.register_autograd` takes them.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pyattn_flex::{name}", fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(f"pyattn_flex::{name}", backward, setup_context=save, lib=_library)
    operator: Operator = getattr(torch.ops.pyattn_flex, name).default
    return operator


def _arguments(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.zeros((), dtype=dtype), *(torch.zeros((), dtype=torch.int64) for _ in range(4))]


arguments: Operator = define("arguments(ScalarType dtype) -> Tensor[]", _arguments, _arguments)
"""The arguments of a score_mod for one pair, for which dynamo records it."""

copied: Callable[[torch.Tensor], torch.Tensor] = define(
    "copied(Tensor x) -> Tensor", torch.clone, torch.clone, backward=lambda ctx, gradient: gradient
)
"""A copy of a tensor; also marks the tensor's node in the graph that dynamo builds."""
