"""Promise: the book's efficient variants compute what torch's own functions compute from their parameters."""

import pytest
import torch
from support.modules import assert_same
from torch.nn.functional import scaled_dot_product_attention

from pyattn import nn
from pyattn.nn import book

X = torch.randn(2, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_parameters_of_multihead_attention(qkv_bias, need_weights):
    module = book.MHAPyTorchClass(12, 12, 3, 9, qkv_bias=qkv_bias, need_weights=need_weights).double()
    out, weights = module(X, need_weights=True)
    mask = nn.causal_mask(7)[0, 0]
    theirs, their_weights = module.multihead_attn(X, X, X, attn_mask=mask, average_attn_weights=False)
    assert_same(out, module.proj(theirs))
    assert_same(weights, their_weights)
    assert_same(module(X), out)


def test_an_assigned_mask_leaves_the_biases_key_visible():
    module = book.MHAPyTorchClass(12, 12, 3, 9, qkv_bias=True).double()
    mask = torch.rand(9, 9) < 0.5
    module.mask = mask
    theirs, _ = module.multihead_attn(X, X, X, attn_mask=mask[:7, :7])
    assert_same(module(X), module.proj(theirs))


def test_multihead_attention_has_one_width():
    with pytest.raises(ValueError, match=r"^pyattn: d_in must equal d_out for nn.MultiheadAttention, got 8 and 12$"):
        book.MHAPyTorchClass(8, 12, 3, 9)


@pytest.mark.parametrize("name", ["ScaledDotProduct", "SDPAWithoutFlash", "FlexAttention"])
def test_parameters_of_sdpa(name):
    module = getattr(book, f"MHAPyTorch{name}")(12, 24, 4, 9, qkv_bias=True).double()
    q, k, v = module.qkv(X).view(2, 7, 3, 4, 6).permute(2, 0, 3, 1, 4)
    theirs = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_same(module(X), module.proj(theirs.transpose(1, 2).flatten(2)))


def test_einsum_has_the_transposed_weights():
    chapter = book.Ch03_MHA(12, 24, 9, 0.0, 4).double()
    einsum = book.MHAEinsum(12, 24, 9, 0.0, 4).double()
    state = chapter.state_dict()
    names = ("W_query", "W_key", "W_value")
    einsum.load_state_dict(
        {"out_proj.weight": state["out_proj.weight"], "out_proj.bias": state["out_proj.bias"]}
        | {name: state[f"{name}.weight"].T for name in names}
    )
    assert_same(einsum(X), chapter(X))
