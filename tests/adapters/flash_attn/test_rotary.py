"""Promise: rotary embeddings in flash-attn's signatures compute its documented formula, in place where it does."""

import math

import pytest
import torch
from support.adapters.flash_attn import turned
from support.assertions import refused
from torch.testing import assert_close

from pyattn.adapters.flash_attn.rotary import (
    apply_rotary,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
)
from pyattn.adapters.flash_attn.rotary_embedding import RotaryEmbedding
from pyattn.nn.rotary import rotate

POSITIONS = 40


def angles(columns):
    return torch.rand(POSITIONS, columns, dtype=torch.float64) * 2 * math.pi


OFFSETS = {"none": 0, "int": 5, "tensor": torch.tensor([3, 0], dtype=torch.int32)}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", OFFSETS)
def test_turns_pairs_of_columns(offsets, interleaved, inplace):
    angle, offset = angles(3), OFFSETS[offsets]
    positions = torch.as_tensor(offset).expand(2)[:, None] + torch.arange(9)
    leaf = torch.randn(2, 9, 4, 10, dtype=torch.float64, requires_grad=True)
    x = leaf.clone()
    options = {"interleaved": interleaved, "inplace": inplace, "seqlen_offsets": offset}
    out = apply_rotary_emb(x, angle.cos(), angle.sin(), **options)
    expected = turned(leaf, positions, angle, interleaved)
    assert_close(out, expected)
    assert_close(x.detach(), (expected if inplace else leaf).detach())
    dout = torch.randn_like(out)
    before = dout.clone()
    assert_close(torch.autograd.grad(out, leaf, dout), torch.autograd.grad(expected, leaf, dout))
    assert torch.equal(dout, before)
    cos, sin = (t[positions] for t in (angle.cos(), angle.sin()))
    assert_close(apply_rotary_emb_torch(leaf, cos, sin, interleaved), expected)


def test_turns_leaves_in_place_as_flash_attn_does():
    angle = angles(4)
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64, requires_grad=True)
    before = x.detach().clone()
    out = apply_rotary_emb(x, angle.cos(), angle.sin(), inplace=True)
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert_close(x.detach(), turned(before, torch.arange(5), angle))
    assert_close(turned(gradient, torch.arange(5), angle), torch.ones_like(gradient))  # the transpose is the inverse


