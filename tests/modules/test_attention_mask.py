"""Promise: True in the mask given to pyattn.nn.Attention means masked out, in every shape that broadcasts."""

import pytest
import torch
from modules.cases import D_IN, assert_same, doubles, pair, sequences
from torch import Tensor

from pyattn import nn


def wide_mask(mask: Tensor) -> Tensor:
    """(batch, num_heads, seqlen, seqlen) of a mask that has 2, 3 or 4 dimensions."""
    return (mask[:, None] if mask.dim() == 3 else mask).expand(2, 3, 7, 7)


@pytest.mark.parametrize("shape", [(7, 7), (2, 7, 7), (2, 3, 7, 7), (1, 1, 7, 7), (2, 1, 1, 7)])
def test_mask_is_true_where_masked_out(shape):
    native, plain = doubles("Attention")
    x = sequences(2, 7)
    mask = torch.rand(shape) < 0.5
    mask[..., 0] = False
    assert_same(native(x, mask), plain(x, mask))
    out, weights = native(x, mask, need_weights=True)
    assert_same(out, plain(x, mask))
    assert not weights.masked_select(wide_mask(mask)).any()


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
