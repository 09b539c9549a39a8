"""Attention over packed sequences: flash_attn_varlen_func and its packed forms."""

from torch import Tensor

from pyattn import attention_varlen
from pyattn.adapters.flash_attn import probabilities
from pyattn.adapters.flash_attn.arguments import (
    Window,
    check_dimensions,
    check_int32,
    longest,
    named,
    with_inf,
)
from pyattn.adapters.flash_attn.probabilities import Results
from pyattn.options import UNBOUNDED
from pyattn.options.checks import check_tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Results:
    """:func:`pyattn.attention_varlen` under flash-attn 2's names.

    Each sequence is masked as :func:`flash_attn_func` masks a batch, and does not see the others.

    Args:
        q: (total_q, Hq, D), any strides.
        k, v: (total_k, Hkv, D) and (total_k, Hkv, Dv); with block_table, (pages, page_size, Hkv, D or Dv).
        cu_seqlens_q, cu_seqlens_k: (B + 1,), int32, where each sequence begins.
        max_seqlen_q, max_seqlen_k: upper bounds on the lengths of the sequences.
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs: as for
            :func:`flash_attn_func`.
        alibi_slopes: (Hq,) or (B, Hq), float32.
        block_table: (B, pages of a sequence), int32, the pages of each sequence; page_size at least 16.

    Returns:
        ``out`` (total_q, Hq, Dv), or ``(out, softmax_lse, S_dmask)``: softmax_lse is (Hq, total_q), S_dmask (B, Hq,
        max_seqlen_q, max_seqlen_k) with the last two rounded up to multiples of 128, or of shape (0,) without dropout.

    Raises:
        ValueError, TypeError, NotImplementedError: as for :func:`pyattn.attention_varlen`; cu_seqlens or a block_table
            that is not int32; S_dmask with a block_table.

    >>> q, k, v = torch.randn(3, 30, 4, 64).unbind()
    >>> cu_seqlens = torch.tensor([0, 10, 30], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 20, 20, causal=True).shape
    torch.Size([30, 4, 64])
    """
    options = named(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    check_tensor("q", q)
    check_int32("cu_seqlens_q", cu_seqlens_q)
    check_int32("cu_seqlens_k", cu_seqlens_k)
    if block_table is not None:
        check_int32("block_table", block_table)
        if return_attn_probs and options["dropout_p"]:
            raise NotImplementedError(
                "pyattn: return_attn_probs with dropout_p does not take a block_table, "
                f"got dropout_p={options['dropout_p']} and a block_table of shape {tuple(block_table.shape)}"
            )
    sizes = longest("max_seqlen_q", max_seqlen_q), longest("max_seqlen_k", max_seqlen_k)
    packing = cu_seqlens_q, cu_seqlens_k, *sizes
    if not return_attn_probs:
        alone: Tensor = attention_varlen(q, k, v, *packing, block_table=block_table, **options)
        return alone
    options["dropout_seed"] = probabilities.seed_for(q, options["dropout_p"])
    out, lse = attention_varlen(q, k, v, *packing, block_table=block_table, return_lse=True, **options)
    return out, with_inf(lse), probabilities.signed_packed(q, k, *packing, options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """:func:`flash_attn_varlen_func` of q, k and v in one tensor, read in place: qkv (total, 3, H, D)."""
    check_dimensions("qkv", qkv, "total, 3, num_heads, head_dim")
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    scores = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    rest = *lengths, *scores, deterministic, return_attn_probs
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *rest)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """:func:`flash_attn_varlen_func` of k and v in one tensor, read in place: kv (total_k, 2, Hkv, D)."""
    check_dimensions("kv", kv, "total_k, 2, num_heads, head_dim")
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    scores = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    rest = *lengths, *scores, deterministic, return_attn_probs
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *rest)
