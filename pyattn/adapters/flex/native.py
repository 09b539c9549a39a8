"""Attention under a mask and a score_mod with a native meaning."""

from typing import Any

from torch import Tensor

from pyattn import attention
from pyattn.adapters.flex.native_forms import Mask, Score, options_of
from pyattn.options import Options


def native(
    score: Score, mask: Mask, query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) and lse (B, Hq, Sq)."""
    out, lse = attention(query, key, value, **native_options(score, mask, query, key, scale), return_lse=True)
    return out, lse


def native_options(score: Score, mask: Mask, query: Tensor, key: Tensor, scale: float | None) -> dict[str, Any]:
    """The arguments of :func:`pyattn.attention` after query, key and value."""
    if score.factor != 1:
        scale = Options(softmax_scale=scale).scale_for(query.shape[3]) * score.factor
    of_distances = score.alibi_slopes is not None or score.relative_bias is not None
    return {
        **options_of(mask, score.offset if of_distances else None, query, key.shape[2]),
        "softmax_scale": scale,
        "softcap": score.softcap,
        "alibi_slopes": None if score.alibi_slopes is None else score.alibi_slopes.clone(),  # backward reads these
        "bias": score.bias,
        "relative_bias": score.relative_bias,
    }
