"""Promise: mask and bias of a module mean what they mean to attention, on top of the module's own mask."""

import re
from typing import Any

import pytest
import torch
from nn.test_modules import RecordSoftmax
from support.assertions import assert_close
from support.modules import (
    D_IN,
    EXTRAS,
    ROWS,
    WITH_EXTRAS,
    WITH_RANGES,
    assert_same,
    doubles,
    gradients,
    made,
    pair,
    plain,
    sequences,
)
from torch import Tensor

from pyattn import masks, nn

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
"""Pairs of a mask and a bias, of shapes that broadcast to (2, heads, ROWS, ROWS)."""


def heads_of(module: torch.nn.Module) -> int:
    inner = getattr(module, "multihead_attn", module)
    return getattr(inner, "num_heads", None) or len(getattr(module, "heads", "1"))


def added(kind: str, shapes: tuple[tuple[Any, ...], tuple[Any, ...]], heads: int) -> dict[str, Tensor]:
    """The caller's options; some rows then see nothing."""
    of_mask, of_bias = (tuple(heads if n == H else n for n in shape) for shape in shapes)
    bias = torch.randn(of_bias, dtype=torch.float64)
    given = {"mask": torch.rand(of_mask) < 0.7, "bias": bias.masked_fill(torch.rand(of_bias) < 0.1, -torch.inf)}
    return {name: t for name, t in given.items() if kind in (name, "both")}


def seen_by(causal: bool, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    seen = torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    seen = seen if mask is None else seen & mask
    return seen if bias is None else seen & (bias != -torch.inf)


def of_caller(module: torch.nn.Module, mask: Tensor | None = None, **others: Tensor) -> dict[str, Tensor]:
    """The same for the module: the mask of Attention has 2 to 4 dimensions and is True where masked out."""
    if mask is None:
        return others
    return {"mask": ~mask[(None,) * (4 - mask.dim())] if isinstance(module, nn.Attention) else mask, **others}


@each_module
@each_kind
def test_equals_plain(name, kind):
    """Outputs, weights and all gradients, bias's included."""
    native, reference = doubles(name, *WITH_RANGES[name])
    x = sequences(2, ROWS).requires_grad_()
    for shapes in SHAPES:
        given = added(kind, shapes, heads_of(native))
        if name == "Attention" and kind == "mask":
            given["mask"][..., 0] = True  # the plain module gives NaN in rows that see nothing
        seen = seen_by(name != "Attention", **given)
        learned = [given["bias"].requires_grad_()] if "bias" in given else []
        given = of_caller(native, **given)
        ours, exact = native(x, **given), reference(x, **given)
        assert_same(ours, exact)
        found = gradients(ours, [x, *native.parameters(), *learned])
        expected = gradients(exact, [x, *reference.parameters(), *learned])
        assert_close(found, expected)
        out, weights = native(x, **given, need_weights=True)
        with RecordSoftmax() as record:
            reference(x, **given)
        assert torch.equal(out, ours)
        whole = torch.stack(record.weights, 1) if name.endswith("Wrapper") else record.weights[0]
        visible = seen if weights.dim() == 4 else seen[:, 0]
        assert_same(weights, whole.masked_fill(~visible, 0.0))


@pytest.mark.parametrize("name", WITH_EXTRAS)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_extras_and_dropout(name, extra, dropout):
    """Also with key_ranges; the weights are those used in training."""
    module = made(name, extra)
    module.dropout.p = dropout
    x, ranges = sequences(2, ROWS).requires_grad_(), masks.padding([ROWS, 5], ROWS, side="left")
    for kind in ("neither", "mask", "bias", "both"):
        given = added(kind, SHAPES[3], module.num_heads)
        learned = [x, *module.parameters()] + ([given["bias"].requires_grad_()] if "bias" in given else [])
        hidden = {"mask": ~given["mask"]} if "mask" in given else {}
        results = []
        for call in (
            lambda given=given: module(x, **of_caller(module, **given), key_ranges=ranges, need_weights=True),
            lambda given=given, hidden=hidden: plain(module, x, key_ranges=ranges, **given | hidden),
        ):
            torch.manual_seed(0)
            results.append(call())
        (ours, weights), (exact, expected) = results
        assert_same(ours, exact)
        assert_same(weights, expected)
        assert_close(gradients(ours, learned), gradients(exact, learned))


CAUSAL_TWINS = ("MultiHeadAttentionCombinedQKV", "MHAPyTorchClass")
"""Modules whose plain twins are causal whatever their mask."""


@pytest.mark.parametrize("name", ["CausalAttention", "MultiHeadAttention", *CAUSAL_TWINS])
@pytest.mark.parametrize("kind", ["mask", "bias", "both", "key_ranges"])
def test_on_top_of_an_assigned_mask(name, kind):
    native, reference = doubles(name, *WITH_RANGES[name])
    size = native.context_length
    for module in (native, reference):
        module.mask = torch.ones(size, size).triu(2)
    x, given = sequences(2, ROWS), added(kind, SHAPES[0], heads_of(native))
    if kind == "key_ranges":
        given = {"key_ranges": masks.padding([ROWS, 5], ROWS)}
    if name not in CAUSAL_TWINS:
        assert_same(native(x, **given), reference(x, **given))
    one_more = torch.ones(ROWS, ROWS, dtype=torch.bool).tril(1)
    seen = given.pop("mask", one_more) & one_more
    out = native(x, **given, mask=seen)
    native.mask = torch.zeros(size, size)
    assert_same(out, native(x, **given, mask=seen))


@each_kind
def test_the_key_of_the_biases_is_seen_by_all(kind):
    """torch's nn.MultiheadAttention pads its masks in the same way with add_bias_kv."""
    native, reference = doubles("MHAPyTorchClass", D_IN, D_IN, 3, ROWS, 0.0, True)
    torch.nn.init.normal_(native.multihead_attn.bias_k)
    reference.load_state_dict(native.state_dict())
    x, causal = sequences(2, ROWS), torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    for shapes in SHAPES:
        given = added(kind, shapes, 3)
        out, weights = native(x, **given, need_weights=True)
        assert_same(out, reference(x, **given))
        score = torch.where(given.get("mask", causal) & causal, given.get("bias", 0.0), -torch.inf)
        score = score.to(torch.float64).expand(2, 3, ROWS, ROWS).flatten(0, 1)
        theirs, expected = native.multihead_attn(x, x, x, attn_mask=score, average_attn_weights=False)
        assert_same(out, native.proj(theirs))
        assert_same(weights, expected)


def test_under_autocast():
    """The bias may have the parameters' dtype, as in attention."""
    module, x = made("MultiHeadAttention", "all").float(), torch.randn(2, ROWS, D_IN)
    given = added("both", SHAPES[3], module.num_heads)
    given["bias"] = given["bias"].float()
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x, **given)
    assert (out - module(x, **given)).abs().max() < 0.1


