"""S_dmask, which flash-attn returns for tests: the softmax weights, negative where dropout drops them."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyattn import attention_weights, dropout_mask
from pyattn.adapters.flash_attn.arguments import MULTIPLE
from pyattn.options.checks import check_sizes
from pyattn.options.dropout import draw_seed

Results = Tensor | tuple[Tensor, Tensor, Tensor]
"""out, or with return_attn_probs (out, softmax_lse, S_dmask)."""


def seed_for(q: Tensor, dropout_p: float) -> Tensor | None:
    """Draws a seed as :func:`pyattn.attention` would."""
    return draw_seed(q.device) if dropout_p else None


@torch.no_grad()
def signed(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """The softmax of q (B, Hq, Sq, D) and k (B, Hkv, Sk, D), negative where the weight is dropped.

    flash-attn leaves the scale of these numbers open; here they are the weights before dropout's rescaling, 0 for
    masked keys. Time and memory are quadratic in the lengths.

    Args:
        q, k: the inputs of attention.
        options: its options, with dropout_p and dropout_seed.

    Returns:
        (B, Hq, Sq, Sk) in q's dtype, its last two sizes rounded up to multiples of 128 with zeros; of shape (0,)
        without dropout.
    """
    if not options["dropout_p"]:
        return q.new_empty(0)
    weights = attention_weights(q, k, **options | {"dropout_p": 0.0})
    seqlen_q, seqlen_k = weights.shape[2:]
    return _with_signs(pad(weights, (0, -seqlen_k % MULTIPLE, 0, -seqlen_q % MULTIPLE)), options)


@torch.no_grad()
def signed_packed(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    options: dict[str, Any],
) -> Tensor:
    """:func:`signed` of packed sequences, q (total_q, Hq, D) and k (total_k, Hkv, D); one sequence per batch row."""
    if not options["dropout_p"]:
        return q.new_empty(0)
    batch, slopes = len(cu_seqlens_q) - 1, options["alibi_slopes"]
    check_sizes(batch=batch, num_heads=q.shape[1], max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    rows, columns = (-(-seqlen // MULTIPLE) * MULTIPLE for seqlen in (max_seqlen_q, max_seqlen_k))
    weights = q.new_zeros(batch, q.shape[1], rows, columns)
    of_sequences = slopes.split(1) if slopes is not None and slopes.dim() == 2 else (slopes,) * batch
    sequences = zip(weights, _split(q, cu_seqlens_q), _split(k, cu_seqlens_k), of_sequences, strict=True)
    for of_b, queries, keys, slopes_of_b in sequences:
        own = options | {"alibi_slopes": slopes_of_b, "dropout_p": 0.0}
        of_b[:, : queries.shape[2], : keys.shape[2]] = attention_weights(queries, keys, **own)[0]
    return _with_signs(weights, options)


def _split(x: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
    """The sequences (1, H, S, D) of packed tokens (total, H, D)."""
    sequences = x[: int(cu_seqlens[-1])].split(cu_seqlens.diff().tolist())
    return [sequence.transpose(0, 1)[None] for sequence in sequences]


def _with_signs(weights: Tensor, options: dict[str, Any]) -> Tensor:
    """The weights (B, Hq, Sq, Sk), negative where these options drop them."""
    batch, num_heads, seqlen_q, seqlen_k = weights.shape
    kept = dropout_mask(options["dropout_seed"], batch, num_heads, seqlen_q, seqlen_k, options["dropout_p"])
    return torch.where(kept, weights, -weights)
