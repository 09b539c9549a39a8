"""Promise: the functions below the public ones return lse and write gradients, as code for several ranks calls them."""

import math

import pytest
import torch
from support.assertions import refused
from torch.testing import assert_close

from pyattn.adapters.flash_attn import alias, flash_attn_func, flash_attn_varlen_func
from pyattn.adapters.flash_attn.hopper import flash_attn_combine
from pyattn.adapters.flash_attn.hopper import flash_attn_func as flash_attn_3_func


@pytest.fixture
def version_2():
    with alias():
        from flash_attn import flash_attn_interface

        yield flash_attn_interface


@pytest.fixture
def version_3():
    with alias():
        import flash_attn_interface

        yield flash_attn_interface


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


OPTIONS = {"softmax_scale": 0.3, "causal": True, "window_size_left": 4, "window_size_right": 0, "softcap": 2.0}


@pytest.mark.parametrize("slopes", [None, torch.rand(4)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_version_2(version_2, slopes, dropout_p):
    """Forward and backward by names that diffusers, ring-flash-attention and yunchang import."""
    q, k, v = drawn(2, 7, 4, 8), drawn(2, 5, 2, 8), drawn(2, 5, 2, 8)
    given = OPTIONS | {"dropout_p": dropout_p, "alibi_slopes": slopes}
    torch.manual_seed(3)
    out, lse, signed, state = version_2._wrapped_flash_attn_forward(
        q.detach(), k.detach(), v.detach(), return_softmax=dropout_p > 0, **given
    )
    torch.manual_seed(3)
    public = {name: value for name, value in given.items() if not name.startswith("window")} | {"window_size": (4, 0)}
    expected, of_lse, of_signed = flash_attn_func(q, k, v, return_attn_probs=True, **public)
    assert_close((out, lse, signed), (expected.detach(), of_lse.detach(), of_signed))
    dout = torch.randn_like(out)
    into = [torch.full_like(t, math.nan) for t in (q, k, v)]
    tensors = dout, q.detach(), k.detach(), v.detach(), out, lse
    sums = version_2._wrapped_flash_attn_backward(*tensors, *into, deterministic=False, rng_state=state, **given)
    assert_close(into, list(torch.autograd.grad(expected, (q, k, v), dout)))
    assert sums.shape == (2, 4, 128)
    assert_close(sums[:, :, :7].double(), (dout * out).sum(-1).mT, rtol=1e-5, atol=1e-5)


def test_ring_attention(version_2, version_3):
    """Two parts of the keys: their outs are merged by lse, and the backward of each part takes the merged ones."""
    q, k, v = drawn(2, 6, 4, 8), drawn(2, 9, 2, 8), drawn(2, 9, 2, 8)
    expected = flash_attn_3_func(q, k, v)
    dout = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    q, k, v = (t.detach() for t in (q, k, v))
    scale = 8**-0.5
    parts = [(k[:, :4], v[:, :4]), (k[:, 4:], v[:, 4:])]
    two = [version_2._flash_attn_forward(q, *kv, 0.0, scale, False, -1, -1, 0.0, None, False)[:2] for kv in parts]
    three = [version_3._flash_attn_forward(q, *kv, softmax_scale=scale)[:2] for kv in parts]
    assert_close(two, three)
    (out_a, lse_a), (out_b, lse_b) = three
    lse = torch.logaddexp(lse_a, lse_b)
    out = out_a * (lse_a - lse).exp().mT[..., None] + out_b * (lse_b - lse).exp().mT[..., None]
    assert_close(out, expected.detach())
    for module in (version_2, version_3):
        found_q, found_kv = torch.zeros_like(q), []
        for of_k, of_v in parts:
            dq, dk, dv = torch.empty_like(q), torch.empty_like(of_k), torch.empty_like(of_v)
            tensors = dout, q, of_k, of_v, out, lse
            if module is version_2:
                module._flash_attn_backward(*tensors, dq, dk, dv, 0.0, scale, False, -1, -1, 0.0, None, False)
            else:
                module._flash_attn_backward(*tensors, dq=dq, dk=dk, dv=dv, softmax_scale=scale)
            found_q += dq
            found_kv.append((dk, dv))
        dk, dv = (torch.cat(both, 1) for both in zip(*found_kv, strict=True))
        assert_close((found_q, dk, dv), wanted)


def test_packed_sequences(version_2, version_3):
    ends_q, ends_k = torch.tensor([0, 3, 3, 8], dtype=torch.int32), torch.tensor([0, 5, 7, 9], dtype=torch.int32)
    q, k, v = drawn(9, 4, 8), drawn(10, 2, 8), drawn(10, 2, 8)
    lengths = ends_q, ends_k, 5, 5
    expected, of_lse, _ = flash_attn_varlen_func(q, k, v, *lengths, causal=True, softcap=1.5, return_attn_probs=True)
    dout = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    q, k, v = (t.detach() for t in (q, k, v))
    out, lse, _, _ = version_2._flash_attn_varlen_forward(q, k, v, *lengths, 0.0, None, True, softcap=1.5)
    assert_close((out, lse), (expected.detach(), of_lse.detach()))
    named = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), lengths, strict=True))
    of_3, lse_3, *_ = version_3._flash_attn_forward(q, k, v, **named, causal=True, softcap=1.5)
    assert_close((of_3, lse_3), (out, lse.masked_fill(lse.isinf(), -math.inf)))
    into = [torch.full_like(t, math.nan) for t in (q, k, v)]
    version_2._flash_attn_varlen_backward(dout, q, k, v, out, lse, *into, *lengths, 0.0, None, True, softcap=1.5)
    assert_close(tuple(into), wanted)
    into = [torch.full_like(t, math.nan) for t in (q, k, v)]
    gradients = dict(zip(("dq", "dk", "dv"), into, strict=True))
    version_3._flash_attn_backward(dout, q, k, v, out, lse_3, **named, **gradients, is_causal=True, softcap=1.5)
    assert_close(tuple(into), wanted)