TAKES = ", True = takes part (numbers to add to the scores are bias), got torch.float32"
HIDES = ", True = masked out (numbers to add to the scores are bias), got torch.float32"
ADDED = "bias must be floating-point, added to the scores (a bool tensor, True = takes part, is mask), got torch.bool"


@each_module
def test_one_in_the_place_of_the_other(name):
    module, _ = pair(name, *WITH_RANGES[name])
    x, seen = torch.randn(2, ROWS, D_IN), torch.ones(ROWS, ROWS)
    message = "pyattn: mask must be bool" + (HIDES if name == "Attention" else TAKES)
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        module(x, mask=seen)
    with pytest.raises(TypeError, match=f"^{re.escape('pyattn: ' + ADDED)}$"):
        module(x, bias=seen > 0)
    for shape in [(ROWS, ROWS + 1), (3, 1, 1, 1), (5, 1, 1), (1, 1, 1, ROWS, ROWS)]:
        message = f"bias must broadcast to (batch, num_heads, seqlen, keys) = {(2, heads_of(module), ROWS, ROWS)}"
        with pytest.raises(ValueError, match=f"^{re.escape(f'pyattn: {message}, got shape {shape}')}$"):
            module(x, bias=torch.ones(shape))


@pytest.mark.parametrize("shape", [(7, 7), (2, 7, 7), (2, 3, 7, 7), (1, 1, 7, 7), (2, 1, 1, 7)])
def test_mask_is_true_where_masked_out(shape):
    """The mask of Attention, in every shape that broadcasts."""
    native, plain = doubles("Attention")
    x = sequences(2, 7)
    mask = torch.rand(shape) < 0.5
    mask[..., 0] = False
    assert_same(native(x, mask), plain(x, mask))
    out, weights = native(x, mask, need_weights=True)
    assert_same(out, plain(x, mask))
    assert not weights.masked_select((mask[:, None] if mask.dim() == 3 else mask).expand(2, 3, 7, 7)).any()


def test_causal_mask():
    mask = nn.causal_mask(5, device="cpu")
    assert mask.dtype == torch.bool
    assert torch.equal(mask[0, 0], torch.ones(5, 5).triu(1).bool())
    native, _ = pair("Attention")
    x = torch.randn(2, 5, D_IN)
    changed = torch.cat([x[:, :3], torch.randn(2, 2, D_IN)], dim=1)
    assert torch.equal(native(x, mask)[:, :3], native(changed, mask)[:, :3])
    fully_masked = native(x, torch.ones(5, 5, dtype=torch.bool))
    assert torch.equal(fully_masked, native.W_o.bias.expand(2, 5, D_IN)), "a query that sees no key gives 0"
