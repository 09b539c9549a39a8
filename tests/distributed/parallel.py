"""The code that ranks run for test_tensor_parallel.py: a module and its parallel twin, from the same seeds."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from modules.cases import class_of, set_dropout
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pyattn.distributed import tensor_parallel

D_IN, LENGTH = 12, 9

CASES: dict[str, tuple[Any, ...]] = {
    "MultiHeadAttention": (D_IN, 16, LENGTH, 0.0, 4, True),
    "Attention": (D_IN, 4),
    "GroupedQueryAttention": (D_IN, 16, 0.0, 8, 4, None, True),
    "MHAEinsum": (D_IN, 16, LENGTH, 0.0, 4, True),
    "MultiHeadAttentionCombinedQKV": (D_IN, 16, 4, LENGTH, 0.0, True),
    "MHAPyTorchScaledDotProduct": (D_IN, 16, 8, LENGTH),
    "MHAPyTorchSDPAWithoutFlash": (D_IN, 16, 4, LENGTH, 0.0, True),
    "MHAPyTorchFlexAttention": (D_IN, 16, 4, LENGTH, 0.0, True),
    "MHAPyTorchClass": (D_IN, D_IN, 4, LENGTH, 0.0, True),
    "MultiHeadAttentionWrapper": (D_IN, 3, LENGTH, 0.0, 4, True),
    "Ch03_MHA_Wrapper": (D_IN, 3, LENGTH, 0.0, 4, True),
}


def made(name: str, dtype: torch.dtype, dropout: float, keywords: dict[str, Any]) -> nn.Module:
    """A module whose parameters are those of a seed."""
    torch.manual_seed(1)
    module: nn.Module = class_of(name)(*CASES[name], **keywords).to(dtype)
    if getattr(module, "sinks", None) is not None:
        nn.init.normal_(module.sinks)
    set_dropout(module, dropout)
    return module


def whole(tensor: Tensor) -> Tensor:
    """A parameter or its gradient as one process has it."""
    if not isinstance(tensor, DTensor):
        return tensor
    full = tensor.full_tensor()
    return full.flatten(0, 1) if full.shape[0] == 3 and full.dim() > 1 else full


def step(module: nn.Module, x: Tensor, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """out, weights if requested, and the gradients of x and of every parameter, by name."""
    torch.manual_seed(7)
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    result = module(leaf, **arguments)
    out, *weights = result if isinstance(result, tuple) else (result,)
    factors = torch.linspace(-1, 1, out[0].numel(), dtype=out.dtype).view(out.shape[1:])
    loss = (out * factors).sum() + sum((w.square().sum() for w in weights), torch.zeros(()))
    loss.backward()
    found = {"out": out.detach(), "dx": leaf.grad} | {f"weights{i}": w.detach() for i, w in enumerate(weights)}
    return found | {name: whole(p.grad) for name, p in module.named_parameters()}


def compare(
    group: dist.ProcessGroup,
    name: str,
    dtype: torch.dtype = torch.float64,
    dropout: float = 0.0,
    keywords: dict[str, Any] = {},
    arguments: dict[str, Any] = {},
) -> None:
    """The parallel module's results and gradients are those of one process."""
    module = made(name, dtype, dropout, keywords)
    twin = tensor_parallel(copy.deepcopy(module), DeviceMesh.from_group(group, "cpu"))
    torch.manual_seed(2)
    x = torch.randn(2, 7, D_IN, dtype=dtype)
    expected, found = step(module, x, arguments), step(twin, x, arguments)
    shown = f"{name} {dropout} {keywords} {list(arguments)}"
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{shown} {k}: {m}")
    missing = expected.keys() - found.keys()
    assert all(key.startswith("heads.") for key in missing), missing
