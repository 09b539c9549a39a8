"""Autocast as torch's own operators have it, above the operators: what backward saves has one dtype."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def cast(t: Tensor) -> Tensor:
    """``t`` in autocast's dtype where autocast is on; like torch's own, it leaves float64, integers and bools alone."""
    device = t.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return t.to(torch.get_autocast_dtype(device)) if t.is_floating_point() and t.dtype != torch.float64 else t
    return t


def cast_rows(t: Tensor) -> Tensor:
    """Slopes or sinks: 16-bit ones in autocast's dtype, for that is q's; float32 fits any."""
    return t if t.dtype == torch.float32 else cast(t)


def without(device: torch.device) -> AbstractContextManager[object]:
    """Within it, operators on the device take tensors as they are; not every device, such as meta, has autocast."""
    if torch._C._is_any_autocast_enabled() and torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
