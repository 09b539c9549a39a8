"""flash-attn 2's functions below the public ones, which code for several ranks calls: they return softmax_lse.

In flash-attn each is also an operator, ``_wrapped_flash_attn_forward`` and so on; here both names are one function.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyattn import attention, attention_varlen
from pyattn.adapters.flash_attn import probabilities
from pyattn.adapters.flash_attn.arguments import check_batch, check_int32, longest, named, with_inf
from pyattn.adapters.flash_attn.backward import backward, backward_packed
from pyattn.options.checks import check_tensor, check_type

Forward = tuple[Tensor, Tensor, Tensor, Tensor]
"""out, softmax_lse, S_dmask and rng_state."""


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> Forward:
    """``(out, softmax_lse, S_dmask, rng_state)`` of :func:`flash_attn_func`; q, k and v are (B, S, H, D).

    softmax_lse is (B, Hq, Sq), +inf for a query that sees no key; S_dmask is empty unless ``return_softmax``; rng_state
    is (2,) int64: pyattn's dropout_seed and 0.
    """
    options = named(dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    check_type("return_softmax", return_softmax, bool)
    check_batch(q, k, v)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    options["dropout_seed"] = seed = probabilities.seed_for(q, options["dropout_p"])
    out, lse = attention(q, k, v, return_lse=True, **options)
    signed = probabilities.signed(q, k, options) if return_softmax else q.new_empty(0)
    return out.transpose(1, 2), with_inf(lse), signed, _rng_state(q, seed)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Forward:
    """``(out, softmax_lse, S_dmask, rng_state)`` of :func:`flash_attn_varlen_func`; softmax_lse is (Hq, total_q).

    Raises:
        NotImplementedError: leftpad_k; dropout_p, whose draws :func:`_flash_attn_varlen_backward` could not repeat.
    """
    if leftpad_k is not None:
        raise NotImplementedError(f"pyattn: packed sequences take no leftpad_k, got {leftpad_k}")
    if dropout_p:
        raise NotImplementedError(f"pyattn: _flash_attn_varlen_forward takes no dropout_p, got {dropout_p}")
    check_tensor("q", q)
    check_type("zero_tensors", zero_tensors, bool)
    check_type("num_splits", num_splits, int)
    check_type("return_softmax", return_softmax, bool)
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_int32(name, tensor)
    for name, optional in (("block_table", block_table), ("seqused_k", seqused_k)):
        if optional is not None:
            check_int32(name, optional)
    options = named(0.0, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    sizes = longest("max_seqlen_q", max_seqlen_q), longest("max_seqlen_k", max_seqlen_k)
    options |= {"block_table": block_table, "seqused_k": seqused_k}
    out, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *sizes, return_lse=True, **options)
    return out, with_inf(lse), q.new_empty(0), _rng_state(q, None)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes the gradients of :func:`_flash_attn_forward` to dq, dk and dv where they are given.

    ``out`` and ``softmax_lse`` may be those of more keys than k: see :func:`pyattn.parts.attention_backward`.

    Returns:
        rowsum(dout * out), (B, Hq, Sq) float32 with Sq rounded up to a multiple of 128.
    """
    if rng_state is not None:
        check_tensor("rng_state", rng_state)
    seed = rng_state.flatten()[0] if dropout_p and rng_state is not None and rng_state.numel() else None
    window = window_size_left, window_size_right
    scores = dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic
    return backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), *scores, seed)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """:func:`_flash_attn_backward` of packed sequences, one after another; returns rowsum(dout * out) (Hq, total_q).

    Raises:
        NotImplementedError: dropout_p.
    """
    check_type("zero_tensors", zero_tensors, bool)
    window = window_size_left, window_size_right
    scores = dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic
    return backward_packed(dout, q, k, v, out, softmax_lse, (dq, dk, dv), cu_seqlens_q, cu_seqlens_k, *scores)


def _rng_state(q: Tensor, seed: Tensor | None) -> Tensor:
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if seed is not None:
        state[0] = seed
    return state


PRIVATE: dict[str, Callable[..., Any]] = {
    "_flash_attn_forward": _flash_attn_forward,
    "_flash_attn_varlen_forward": _flash_attn_varlen_forward,
    "_flash_attn_backward": _flash_attn_backward,
    "_flash_attn_varlen_backward": _flash_attn_varlen_backward,
    "_wrapped_flash_attn_forward": _flash_attn_forward,
    "_wrapped_flash_attn_varlen_forward": _flash_attn_varlen_forward,
    "_wrapped_flash_attn_backward": _flash_attn_backward,
    "_wrapped_flash_attn_varlen_backward": _flash_attn_varlen_backward,
}
"""The names that code imports from flash_attn.flash_attn_interface."""
