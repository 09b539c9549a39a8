"""FlashAttention 3's functions below the public ones, which code for several ranks calls: forward and backward."""

from typing import Any

from torch import Tensor

from pyattn.adapters.flash_attn.arguments import WrongValueError, check_together
from pyattn.adapters.flash_attn.backward import backward, backward_packed
from pyattn.adapters.flash_attn.hopper import dense, varlen
from pyattn.adapters.flash_attn.hopper.arguments import Descales, check_hints
from pyattn.adapters.flash_attn.hopper.kv_cache import flash_attn_with_kvcache
from pyattn.options.checks import check_tensor


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    window_size: tuple[int, int] | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(out, softmax_lse, out_accum, softmax_lse_accum)`` of any of the calls, the last two empty.

    With k_new, page_table, kv_batch_idx, leftpad_k or a rotary embedding, it is :func:`flash_attn_with_kvcache`, which
    records no gradient; with cu_seqlens or seqused, :func:`flash_attn_varlen_func`; else :func:`flash_attn_func`. Their
    arguments have other names here: seqused_k is cache_seqlens, seqlens_rotary rotary_seqlens, kv_batch_idx
    cache_batch_idx, leftpad_k cache_leftpad.

    Args:
        out_: where to write out, a tensor of its shape and dtype that requires no gradient.
        window_size, out: names of window_size_left and _right, and of out_, up to version 2.8.3.
    """
    out_ = out if out_ is None else out_
    window = (window_size_left, window_size_right) if window_size is None else window_size
    descales, scores = Descales(q_descale, k_descale, v_descale), (softmax_scale, causal, window, softcap)
    check_hints(num_splits, pack_gqa, sm_margin)
    cached: dict[str, Any] = {
        "cu_seqlens_k_new": cu_seqlens_k_new,
        "page_table": page_table,
        "cache_batch_idx": kv_batch_idx,
        "cache_leftpad": leftpad_k,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "rotary_seqlens": seqlens_rotary,
    }
    if k_new is not None or v_new is not None or any(value is not None for value in cached.values()):
        if cu_seqlens_k is not None or seqused_q is not None:
            raise NotImplementedError("pyattn: a cache takes no cu_seqlens_k and no seqused_q, got one of them")
        named: dict[str, Any] = cached | {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "qv": qv}
        named |= {f"{name}_descale": value for name, value in descales._asdict().items()}
        named |= dict(zip(("softmax_scale", "causal", "window_size", "softcap"), scores, strict=True))
        named |= {"attention_chunk": attention_chunk, "rotary_interleaved": rotary_interleaved}
        results = flash_attn_with_kvcache(
            q,
            k,
            v,
            k_new,
            v_new,
            cache_seqlens=seqused_k,
            scheduler_metadata=scheduler_metadata,
            return_softmax_lse=True,
            **named,
        )
        found, lse = results[0], results[1]
    elif any(value is not None for value in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)):
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
        found, lse = varlen.attend(q, k, v, qv, descales, attention_chunk, *lengths, *scores)
    else:
        found, lse = dense.attend(q, k, v, qv, descales, attention_chunk, *scores)
    if out_ is not None:
        check_tensor("out", out_)
        if out_.shape != found.shape or out_.dtype != found.dtype or out_.requires_grad or found.requires_grad:
            raise WrongValueError(
                f"pyattn: out must be {found.dtype} of shape {tuple(found.shape)}, without gradients, got "
                f"{out_.dtype} of shape {tuple(out_.shape)}"
            )
        found = out_.copy_(found)
    return found, lse, lse.new_empty(0), lse.new_empty(0)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Writes the gradients of :func:`flash_attn_func`, or of packed sequences, to dq, dk and dv where they are given.

    ``out`` and ``softmax_lse`` may be those of more keys than k: see :func:`pyattn.parts.attention_backward`.

    Returns:
        rowsum(dout * out), (B, Hq, Sq) float32 with Sq rounded up to a multiple of 128; (Hq, total_q) of packed ones.

    Raises:
        NotImplementedError: sequed_q and sequed_k (FlashAttention 3's spelling), one of cu_seqlens without the other.
    """
    if sequed_q is not None or sequed_k is not None:
        raise NotImplementedError("pyattn: the backward takes no sequed_q and no sequed_k, got one of them")
    check_hints(1, None, sm_margin)
    window, into = (window_size_left, window_size_right), (dq, dk, dv)
    scores = 0.0, softmax_scale, is_causal, window, softcap, None, deterministic
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return backward(dout, q, k, v, out, softmax_lse, into, *scores)
    check_together(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    assert cu_seqlens_q is not None and cu_seqlens_k is not None  # noqa: PT018
    return backward_packed(dout, q, k, v, out, softmax_lse, into, cu_seqlens_q, cu_seqlens_k, *scores)
