"""Promise: mask and bias of a module mean what they mean to attention, on top of the module's own mask."""

from typing import Any

import pytest
import torch
from module_cases import (
    D_IN,
    ROWS,
    WITH_RANGES,
    assert_same,
    gradients,
    pair,
)
from test_modules import RecordSoftmax
from torch import Tensor

from pyattn import nn

each_module = pytest.mark.parametrize("name", WITH_RANGES)
each_kind = pytest.mark.parametrize("kind", ["mask", "bias", "both"])

H = "heads"
SHAPES: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [
    ((ROWS, ROWS), (2, H, ROWS, ROWS)),
    ((2, 1, ROWS, ROWS), (ROWS,)),
    ((1, H, ROWS, ROWS), (H, ROWS, 1)),
    ((2, H, ROWS, ROWS), (2, 1, 1, ROWS)),
    ((2, 1, 1, ROWS), (1, H, 1, 1)),
    ((ROWS,), (ROWS, ROWS)),
    ((1, ROWS, 1), (H, 1, ROWS)),
]
"""A mask and a bias each, of shapes that broadcast to (2, heads, ROWS, ROWS)."""


def heads_of(module: torch.nn.Module) -> int:
    inner = getattr(module, "multihead_attn", module)
    return getattr(inner, "num_heads", None) or len(getattr(module, "heads", "1"))


def added(kind: str, shapes: tuple[tuple[Any, ...], tuple[Any, ...]], heads: int) -> dict[str, Tensor]:
    """What a caller gives; some rows then see nothing."""
    of_mask, of_bias = (tuple(heads if n == H else n for n in shape) for shape in shapes)
    bias = torch.randn(of_bias, dtype=torch.float64)
    given = {"mask": torch.rand(of_mask) < 0.7, "bias": bias.masked_fill(torch.rand(of_bias) < 0.1, -torch.inf)}
    return given if kind == "both" else {kind: given[kind]}


def rows(batch: int = 2) -> Tensor:
    return torch.randn(batch, ROWS, D_IN, dtype=torch.float64)


def seen_by(causal: bool, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    seen = torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    seen = seen if mask is None else seen & mask
    return seen if bias is None else seen & (bias != -torch.inf)


def of_caller(module: torch.nn.Module, mask: Tensor | None = None, **others: Tensor) -> dict[str, Tensor]:
    """The same for the module: Attention's mask, which has 2 to 4 dimensions, is True where masked out."""
    if mask is None:
        return others
    return {"mask": ~mask[(None,) * (4 - mask.dim())] if isinstance(module, nn.Attention) else mask, **others}


@each_module
@each_kind
def test_equals_plain(name: str, kind: str) -> None:
    """Outputs, weights and all gradients, those of bias too."""
    native, reference = (module.double() for module in pair(name, *WITH_RANGES[name]))
    x = rows().requires_grad_()
    for shapes in SHAPES:
        given = added(kind, shapes, heads_of(native))
        if name == "Attention" and kind == "mask":
            given["mask"][..., 0] = True  # the plain module gives NaN where nothing is seen
        seen = seen_by(name != "Attention", **given)
        learned = [given["bias"].requires_grad_()] if "bias" in given else []
        given = of_caller(native, **given)
        ours, exact = native(x, **given), reference(x, **given)
        assert_same(ours, exact)
        found = gradients(ours, [x, *native.parameters(), *learned])
        expected = gradients(exact, [x, *reference.parameters(), *learned])
        for gradient, target in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, target, rtol=0, atol=1e-12)
        out, weights = native(x, **given, need_weights=True)
        with RecordSoftmax() as record:
            reference(x, **given)
        assert torch.equal(out, ours)
        whole = torch.stack(record.weights, 1) if name.endswith("Wrapper") else record.weights[0]
        visible = seen if weights.dim() == 4 else seen[:, 0]
        assert_same(weights, whole.masked_fill(~visible, 0.0))