def test_gradients_of_what_was_turned_in_place_wherever_it_is_read():
    angle = angles(4)
    waves = angle.cos(), angle.sin()
    leaf = torch.randn(2, 6, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    q, k, v = leaf.unbind(2)
    expected = torch.stack([turned(q, torch.arange(6), angle), turned(k, torch.arange(6), angle), v], 2)
    wanted = torch.autograd.grad(expected.square().prod(2).sum(), leaf)
    whole, parts = leaf.clone(), leaf.clone()
    apply_rotary_emb_qkv_(whole, *waves)
    for part in (0, 1):
        apply_rotary_emb(parts[:, :, part], *waves, inplace=True)
    for read in (whole, parts):
        assert_close(torch.autograd.grad(read.square().prod(2).sum(), leaf), wanted)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile reads it
@pytest.mark.parametrize("leaf", [False, True], ids=["", "leaf"])
def test_gradients_in_place_when_compiled(leaf):
    """For a tensor that the graph only changes, and for one that it makes."""
    angle = angles(4)
    of_keys = angles(4).requires_grad_()
    waves = angle.cos(), angle.sin(), of_keys.cos(), of_keys.sin()

    def step(x):
        return apply_rotary_emb_qkv_(x * 1 if leaf else x, *waves, seqlen_offsets=2)

    x = torch.randn(2, 6, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    dout = torch.randn_like(x)
    found = []
    for call in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        out = call(x if leaf else x * 1)
        found.append((out, *torch.autograd.grad(out, x, dout)))
    assert_close(found[1], found[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_gradients_of_the_compiled_module():
    module, x = RotaryEmbedding(8), torch.randn(2, 9, 3, 4, 8, requires_grad=True)
    dout = torch.randn_like(x)
    wanted, found = (
        torch.autograd.grad(call(x * 1), x, dout) for call in (module, torch.compile(module, backend="aot_eager"))
    )
    assert_close(found, wanted)


@pytest.mark.parametrize("changed", ["cos", "sin", "seqlen_offsets", "cu_seqlens"])
def test_what_backward_reads_again_must_not_change(changed):
    angle = angles(4)
    read = {"cos": angle.cos(), "sin": angle.sin(), "seqlen_offsets": torch.tensor([3, 0])}
    read["cu_seqlens"] = torch.tensor([0, 7, 9])
    x = torch.randn(9, 2, 8, dtype=torch.float64, requires_grad=True)
    out = apply_rotary_emb(x * 1, **read, max_seqlen=9, inplace=True)
    read[changed] += 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_tables_of_inference_mode_take_part_in_training():
    angle = angles(4)
    with torch.inference_mode():
        cos, sin = angle.cos(), angle.sin()
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(apply_rotary_emb(x * 1, cos, sin, inplace=True).sum(), x)
    assert_close(turned(gradient, torch.arange(5), angle), torch.ones_like(gradient))


@pytest.mark.parametrize("offsets", OFFSETS)
def test_packed_sequences(offsets):
    """The two tokens after the last sequence don't change."""
    angle, offset = angles(4), OFFSETS[offsets]
    starts = torch.tensor([0, 7, 9], dtype=torch.int32)
    x = torch.randn(11, 2, 8, dtype=torch.float64)
    first = torch.as_tensor(offset).expand(2)
    positions = torch.cat([first[0] + torch.arange(7), first[1] + torch.arange(2)])
    expected = torch.cat([turned(x[:9], positions, angle), x[9:]])
    named = {"cu_seqlens": starts, "max_seqlen": 7}
    assert_close(apply_rotary_emb(x, angle.cos(), angle.sin(), seqlen_offsets=offset, **named), expected)


def test_keys_and_queries_in_one_tensor():
    angle, of_keys = angles(4), angles(4)
    waves, key_waves = (angle.cos(), angle.sin()), (of_keys.cos(), of_keys.sin())
    positions = torch.arange(6) + 2
    leaf = torch.randn(2, 6, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    q, k, v = leaf.unbind(2)
    expected = torch.stack([turned(q, positions, angle), turned(k, positions, of_keys), v], 2)
    dout = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaf, dout)
    out = apply_rotary_emb_qkv_(leaf.clone(), *waves, *key_waves, seqlen_offsets=2)
    assert_close((out, *torch.autograd.grad(out, leaf, dout)), (expected, *wanted))
    heads = apply_rotary_emb_qkv_(leaf.detach().flatten(2, 3).clone(), *waves, *key_waves, False, 2, num_heads_q=4)
    assert_close(heads.unflatten(2, (3, 4)), expected.detach())
    kv = apply_rotary_emb_kv_(torch.stack([k, v], 2), *key_waves, seqlen_offsets=2)
    assert_close(kv, expected[:, :, 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_computed_in_float32_and_rounded_once(dtype):
    angle = angles(8)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    x = torch.randn(2, 9, 4, 16).to(dtype)
    expected = apply_rotary(x.float(), cos.float(), sin.float()).to(dtype)
    assert torch.equal(apply_rotary(x, cos, sin), expected)
    back = apply_rotary(expected, cos, sin, conjugate=True)
    assert (back - x).abs().max() <= 4 * torch.finfo(dtype).eps * x.abs().max()


def test_the_modules_angles_are_those_of_pyattns_modules():
    qkv = torch.randn(2, 30, 3, 4, 16)
    q, k, v = qkv.clone().unbind(2)
    first = torch.tensor([4, 4])
    module = RotaryEmbedding(16)
    out = module(qkv, seqlen_offset=4)
    assert out.data_ptr() == qkv.data_ptr()
    assert_close(out, torch.stack([rotate(q, 10000.0, first), rotate(k, 10000.0, first), v], 2))
    assert not module.state_dict()
    again, kv = module(q, torch.stack([k, v], 2), seqlen_offset=first, max_seqlen=64)
    assert_close(torch.cat([again[:, :, None], kv], 2), out)
    with refused(ValueError, "max_seqlen must be given where seqlen_offset is a tensor, got None"):
        RotaryEmbedding(16)(qkv, seqlen_offset=first)


def test_a_module_in_16_bits_keeps_exact_angles():
    module = RotaryEmbedding(16).bfloat16()
    module._update_cos_sin_cache(3000, dtype=torch.float32, device=torch.device("cpu"))
    exact = torch.arange(3000, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    assert_close(module._cos_cached, exact.cos().float(), rtol=0, atol=1e-3)


def test_an_argument_of_older_flash_attns():
    assert RotaryEmbedding(dim=8, base=500.0, pos_idx_in_fp32=True).base == 500.0
    with refused(NotImplementedError, "pos_idx_in_fp32 must be True, got False"):
        RotaryEmbedding(8, pos_idx_in_fp32=False)


def test_xpos_products_depend_on_distances_alone():
    """Scaling q up and k down by position leaves a factor of s^(distance / scale_base)."""
    module = RotaryEmbedding(8, scale_base=16.0)
    ones = torch.ones(1, 20, 3, 1, 8)
    q, k, v = module(ones.clone()).unbind(2)
    products = torch.einsum("bihd,bjhd->bij", q, k)[0]
    for distance in (0, 3, 11):
        diagonal = products.diagonal(-distance)
        assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert torch.equal(v, ones[:, :, 2])
    plain_q, plain_k, _ = RotaryEmbedding(8)(ones.clone()).unbind(2)
    assert_close(products.diagonal(), torch.einsum("bihd,bihd->bi", plain_q, plain_k)[0])
    assert products[15, 0].abs() < torch.einsum("hd,hd->", plain_q[0, 15], plain_k[0, 0]).abs()


def test_wrong_arguments_are_refused():
    x, cos = torch.randn(2, 9, 4, 16), torch.rand(12, 8)
    starts = torch.tensor([0, 5, 9], dtype=torch.int32)

    def wrong(error, message, x=x, cos=cos, sin=None, **options):
        with refused(error, message):
            apply_rotary_emb(x, cos, cos if sin is None else sin, **options)

    wrong(ValueError, "x must have shape (batch, seqlen, num_heads, head_dim), got (9, 4, 16)", x=x[0])
    wrong(ValueError, "cos must have shape (positions, rotary_dim / 2), got (1, 12, 8)", cos=cos[None])
    same = "cos and sin must have the same shape and at most head_dim / 2 = 8 columns, got (12, 8) and (11, 8)"
    wrong(ValueError, same, sin=cos[1:])
    wrong(ValueError, "cos and sin must have the same shape", cos=torch.rand(12, 9))
    have = "cos and sin must have all positions of x, [4, 13), got 12 positions"
    wrong(ValueError, have, seqlen_offsets=4)
    wrong(ValueError, have.replace("[4", "[0"), seqlen_offsets=torch.tensor([0, 4]))
    wrong(ValueError, have.replace("[4, 13", "[-1, 9"), seqlen_offsets=torch.tensor([-1, 0]))
    wrong(TypeError, "seqlen_offsets must be int32 or int64, got torch.float32", seqlen_offsets=torch.rand(2))
    wrong(ValueError, "seqlen_offsets must have shape (2,), got (3,)", seqlen_offsets=torch.arange(3))
    packed = x.flatten(0, 1)[:9]
    wrong(TypeError, "max_seqlen must be int", x=packed, cu_seqlens=starts)
    rise = "cu_seqlens must rise from 0 to at most 9 tokens, by at most max_seqlen=4, got [0, 5, 9]"
    wrong(ValueError, rise, x=packed, cu_seqlens=starts, max_seqlen=4)
    with refused(ValueError, "qkv must have num_heads_q=3 + 2 * num_heads_k heads, got 4"):
        apply_rotary_emb_qkv_(x, cos, cos, num_heads_q=3)
