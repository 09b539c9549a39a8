"""Promise: flash-attn's functions over batches and packed sequences give the results that it documents."""

import functools
import math

import pytest
import torch
from support import assertions
from support.adapters.flash_attn import plain
from support.adapters.gradients import with_gradients
from support.cases import DTYPES, Case, assert_case_accurate
from torch.testing import assert_close

from pyattn import dropout_mask, reference
from pyattn.adapters.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

CASES = [
    Case(2, 4, 4, 33, 33, 24, 24, causal=False),
    Case(1, 6, 2, 20, 70, 40, 40, window=(9, 3), softcap=20.0),
    Case(2, 4, 1, 70, 20, 33, 17, window=(5, -1), softmax_scale=0.3),
    Case(2, 3, 3, 65, 65, 64, 64, causal=False, window=(7, 4), alibi="bh", wide=True),
    Case(2, 4, 2, 40, 64, 300, 300, alibi="h", wide=True),
]


def called(options):
    """The options of pyattn.attention under flash-attn's names, and that all results are wanted."""
    renamed = {"window": "window_size"}
    own = {renamed.get(name, name): value for name, value in options.items() if name != "q_offset"}
    return own | {"return_attn_probs": True}


def heads_first(results):
    out, lse, _ = results
    return out.transpose(1, 2), torch.where(lse == math.inf, -math.inf, lse)


def of_batch(q, k, v, return_lse, **options):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if q.shape == k.shape == v.shape:
        return heads_first(flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **called(options)))
    if k.shape == v.shape:
        return heads_first(flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **called(options)))
    return heads_first(flash_attn_func(q, k, v, **called(options)))


def of_packed(q, k, v, return_lse, **options):
    batch, _, seqlen_q, _ = q.shape
    seqlen_k = k.shape[2]
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    starts_q, starts_k = (torch.arange(batch + 1, dtype=torch.int32) * n for n in (seqlen_q, seqlen_k))
    options = called(options)
    if q.shape == k.shape == v.shape and seqlen_q == seqlen_k:
        results = flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 1), starts_q, seqlen_q, **options)
    elif k.shape == v.shape:
        kv = torch.stack([k, v], 1)
        results = flash_attn_varlen_kvpacked_func(q, kv, starts_q, starts_k, seqlen_q, seqlen_k, **options)
    else:
        results = flash_attn_varlen_func(q, k, v, starts_q, starts_k, seqlen_q, seqlen_k, **options)
    out, lse, probabilities = results
    assert probabilities.shape == (0,)
    out, lse = out.unflatten(0, (batch, seqlen_q)), lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)
    return heads_first((out, lse, None))


@pytest.mark.parametrize("attend", [of_batch, of_packed])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_accurate(case, dtype, attend):
    assert_case_accurate(case, dtype, attend)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(12, 12), (5, 20), (20, 5), (1, 9), (9, 1)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window_size": (3, 5)},
        {"window_size": (2, 1)},
        {"window_size": (-1, 2), "softcap": 1.5},
        {"window_size": (4, -1), "alibi_slopes": torch.tensor([[0.1, 0.5, 0.2, 0.0], [1.0, 0.3, 0.7, 0.4]])},
    ],
    ids=str,
)
def test_the_documented_formula(options, seqlen_q, seqlen_k):
    qkv = torch.randn(2, seqlen_q, 4, 8).double(), *torch.randn(2, 2, seqlen_k, 2, 8).double()
    ours, expected = (
        with_gradients(lambda *qkv, f=function: f(*qkv, **options)[:2], *qkv)
        for function in (functools.partial(flash_attn_func, return_attn_probs=True), plain)
    )
    assertions.assert_close(ours, expected)


def test_queries_that_see_no_key():
    """As in flash-attn, out is 0 and lse +inf, whether the keys are masked or there are none."""
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    for seqlen_k, empty in ((2, 2), (0, 4)):
        k, v = torch.randn(2, 1, seqlen_k, 2, 8)
        out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        assert out[:, :empty].count_nonzero() == 0
        assert lse[..., :empty].isposinf().all()
        assert lse[..., empty:].isfinite().all()
        (gradient,) = torch.autograd.grad((out.sum() + lse[..., empty:].sum()), q)
        assert gradient[:, :empty].count_nonzero() == 0
        assert gradient.isfinite().all()


def test_sequences_of_any_length():
    lengths_q, lengths_k = [3, 0, 17, 1, 5], [3, 4, 30, 1, 0]
    starts_q, starts_k = (torch.tensor([0, *n]).cumsum(0, dtype=torch.int32) for n in (lengths_q, lengths_k))
    q = torch.randn(28, 4, 8, dtype=torch.float64)  # the last two belong to no sequence
    kv = torch.randn(38, 2, 2, 8, dtype=torch.float64)
    packing = starts_q, starts_k, 17, 30
    options = {"causal": True, "softcap": 3.0, "alibi_slopes": torch.rand(5, 4)}

    def ours(q, kv):
        window = {"window_size": (8, -1)}
        return flash_attn_varlen_kvpacked_func(q, kv, *packing, return_attn_probs=True, **window, **options)[:2]

    def expected(q, kv):
        out, lse = reference.attention_varlen(q, *kv.unbind(1), *packing, window=(8, -1), return_lse=True, **options)
        return out, torch.where(lse == -math.inf, math.inf, lse)

    assertions.assert_close(with_gradients(ours, q, kv), with_gradients(expected, q, kv))


