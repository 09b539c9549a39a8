"""FlashAttention 3's functions over a batch: flash_attn_func and flash_attn_qkvpacked_func."""

import torch
from torch import Tensor

from pyattn import attention
from pyattn.adapters.flash_attn.arguments import Window, WrongValueError, check_batch, named
from pyattn.adapters.flash_attn.hopper.arguments import Descales, check_hints, chunk_of, prepared
from pyattn.adapters.flash_attn.hopper.results import Results, check_caller
from pyattn.options import UNBOUNDED
from pyattn.options.checks import check_size, check_tensor, check_type


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Results:
    """:func:`pyattn.attention` in FlashAttention 3's layout and under its names.

    The causal mask and the window are aligned bottom-right, as in :func:`pyattn.adapters.flash_attn.flash_attn_func`.
    A chunk hides all keys of other chunks::

        Sq = Sk = 5, causal, attention_chunk 2      1 0 0 0 0
                                                    1 1 0 0 0
                                                    0 0 1 0 0
                                                    0 0 1 1 0
                                                    0 0 0 0 1
    Args:
        q: (B, Sq, Hq, D), any strides.
        k, v: (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv), Hq a multiple of Hkv.
        softmax_scale: factor on the scores; default ``1 / sqrt(D)``, with qv ``1 / sqrt(D + Dv)``.
        causal: whether a query sees no key after its own position.
        qv: (B, Sq, Hq, Dv): the scores are ``softmax_scale * (<q, k> + <qv, v>)``. k and v are copied.
        q_descale, k_descale, v_descale: (B, Hkv) float32, the factors of q, k and v in float8_e4m3fn. Scores are then
            in float32 and out is bfloat16. In any other dtype, all of them must be 1.
        window_size: (left, right), how many keys before and after its own position a query sees; below 0: all.
        attention_chunk: a query at key position p sees the keys of its chunk, ``p // attention_chunk``; 0: no chunks.
        softcap: bound on the scaled scores; 0: no bound.
        num_splits, pack_gqa, sm_margin: hints for a GPU; the results do not depend on them.
        deterministic: has no effect; backward is always deterministic.
        return_attn_probs: also return softmax_lse.

    Returns:
        ``out`` (B, Sq, Hq, Dv), or ``(out, softmax_lse)``. softmax_lse is (B, Hq, Sq), float32 (float64 for float64),
        differentiable, -inf for a query that sees no key, whose out is 0. Before July 2025 FlashAttention 3 returned
        both in any case: ``enable(fa3_returns_lse=True)``.

    Raises:
        ValueError, TypeError, NotImplementedError: as for :func:`pyattn.attention`; descales other than 1 outside of
            float8; gradients of float8, or qv with it.
        TypeError: the calling line takes element 0 of out or unpacks it, as code for older versions does.

    Gradients reach q, k, v and qv, also with attention_chunk and softcap, where FlashAttention 3 has none. float32,
    float64 and any head dimension work.

    Source: Shah et al. 2024, "FlashAttention-3".

    >>> q, k, v = torch.randn(3, 2, 10, 4, 64).unbind()
    >>> flash_attn_func(q, k, v, causal=True, attention_chunk=4).shape
    torch.Size([2, 10, 4, 64])
    """
    if not return_attn_probs:
        check_caller("flash_attn_func")
    check_type("return_attn_probs", return_attn_probs, bool)
    check_hints(num_splits, pack_gqa, sm_margin)
    scores = softmax_scale, causal, window_size, softcap, deterministic
    out, lse = attend(q, k, v, qv, Descales(q_descale, k_descale, v_descale), attention_chunk, *scores)
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Results:
    """:func:`flash_attn_func` of q, k and v in one tensor, read in place.

    qkv is (B, S, 3, H, D), or (B, S, num_heads_q + 2 Hkv, D), which needs ``num_heads_q``.
    """
    if not return_attn_probs:
        check_caller("flash_attn_qkvpacked_func")
    check_tensor("qkv", qkv)
    heads = 0 if num_heads_q is None else qkv.shape[-2] - num_heads_q
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif qkv.dim() == 4 and num_heads_q is not None and num_heads_q >= 0 and heads >= 0 and heads % 2 == 0:
        q, k, v = qkv.split([num_heads_q, heads // 2, heads // 2], 2)
    else:
        raise WrongValueError(
            "pyattn: qkv must have shape (batch, seqlen, 3, num_heads, head_dim), or (batch, seqlen, num_heads_q + "
            f"2 * num_heads_k, head_dim) with num_heads_q, got {tuple(qkv.shape)} and num_heads_q={num_heads_q}"
        )
    check_type("return_attn_probs", return_attn_probs, bool)
    check_hints(1, None, sm_margin)
    scores = softmax_scale, causal, window_size, softcap, deterministic
    out, lse = attend(q, k, v, None, Descales(q_descale, k_descale, v_descale), attention_chunk, *scores)
    return (out, lse) if return_attn_probs else out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    descales: Descales,
    attention_chunk: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    deterministic: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out, softmax_lse)`` of :func:`flash_attn_func`, with a sink for each head if given."""
    options = named(0.0, softmax_scale, causal, window_size, softcap, None, deterministic)
    check_batch(q, k, v)
    inputs = prepared(q, k, v, qv, descales, q.shape[0])
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    check_size("attention_chunk", attention_chunk)
    if attention_chunk:
        position = torch.arange(seqlen_q, device=q.device) + (seqlen_k - seqlen_q)
        options["key_ranges"] = chunk_of(position, attention_chunk, seqlen_k, seqlen_q + seqlen_k)[None]
    heads = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
    out, lse = attention(*heads, return_lse=True, sinks=sinks, **options)
    return inputs.result(out.transpose(1, 2)), lse
