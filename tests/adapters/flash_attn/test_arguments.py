"""Promise: flash-attn's signatures are kept, wrong arguments are refused, and the functions run under a compiler."""

import inspect

import torch
from support.adapters.gradients import with_gradients
from support.assertions import refused
from torch.testing import assert_close

from pyattn import attention_varlen
from pyattn.adapters import flash_attn
from pyattn.adapters.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)


def test_wrong_arguments_of_a_batch():
    q, k, v = torch.randn(3, 2, 9, 2, 8).unbind()

    def wrong(error, message, q=q, k=k, v=v, **options):
        with refused(error, message):
            flash_attn_func(q, k, v, **options)

    shape = "q must have shape (batch, seqlen, num_heads, head_dim), got (9, 2, 8)"
    wrong(ValueError, shape, q=q[0])
    shapes = "q, k and v must have shapes (B, Sq, Hq, D), (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv), got "
    wrong(RuntimeError, shapes + "(2, 9, 2, 8), (1, 9, 2, 8) and (1, 9, 2, 8)", k=k[:1], v=v[:1])
    wrong(ValueError, shapes + "(2, 9, 2, 8), (2, 9, 2, 8) and (2, 8, 2, 8)", v=v[:, 1:])
    wrong(ValueError, shapes + "(2, 9, 2, 8), (2, 9, 2, 7) and (2, 9, 2, 8)", k=k[..., 1:])
    wrong(TypeError, "k must be Tensor, got None", k=None)
    wrong(ValueError, "num_heads_q must be a multiple", k=torch.randn(2, 9, 3, 8), v=torch.randn(2, 9, 3, 8))
    wrong(TypeError, "", k=k.half())
    wrong(ValueError, "dropout_p must be", dropout_p=1.0)
    wrong(ValueError, "softcap must be finite and at least 0, got -1.0", softcap=-1.0)
    wrong(TypeError, "deterministic must be bool, got 1", deterministic=1)
    wrong(TypeError, "causal must be bool, got None", causal=None)
    for window, shown in ((3, "3"), ((1, 2, 3), "(1, 2, 3)"), ((0.5, 1), "(0.5, 1)"), (None, "None")):
        pair = f"window_size must be a pair of ints (left, right), got {shown}"
        wrong(TypeError, pair, window_size=window)
    slopes = torch.rand(2, dtype=torch.float16)
    wrong(TypeError, "alibi_slopes must be float32, got torch.float16", alibi_slopes=slopes)
    wrong(ValueError, "alibi_slopes must", alibi_slopes=torch.rand(3))
    wrong(TypeError, "alibi_slopes must be Tensor, got 0.5", alibi_slopes=0.5)
    qkv = "qkv must have shape (batch, seqlen, 3, num_heads, head_dim), got (2, 9, 2, 2, 8)"
    with refused(ValueError, qkv):
        flash_attn_qkvpacked_func(torch.stack([q, k], 2))
    kv = "kv must have shape (batch, seqlen, 2, num_heads, head_dim), got (2, 9, 2, 8)"
    with refused(ValueError, kv):
        flash_attn_kvpacked_func(q, k)


def test_wrong_arguments_of_packed_sequences():
    q, k, v = torch.randn(3, 9, 2, 8).unbind()
    starts, table = torch.tensor([0, 4, 9], dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)

    def wrong(error, message, cu_seqlens_q=starts, max_seqlen_q=5, **options):
        lengths = cu_seqlens_q, starts, max_seqlen_q, 5
        with refused(error, message):
            flash_attn_varlen_func(q, k, v, *lengths, **options)

    wrong(TypeError, "cu_seqlens_q must be int32, got torch.int64", starts.long())
    wrong(TypeError, "cu_seqlens_q must be Tensor, got [0, 4, 9]", [0, 4, 9])
    wrong(TypeError, "block_table must be int32, got torch.int64", block_table=table.long())
    wrong(ValueError, "max_seqlen_q must be", max_seqlen_q=4)
    pages = "return_attn_probs with dropout_p does not take a block_table, got dropout_p=0.1 and"
    wrong(NotImplementedError, pages, dropout_p=0.1, return_attn_probs=True, block_table=table)
    qkv = "qkv must have shape (total, 3, num_heads, head_dim), got (9, 2, 2, 8)"
    with refused(ValueError, qkv):
        flash_attn_varlen_qkvpacked_func(torch.stack([q, k], 1), starts, 5)
    kv = "kv must have shape (total_k, 2, num_heads, head_dim), got (9, 2, 8)"
    with refused(ValueError, kv):
        flash_attn_varlen_kvpacked_func(q, k, starts, starts, 5, 5)


def test_signatures_are_flash_attns():
    """The scales of a cache in 8 bits, which FlashAttention 2 does not read, follow its last argument."""
    scores = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    scores += "deterministic=False, return_attn_probs=False"
    lengths = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
    expected = {
        "flash_attn_func": f"q, k, v, {scores}",
        "flash_attn_qkvpacked_func": f"qkv, {scores}",
        "flash_attn_kvpacked_func": f"q, kv, {scores}",
        "flash_attn_varlen_func": f"q, k, v, {lengths}, {scores}, block_table=None",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {scores}",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {lengths}, {scores}",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
        "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False, k_descale=None, v_descale=None",
    }
    for name, text in expected.items():
        parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
        shown = (p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters)
        assert ", ".join(shown) == text


def test_under_a_compiler():
    q, kv = torch.randn(2, 12, 4, 8), torch.randn(2, 12, 2, 2, 8)
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)

    def both(q, kv):
        whole = flash_attn_kvpacked_func(q, kv, causal=True, window_size=(4, 0))
        packed = flash_attn_varlen_func(q[0], kv[0, :, 0], kv[0, :, 1], starts, starts, 7, 7, causal=True)
        return torch.cat([whole, packed.square()[None]])

    compiled = torch.compile(both, fullgraph=True, backend="eager")
    assert_close(with_gradients(both, q, kv), with_gradients(compiled, q, kv))


def test_same_as_pyattns_own_packed_sequences():
    qkv = torch.randn(9, 3, 2, 8)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    ours = attention_varlen(*qkv.unbind(1), starts, starts, 5, 5)
    assert torch.equal(flash_attn_varlen_qkvpacked_func(qkv, starts, torch.tensor(5), causal=True), ours)