def test_pages():
    starts_q = torch.tensor([0, 2, 5], dtype=torch.int32)
    starts_k = torch.tensor([0, 20, 53], dtype=torch.int32)
    table = torch.tensor([[3, 1, -7], [0, 4, 2]], dtype=torch.int32)
    q, (k, v) = torch.randn(5, 4, 8), torch.randn(2, 5, 16, 2, 8)
    keys, values = (torch.cat([t[[3, 1]].flatten(0, 1)[:20], t[[0, 4, 2]].flatten(0, 1)[:33]]) for t in (k, v))
    paged = flash_attn_varlen_func(q, k, v, starts_q, starts_k, 3, 33, causal=True, block_table=table)
    assert_close(paged, flash_attn_varlen_func(q, keys, values, starts_q, starts_k, 3, 33, causal=True))


def test_results_have_flash_attns_shapes_and_dtypes():
    qkv = torch.randn(2, 10, 3, 4, 24, dtype=torch.bfloat16, requires_grad=True)
    out, lse, probabilities = flash_attn_qkvpacked_func(qkv, return_attn_probs=True)
    assert out.shape == (2, 10, 4, 24)
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous()
    assert lse.shape == (2, 4, 10)
    assert lse.dtype == torch.float32
    assert probabilities.shape == (0,)
    assert probabilities.dtype == torch.bfloat16
    alone = flash_attn_qkvpacked_func(qkv)
    assert torch.equal(alone, out)
    (gradient,) = torch.autograd.grad(alone, qkv, torch.ones(1, dtype=torch.bfloat16).expand_as(alone))
    assert gradient.shape == qkv.shape
    assert gradient.dtype == torch.bfloat16
    assert (gradient.abs().amax((0, 1, 3, 4)) > 0).all()


def test_windows_as_flash_attn_takes_them():
    q, k, v = torch.randn(3, 1, 9, 2, 8).unbind()
    expected = flash_attn_func(q, k, v, window_size=(2, 1))
    for window in ([2, 1], torch.tensor([2, 1])):
        assert torch.equal(flash_attn_func(q, k, v, window_size=window), expected)
    assert torch.equal(flash_attn_func(q, k, v, window_size=(-5, -2)), flash_attn_func(q, k, v))


def test_s_dmask_is_the_softmax_with_dropouts_choice_in_its_signs():
    qkv = torch.randn(2, 150, 4, 8).double(), *torch.randn(2, 2, 130, 2, 8).double()
    options = {"dropout_p": 0.25, "causal": True, "window_size": (60, 0), "softcap": 5.0}
    ours = with_gradients(lambda *qkv: flash_attn_func(*qkv, return_attn_probs=True, **options), *qkv)
    signed = ours[2]
    assert signed.shape == (2, 4, 256, 256)
    assert signed[:, :, 150:].count_nonzero() == signed[..., 130:].count_nonzero() == 0
    signed = signed[:, :, :150, :130]
    out, _, weights, *grads = with_gradients(lambda *qkv: plain(*qkv, signed >= 0, **options), *qkv)
    assert_close((ours[0], signed.abs(), *ours[3:]), (out, weights, *grads), rtol=1e-10, atol=1e-12)
    dropped = (signed < 0).sum() / (weights > 0).sum()
    assert abs(dropped - 0.25) < 0.02


def test_s_dmask_of_packed_sequences():
    lengths = [5, 0, 140]
    starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    qkv, slopes = torch.randn(145, 3, 2, 8, dtype=torch.float64), torch.rand(3, 2)
    out, _, signed = flash_attn_varlen_qkvpacked_func(
        qkv, starts, 140, 0.5, causal=True, alibi_slopes=slopes, return_attn_probs=True
    )
    assert signed.shape == (3, 2, 256, 256)
    for b, (first, last) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        rows = slice(last - first)
        kept, slope = signed[b : b + 1, :, rows, rows] >= 0, slopes[b : b + 1]
        q, k, v = qkv[None, first:last].unbind(2)
        expected, _, weights = plain(q, k, v, kept, 0.5, causal=True, alibi_slopes=slope)
        assert_close(out[None, first:last], expected, rtol=1e-10, atol=1e-12)
        assert_close(signed[b : b + 1, :, rows, rows].abs(), weights, rtol=1e-10, atol=1e-12)
        assert signed[b].count_nonzero() == weights.count_nonzero()


def test_dropout_follows_torchs_generator():
    q, k, v = torch.randn(3, 1, 40, 2, 8).unbind()
    runs = []
    for probabilities in (False, True):
        torch.manual_seed(7)
        runs.append(flash_attn_func(q, k, v, 0.3, return_attn_probs=probabilities))
    assert torch.equal(runs[0], runs[1][0])
    assert not torch.equal(runs[0], flash_attn_func(q, k, v, 0.3))
    torch.manual_seed(7)
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64)
    kept = dropout_mask(seed, 1, 2, 40, 40, 0.3)
    assert torch.equal(kept, runs[1][2][:, :, :40, :40] >= 0)
