"""From projected tensors to attention over heads.

The product uses the reference here and nowhere else: for masks given as tensors and for returned weights, which are
not native yet.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from pyattn import reference
from pyattn.functional import attention

Output = Tensor | tuple[Tensor, Tensor]

_warned: set[str] = set()


def _warn_once(reason: str) -> None:
    if reason not in _warned:
        warnings.warn(f"pyattn: {reason} is not native yet: plain PyTorch, seqlen x seqlen memory", stacklevel=2)
        _warned.add(reason)


def make_dropout(p: float) -> nn.Dropout:
    """The module ``dropout`` of a constructor's argument."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"pyattn: dropout must be between 0 and 1, got {p}")
    return nn.Dropout(p)


def dropout_probability(dropout: nn.Module | None) -> float:
    """The probability that ``dropout`` stands for now. ``nn.Identity`` in its place switches it off."""
    if dropout is None or isinstance(dropout, nn.Identity):
        return 0.0
    if not isinstance(dropout, nn.Dropout):
        raise TypeError(f"pyattn: dropout must be nn.Dropout or nn.Identity, got {type(dropout).__name__}")
    return dropout.p if dropout.training else 0.0


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    mask: Tensor | None = None,
    dropout: nn.Module | None = None,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention over (B, H, T, D): out, and weights if asked for. ``mask``: bool, True = takes part."""
    dropout_p = dropout_probability(dropout)
    if dropout_p == 1.0:  # every weight is dropped, and the function takes less than 1 only
        out, weights = _attend(
            q, k, v, causal=causal, softmax_scale=softmax_scale, mask=mask, need_weights=need_weights
        )
        return out * 0.0, None if weights is None else weights * 0.0
    if mask is None and not need_weights:
        return attention(q, k, v, causal=causal, softmax_scale=softmax_scale, dropout_p=dropout_p), None
    if mask is not None:
        _warn_once("a mask given as a tensor")
    if need_weights:
        _warn_once("returning attention weights")
    out, weights = reference.attention(
        q, k, v, causal=causal, softmax_scale=softmax_scale, bias=mask, dropout_p=dropout_p, return_weights=True
    )
    return out, weights if need_weights else None


def attend_single(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Output:
    """:func:`_attend` over (B, T, D) or (T, D): sequences of one head pass as the heads of one batch entry."""
    missing = 4 - q.dim()
    out, weights = _attend(*(t[(None,) * missing] for t in (q, k, v)), **options)
    first = (0,) * missing
    return output_of(out[first], None if weights is None else weights[first])


def attend_heads(q: Tensor, k: Tensor, v: Tensor, head_dim: int, **options: Any) -> tuple[Tensor, Tensor | None]:
    """:func:`_attend` over (B, T, H * head_dim), the heads split and merged by views.

    H is read from the tensors: under tensor parallelism a projection yields this rank's heads only.
    """
    out, weights = _attend(*(torch.unflatten(t, -1, (-1, head_dim)).transpose(1, 2) for t in (q, k, v)), **options)
    return out.transpose(1, 2).flatten(2), weights


def output_of(out: Tensor, weights: Tensor | None) -> Output:
    """What ``forward`` returns: the weights come along if there are any."""
    return out if weights is None else (out, weights)
