"""Autocast as in torch's own operators, applied before ours: the tensors that backward saves have one dtype."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

DEVICES = ("cpu", "cuda")
"""The devices of our kernels. meta has no autocast, and torch 2.11 can't compile the question which devices have."""


def cast(t: Tensor) -> Tensor:
    """``t`` in autocast's dtype where autocast is on; as in torch, float64, integers and bools stay as they are."""
    device = t.device.type
    if device in DEVICES and torch.is_autocast_enabled(device):
        return t.to(torch.get_autocast_dtype(device)) if t.is_floating_point() and t.dtype != torch.float64 else t
    return t


def cast_rows(t: Tensor) -> Tensor:
    """Slopes, sinks or a relative bias cast as q is, whose dtype they must have; float32 goes with any q and stays."""
    return t if t.dtype == torch.float32 else cast(t)


def without(device: torch.device) -> AbstractContextManager[object]:
    """A context with autocast off on the device; a device without autocast, such as meta, needs none."""
    if device.type in DEVICES and torch._C._is_any_autocast_enabled():
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
