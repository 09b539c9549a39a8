"""One small instance of every module of pyattn.nn, its plain twin, and the comparison of the two."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pyattn import nn, reference

D_IN = 12
D_OUT = 8
CONTEXT_LENGTH = 19

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "SimplifiedSelfAttention": (),
    "SelfAttention_v1": (D_IN, D_OUT),
    "SelfAttention_v2": (D_IN, D_OUT, True),
    "CausalAttention": (D_IN, D_OUT, CONTEXT_LENGTH, 0.0, True),
    "MultiHeadAttentionWrapper": (D_IN, D_OUT // 2, CONTEXT_LENGTH, 0.0, 2, True),
    "MultiHeadAttention": (D_IN, D_OUT, CONTEXT_LENGTH, 0.0, 2, True),
    "SingleHeadSelfAttention": (D_IN, D_OUT),
    "Attention": (D_IN, 3),
    "GroupedQueryAttention": (D_IN, D_OUT, 0.0, 4, 2, None, True),
    "Ch03_MHA_Wrapper": (D_IN, D_OUT // 2, CONTEXT_LENGTH, 0.0, 2, True),
    "MultiHeadAttentionCombinedQKV": (D_IN, D_OUT, 2, CONTEXT_LENGTH, 0.0, True),
    "MHAEinsum": (D_IN, D_OUT, CONTEXT_LENGTH, 0.0, 2, True),
    "MHAPyTorchScaledDotProduct": (D_IN, D_OUT, 2, CONTEXT_LENGTH),
    "MHAPyTorchSDPAWithoutFlash": (D_IN, D_OUT, 4, CONTEXT_LENGTH, 0.0, True),
    "MHAPyTorchClass": (D_IN, D_IN, 3, CONTEXT_LENGTH, 0.0, True),
    "MHAPyTorchFlexAttention": (D_IN, D_OUT, 1, CONTEXT_LENGTH),
}

every_module = pytest.mark.parametrize("name", ARGUMENTS)

EXTRAS: dict[str, dict[str, Any]] = {
    "window": {"window": (2, 1)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "rotary": {"rotary": 100.0},
    "all": {"window": (3, -1), "softcap": 2.0, "alibi": True, "sinks": True, "rotary": 10000.0},
}
WITH_EXTRAS = ("MultiHeadAttention", "Attention", "GroupedQueryAttention")


def pair(name: str, *arguments: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The native and the plain module, each made under the same seed."""
    made = []
    for home in (nn, reference):
        torch.manual_seed(123)
        made.append(getattr(home, name)(*(arguments or ARGUMENTS[name])))
    return made[0], made[1]


def set_dropout(module: torch.nn.Module, p: float) -> None:
    """In all modules within, be it a module or a number."""
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = p
        elif isinstance(getattr(part, "dropout", None), float):
            part.dropout = p


def output(module: torch.nn.Module, x: Tensor) -> Tensor:
    """What the module computes, without the weights that SingleHeadSelfAttention adds."""
    out = module(x)
    return out[0] if isinstance(out, tuple) else out


def error(x: Tensor, exact: Tensor) -> float:
    """The largest absolute error, relative to the largest exact value."""
    return (x.double() - exact).abs().max().item() / max(exact.abs().max().item(), torch.finfo(torch.float64).tiny)


def assert_same(x: Tensor, exact: Tensor) -> None:
    """Two float64 results that differ in rounding only."""
    assert x.dtype == exact.dtype == torch.float64
    assert x.shape == exact.shape
    assert error(x, exact) <= 1e-12
