"""Attention over a batch: flash_attn_func and its packed forms."""

from torch import Tensor

from pyattn import attention
from pyattn.adapters.flash_attn import probabilities
from pyattn.adapters.flash_attn.arguments import Window, check_batch, check_dimensions, named, with_inf
from pyattn.adapters.flash_attn.probabilities import Results
from pyattn.options import UNBOUNDED


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """:func:`pyattn.attention` in flash-attn 2's layout and under its names.

    The causal mask and the window are aligned bottom-right, query ``i`` at key position ``i + Sk - Sq``::

        Sq 2, Sk 5     1 1 1 1 0          Sq 3, Sk 2     0 0
                       1 1 1 1 1                         1 0
                                                         1 1
    Args:
        q: (B, Sq, Hq, D), any strides.
        k, v: (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv), Hq a multiple of Hkv.
        dropout_p: probability of dropping a weight, drawn from torch's generator.
        softmax_scale: factor on the scores; default ``1 / sqrt(D)``.
        causal: whether a query sees no key after its own position.
        window_size: (left, right), how many keys before and after its own position a query sees; below 0: all.
        softcap: bound on the scaled scores; 0: no bound.
        alibi_slopes: (Hq,) or (B, Hq), float32: ``slope * |i + Sk - Sq - j|`` is subtracted from the score.
        deterministic: has no effect; backward is always deterministic.
        return_attn_probs: also return softmax_lse and S_dmask.

    Returns:
        ``out`` (B, Sq, Hq, Dv), or ``(out, softmax_lse, S_dmask)``. softmax_lse is (B, Hq, Sq), float32 (float64 for
        float64), differentiable, +inf for a query that sees no key, whose out is 0. S_dmask is the result of
        :func:`probabilities.signed`, (B, Hq, Sq, Sk) with the last two sizes padded to multiples of 128; of shape (0,)
        without dropout.

    Raises:
        ValueError, TypeError, NotImplementedError: as for :func:`pyattn.attention`. Cases that flash-attn's kernels
            lack, such as float32, head dimensions above 256, softcap with dropout or a CPU, work here.

    >>> q, k, v = torch.randn(3, 2, 10, 4, 64).unbind()
    >>> flash_attn_func(q, k, v, causal=True, window_size=(3, 0)).shape
    torch.Size([2, 10, 4, 64])
    """
    options = named(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    check_batch(q, k, v)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if not return_attn_probs:
        alone: Tensor = attention(q, k, v, **options)
        return alone.transpose(1, 2)
    options["dropout_seed"] = probabilities.seed_for(q, options["dropout_p"])
    out, lse = attention(q, k, v, return_lse=True, **options)
    return out.transpose(1, 2), with_inf(lse), probabilities.signed(q, k, options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """:func:`flash_attn_func` of q, k and v in one tensor, read in place: qkv (B, S, 3, H, D)."""
    check_dimensions("qkv", qkv, "batch, seqlen, 3, num_heads, head_dim")
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *options, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """:func:`flash_attn_func` of k and v in one tensor, read in place: kv (B, Sk, 2, Hkv, D)."""
    check_dimensions("kv", kv, "batch, seqlen, 2, num_heads, head_dim")
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *options, return_attn_probs)
