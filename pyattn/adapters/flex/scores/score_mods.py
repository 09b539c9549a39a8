"""The score_mods with a native meaning, as functions that torch's own ``flex_attention`` also takes."""

import torch
from torch import Tensor

from pyattn.adapters.flex.native_forms import Score, ScoreMod, check_offset, known, makes_mods, of_sequence
from pyattn.options.checks import check_finite, check_tensor


@makes_mods
def softcap(cap: float) -> ScoreMod:
    """``cap * tanh(score / cap)``.

    Args:
        cap: bound on the scores, finite and above 0.

    Raises:
        ValueError: any other number.
        TypeError: another type.
    """
    check_finite("cap", cap)
    if cap == 0:
        raise ValueError(f"pyattn: cap must be above 0, got {cap}")

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return known("softcap", score_mod, Score(softcap=float(cap)))


@makes_mods
def alibi(slopes: Tensor, offset: int | Tensor = 0) -> ScoreMod:
    """``score - slopes[h] * |q_idx + offset - kv_idx|``: ALiBi with distances in both directions.

    Args:
        slopes: (Hq,) or (B, Hq), float32, query's dtype, or float64 with float64 query; differentiable. Each call
            reads them, and its backward uses a copy.
        offset: as in :func:`causal`.

    Raises:
        ValueError: tensors of another shape, an int past 64 bits.
        TypeError: other types.
    """
    check_tensor("slopes", slopes)
    if not slopes.is_floating_point():
        raise TypeError(f"pyattn: slopes must be of a floating-point dtype, got {slopes.dtype}")
    if slopes.dim() not in (1, 2):
        raise ValueError(f"pyattn: slopes must have 1 or 2 dimensions, got shape {tuple(slopes.shape)}")
    check_offset(offset)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        slope = slopes[b, h] if slopes.dim() == 2 else slopes[h]
        return score - slope.to(score.dtype) * (q_idx + of_sequence(offset, b) - kv_idx).abs()

    return known("alibi", score_mod, Score(alibi_slopes=slopes, offset=offset))