def test_version_3_of_a_cache(version_3):
    q, caches = torch.randn(2, 2, 4, 8), torch.randn(2, 3, 20, 2, 8)
    k, v = torch.randn(2, 2, 2, 2, 8).unbind()
    used, copies = torch.tensor([3, 9], dtype=torch.int32), caches.clone()
    rows = torch.tensor([2, 0], dtype=torch.int32)
    expected = version_3.flash_attn_with_kvcache(
        q,
        *copies,
        k,
        v,
        cache_seqlens=used,
        cache_batch_idx=rows,
        causal=True,
        attention_chunk=4,
        return_softmax_lse=True,
    )
    found = version_3._flash_attn_forward(
        q, *caches, k, v, seqused_k=used, kv_batch_idx=rows, causal=True, attention_chunk=4
    )
    assert_close(found, expected)
    assert_close(caches, copies)


def test_version_3_writes_to_out(version_3):
    """out_ by its name, by the name that it had up to 2.8.3, and the window as it was there."""
    q, k, v = torch.randn(3, 2, 6, 2, 8).unbind()
    expected = flash_attn_3_func(q, k, v, window_size=(2, 1))
    for named in ({"window_size_left": 2, "window_size_right": 1}, {"window_size": (2, 1)}):
        for name in ("out_", "out"):
            into = torch.full_like(q, math.nan)
            out, *_ = version_3._flash_attn_forward(q, k, v, **named, **{name: into})
            assert out is into
            assert_close(into, expected)
    with refused(ValueError, "out must be torch.float32 of shape (2, 6, 2, 8), without gradients, got torch.float16"):
        version_3._flash_attn_forward(q, k, v, out=q.half())


def test_gradients_of_version_3(version_3):
    q, k, v = drawn(2, 6, 2, 8), drawn(2, 6, 2, 8), drawn(2, 6, 2, 8)
    out, *_ = version_3._flash_attn_forward(q, k, v, causal=True)
    assert_close(
        torch.autograd.grad(out.sum(), q), torch.autograd.grad(flash_attn_3_func(q, k, v, causal=True).sum(), q)
    )


def test_combining_parts():
    outs, lses = torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 5, 4)
    lses[0, 0, 0], outs[0, 0, 0] = -math.inf, math.nan  # a part without keys
    lses[:, 1, 1], outs[:, 1, 1] = -math.inf, 0.0  # no key at all
    lse = lses.double().exp().sum(0).log()
    weights = (lses.double() - lse).exp().nan_to_num(0.0)[..., None]
    expected = (weights * outs.double().nan_to_num(0.0)).sum(0)
    out, of_lse = flash_attn_combine(outs, lses)
    assert_close((out.double(), of_lse.double()), (expected, lse), rtol=1e-5, atol=1e-5)
    into = torch.empty(2, 5, 4, 8, dtype=torch.bfloat16)
    assert flash_attn_combine(outs, lses, out=into, out_dtype=torch.bfloat16)[0] is into
    assert_close(into, out.bfloat16())
    with refused(ValueError, "lse_partial must have shape (3, 2, 5, 4), got (3, 2, 4, 5)"):
        flash_attn_combine(outs, lses.mT)
    with refused(TypeError, "out_partial must be float32, got torch.float64"):
        flash_attn_combine(outs.double(), lses)


def test_refusals(version_2, version_3):
    x, ends = torch.zeros(2, 4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    lse = torch.zeros(2, 2, 4)
    with refused(ValueError, "rng_state must be that of the forward, got None with dropout_p 0.5"):
        version_2._flash_attn_backward(x, x, x, x, x, lse, None, None, None, 0.5, None, False)
    with refused(ValueError, "softmax_lse must have shape (2, 2, 4), got (2, 2, 3)"):
        version_2._flash_attn_backward(x, x, x, x, x, lse[..., :3], None, None, None, 0.0, None, False)
    with refused(ValueError, "dk must have shape (2, 4, 2, 8), got (2, 4, 1, 8)"):
        version_3._flash_attn_backward(x, x, x, x, x, lse, dk=x[:, :, :1])
    with refused(NotImplementedError, "the backward takes no sequed_q and no sequed_k, got one of them"):
        version_3._flash_attn_backward(x, x, x, x, x, lse, sequed_k=ends)
    with refused(NotImplementedError, "_flash_attn_varlen_forward takes no dropout_p, got 0.1"):
        version_2._flash_attn_varlen_forward(x[0], x[0], x[0], ends, ends, 4, 4, 0.1, None, True)
    with refused(NotImplementedError, "a cache takes no cu_seqlens_k and no seqused_q, got one of them"):
        version_3._flash_attn_forward(x, x, x, k_new=x, v_new=x, cu_seqlens_k=ends)
    with refused(ValueError, "cu_seqlens_q and cu_seqlens_k must be given together, got no cu_seqlens_k"):
        version_3._flash_attn_backward(x[0], x[0], x[0], x[0], x[0], lse[0], cu_seqlens_q=ends)
