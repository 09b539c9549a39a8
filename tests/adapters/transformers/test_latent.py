"""Promise: pyattn.nn.MultiHeadLatentAttention takes the state of layers of transformers and computes the same."""

from typing import Any

import pytest
import torch
from support.adapters.models import DECODERS, ROUNDINGS, assert_near, made
from torch import Tensor

from pyattn import KVCache, nn

BATCH, LENGTH = 2, 9
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek-v2", {}),
    "v2 with low-rank queries": ("deepseek-v2", {"q_lora_rank": 10}),
    "v3 with YaRN": ("deepseek-v3", {}),
    "v3 in halves, with biases": ("deepseek-v3", {"rope_interleave": False, "attention_bias": True}),
    "v3 without scaling": ("deepseek-v3", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
}


def twins(name: str, changes: dict[str, Any]) -> tuple[Any, Any]:
    """A model of transformers and our layer with the state of its first, in float64."""
    config, arguments = DECODERS[name]
    model = made(config, arguments | changes).double()
    c = model.config
    sizes = c.q_lora_rank, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    theirs = model.model.layers[0].self_attn
    ours = nn.MultiHeadLatentAttention(
        c.hidden_size,
        c.num_attention_heads,
        *sizes,
        attention_bias=c.attention_bias,
        rope_theta=c.rope_parameters["rope_theta"],
        rope_interleave=getattr(c, "rope_interleave", True),  # V2 always interleaves
        softmax_scale=theirs.scaling,
    ).double()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return model, ours


def angles(model: Any, x: Tensor) -> tuple[Any, tuple[Tensor, Tensor]]:
    """The rotary tables as transformers' layer takes them and as ours does."""
    found = model.model.rotary_emb(x, position_ids=torch.arange(x.shape[1])[None])
    if isinstance(found, tuple):
        half = model.config.qk_rope_head_dim // 2
        return found, (found[0][..., :half], found[1][..., :half])
    return found, (found.real, found.imag)


@pytest.mark.usefixtures("softmax_in_its_own_dtype")
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_layer(variant):
    """Outputs and all gradients, and decoding over a cache of latent vectors, which absorbs kv_b_proj."""
    model, ours = twins(*VARIANTS[variant])
    theirs = model.model.layers[0].self_attn
    x = torch.randn(BATCH, LENGTH, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    their_angles, our_angles = angles(model, x)
    causal = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    model.set_attn_implementation("eager")
    exact = theirs(x, position_embeddings=their_angles, attention_mask=causal)[0]
    out = ours(x, position_embeddings=our_angles)
    assert_near(out, exact)
    dout = torch.randn_like(out)
    truth = torch.autograd.grad(exact, [x, *theirs.parameters()], dout)
    found = torch.autograd.grad(out, [x, *ours.parameters()], dout)
    largest = max(t.abs().max() for t in truth)
    for gradient, true_gradient in zip(found, truth, strict=True):
        assert (gradient - true_gradient).abs().max() <= ROUNDINGS * largest
    columns = ours.kv_lora_rank + ours.qk_rope_head_dim
    cached = KVCache(BATCH, 1, LENGTH, columns, head_dim_v=ours.kv_lora_rank, shared_values=True, dtype=torch.float64)
    for rows in (slice(0, 5), slice(5, 6), slice(6, LENGTH)):
        now = our_angles[0][:, rows], our_angles[1][:, rows]
        assert_near(ours(x[:, rows], position_embeddings=now, kv_cache=cached), exact[:, rows])
    own = (ours(x) - exact).abs().max() <= ROUNDINGS * exact.abs().max()
    assert own == (model.config.rope_parameters["rope_type"] == "default"), "rope_theta alone gives the same angles"
