"""What the checks of several steps share: inputs on the device, and both ways to add up dQ."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from helpers import NAMES, Case
from torch import Tensor

from pyattn import set_deterministic

Offsets = tuple[int, ...]


def tensors(case: Case, dtype: torch.dtype, device: str) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """q, k and v together, dout, dlse."""
    q, k, v = (t.to(device) for t in case.inputs(dtype))
    dout, dlse = (t.to(device) for t in case.gradients(dtype))
    return (q, k, v), dout, dlse


def options_on(device: str, case: Case, offsets: Offsets | None = None) -> dict[str, Any]:
    """The case's options, or with an offset for each sequence; what is a tensor on the device."""
    options = case.options
    if offsets is not None:
        options["q_offset"] = torch.tensor(offsets, device=device)
    if "dropout_seed" in options:
        options["dropout_seed"] = torch.tensor(options["dropout_seed"], device=device)
    return options


@contextmanager
def determinism(deterministic: bool) -> Iterator[None]:
    set_deterministic(deterministic)
    try:
        yield
    finally:
        set_deterministic(True)


def assert_same(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...], deterministic: bool) -> None:
    """To the bit, of out, lse, dq and so on as many as there are; not deterministic, dq but for a rounding."""
    for name, x, y in zip(NAMES, ours, expected, strict=False):
        if name == "dq" and not deterministic:
            assert (x - y).abs().max() <= 2 * torch.finfo(x.dtype).eps * y.abs().max(), name
        else:
            assert torch.equal(x, y), name
