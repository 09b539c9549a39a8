"""Promise: FlashAttention 4's functions compute its formulas, with a learnable sink and its gradient."""

import inspect

import pytest
import torch
from support.adapters.hopper import batched, plain
from support.assertions import refused
from torch.testing import assert_close

from pyattn.adapters.flash_attn import alias
from pyattn.adapters.flash_attn.cute import flash_attn_func, flash_attn_varlen_func


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "softcap": 2.0}, {"window_size": (3, 1)}, {"window_size": (2, None)}]
)
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("qv", [False, True])
def test_a_batch(options, sink, qv):
    q, k, v = drawn(2, 5, 4, 8), drawn(2, 7, 2, 8), drawn(2, 7, 2, 6)
    leaves = {"q": q, "k": k, "v": v}
    leaves |= {"qv": drawn(2, 5, 4, 6)} if qv else {}
    leaves |= {"learnable_sink": drawn(4)} if sink else {}
    found = flash_attn_func(**leaves, **options)
    window = tuple(-1 if bound is None else bound for bound in options.get("window_size", (None, None)))
    expected = batched(
        q, k, v, leaves.get("qv"), sink=leaves.get("learnable_sink"), **options | {"window_size": window}
    )
    assert_close(found, expected)
    weights = [torch.randn_like(x) for x in found]
    gradients = [
        torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, results, strict=True)), list(leaves.values()))
        for results in (found, expected)
    ]
    assert_close(*gradients)


def test_packed_and_paged():
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    q, k, v, sink = drawn(6, 4, 8), drawn(6, 2, 8), drawn(6, 2, 8), drawn(4)
    out, lse = flash_attn_varlen_func(q, k, v, None, ends, ends, causal=True, learnable_sink=sink)
    expected = [plain(q[i:j], k[i:j], v[i:j], causal=True, sink=sink) for i, j in ((0, 2), (2, 6))]
    assert_close((out, lse), (torch.cat([o for o, _ in expected]), torch.cat([x for _, x in expected], 1)))
    pages = torch.randn(2, 4, 16, 2, 8, dtype=torch.float64)
    table, used = torch.tensor([[2, 1], [0, 3]], dtype=torch.int32), torch.tensor([20, 7], dtype=torch.int32)
    out, lse = flash_attn_varlen_func(
        q, *pages, cu_seqlens_q=ends, seqused_k=used, page_table=table, causal=True, window_size=(5, None)
    )
    for (i, j), rows, n in zip(((0, 2), (2, 6)), table, used, strict=True):
        keys, values = (store[rows].flatten(0, 1)[:n] for store in pages)
        assert_close((out[i:j], lse[:, i:j]), plain(q[i:j], keys, values, causal=True, window_size=(5, -1)))


def test_signatures():
    """The order of flash-attention's flash_attn/cute/interface.py, of August 2026."""
    expected = "q k v qv gather_kv_indices softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa "
    expected += "deterministic score_mod score_mod_bwd mask_mod aux_tensors aux_scalars block_sparse_tensors "
    assert " ".join(inspect.signature(flash_attn_func).parameters) == expected + "block_sparse_tensors_bwd return_lse"
    expected = "q k v qv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_k seqused_q seqused_k "
    expected += (
        "gather_kv_indices page_table softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa "
    )
    expected += (
        "deterministic score_mod score_mod_bwd mask_mod block_sparse_tensors aux_tensors aux_scalars return_lse "
    )
    expected += "scheduler_metadata seqlen_k_per_split disable_scheduler_metadata"
    assert " ".join(inspect.signature(flash_attn_varlen_func).parameters) == expected
    with alias():
        from flash_attn.cute import flash_attn_func as one
        from flash_attn.cute.interface import flash_attn_varlen_func as other

    assert (one, other) == (flash_attn_func, flash_attn_varlen_func)


def test_refusals():
    x = torch.zeros(1, 4, 2, 8)
    with refused(NotImplementedError, "score_mod must be None, got function; see pyattn.adapters.flex"):
        flash_attn_func(x, x, x, score_mod=lambda score: score)
    with refused(NotImplementedError, "gather_kv_indices must be None, got Tensor; see pyattn.adapters.flex"):
        flash_attn_varlen_func(x, x, x, gather_kv_indices=torch.zeros(1, 4, 2))
    with refused(NotImplementedError, "window_size must have None in place of a negative bound, got (-1, 0)"):
        flash_attn_func(x, x, x, window_size=(-1, 0))
    with refused(ValueError, "learnable_sink must have shape (num_heads,), got (1, 2)"):
        flash_attn_func(x, x, x, learnable_sink=torch.zeros(1, 2))
    with refused(ValueError, "a page_table needs seqused_k and no cu_seqlens_k, got neither"):
        flash_attn_varlen_func(x, x, x, page_table=torch.zeros(1, 1, dtype=torch.int32))
