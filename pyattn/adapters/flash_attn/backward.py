"""The backward of flash-attn's functions from their saved out and softmax_lse, which may be those of more keys."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyattn.adapters.flash_attn.arguments import (
    MULTIPLE,
    Window,
    WrongValueError,
    check_batch,
    check_dimensions,
    check_int32,
    named,
)
from pyattn.options.checks import check_tensor
from pyattn.parts import attention_backward

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Where to write dq, dk and dv."""


@torch.no_grad()
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    into: Gradients,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    """Writes the gradients of (B, S, H, D) tensors; returns rowsum(dout * out) (B, Hq, Sq rounded up), float32.

    softmax_lse (B, Hq, Sq) is +inf or -inf for a query that sees no key, whose weights are 0 either way.
    """
    options = named(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    check_batch(q, k, v)
    of_out = (*q.shape[:3], v.shape[3])
    for name, tensor, shape in (("dout", dout, of_out), ("out", out, of_out)):
        check_tensor(name, tensor)
        if tensor.shape != shape:
            raise WrongValueError(f"pyattn: {name} must have shape {shape}, got {tuple(tensor.shape)}")
    check_tensor("softmax_lse", softmax_lse)
    rows = q.shape[0], q.shape[2], q.shape[1]
    if softmax_lse.shape != rows:
        raise WrongValueError(f"pyattn: softmax_lse must have shape {rows}, got {tuple(softmax_lse.shape)}")
    if dropout_p and dropout_seed is None:
        raise WrongValueError(f"pyattn: rng_state must be that of the forward, got None with dropout_p {dropout_p}")
    check_into(into, q, k, v)
    heads = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    found = attention_backward(*heads, softmax_lse, dropout_seed=dropout_seed, **options)
    for given, gradient in zip(into, found, strict=False):
        if given is not None and gradient is not None:
            given.copy_(gradient.transpose(1, 2))
    sums = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    return pad(sums, (0, -sums.shape[2] % MULTIPLE))


@torch.no_grad()
def backward_packed(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    into: Gradients,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
) -> Tensor:
    """:func:`backward` of packed sequences, one after another; tensors are (total, H, D), softmax_lse (Hq, total_q).

    Tokens after the last sequence get gradient 0.
    """
    if dropout_p:
        raise NotImplementedError(f"pyattn: the backward of packed sequences takes no dropout_p, got {dropout_p}")
    for name, tensor in (("dout", dout), ("q", q), ("k", k), ("v", v), ("out", out)):
        check_dimensions(name, tensor, "total, num_heads, head_dim")
    check_into(into, q, k, v)
    borders = []
    for name, cu_seqlens, total in (("cu_seqlens_q", cu_seqlens_q, len(q)), ("cu_seqlens_k", cu_seqlens_k, len(k))):
        check_int32(name, cu_seqlens)
        check_dimensions(name, cu_seqlens, "batch + 1")
        ends = cu_seqlens.tolist()
        if not ends or ends[0] != 0 or ends != sorted(ends) or ends[-1] > total or len(ends) != len(cu_seqlens_q):
            raise WrongValueError(
                f"pyattn: {name} must begin at 0, never decrease, end at most at {total} and count "
                f"{len(cu_seqlens_q) - 1} sequences, got {ends}"
            )
        borders.append(ends)
    if softmax_lse.shape != (q.shape[1], len(q)):
        raise WrongValueError(
            f"pyattn: softmax_lse must have shape {(q.shape[1], len(q))}, got {tuple(softmax_lse.shape)}"
        )
    for given in into:
        if given is not None:
            given.zero_()
    for b in range(len(cu_seqlens_q) - 1):
        i, j = (slice(*ends[b : b + 2]) for ends in borders)
        slopes = alibi_slopes[b : b + 1] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        of_b = [None if t is None else t[part][None] for t, part in zip(into, (i, j, j), strict=True)]
        sequence = dout[i][None], q[i][None], k[j][None], v[j][None], out[i][None], softmax_lse[None, :, i]
        backward(*sequence, tuple(of_b), 0.0, softmax_scale, causal, window_size, softcap, slopes, deterministic)  # type: ignore[arg-type]
    return (dout.float() * out.float()).sum(-1).transpose(0, 1)


def check_into(into: Gradients, *tensors: Tensor) -> None:
    """ValueError unless each given dq, dk and dv has its tensor's shape."""
    for name, given, tensor in zip(("dq", "dk", "dv"), into, tensors, strict=True):
        if given is not None:
            check_tensor(name, given)
            if given.shape != tensor.shape:
                raise WrongValueError(f"pyattn: {name} must have shape {tuple(tensor.shape)}, got {tuple(given.shape)}")
