"""How masks, fills and sums are computed."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyattn.adapters.scratch.masks.blind import Blind


class Filled(NamedTuple):
    """Keys with separate scores for a query, whatever q and k are.

    Attributes:
        keys: True = has such a score and perhaps a weight, (1 or full of *fine, 1 or Sq, 1 or Sk).
        scores: a number, or (1 or full of *fine, 1 or Sq, 1 or Sk).
        cleared: whether their weights are replaced by 0 after the softmax.
    """

    keys: Tensor
    scores: float | Tensor
    cleared: bool = False


class Masks(NamedTuple):
    """Hidden keys (True = hidden) and a bias, each (1 or full of *fine, 1 or Sq, 1 or Sk).

    Attributes:
        hidden: keys that are hidden, or :class:`Filled`.
        bias: what is added to scores.
        blind: the queries whose results are NaN, since no key is visible, if that is not known to be none of them.
        filled: hidden keys that have another score, if there may be such.
        nan_is_zero: whether queries whose weights are NaN have results of 0, which is not proved to be the same.
    """

    hidden: Tensor | None
    bias: Tensor | None
    blind: Blind | None = None
    filled: Filled | None = None
    nan_is_zero: bool = False


def least_weight(dtype: torch.dtype) -> float:
    """exp(x) is 0 below this. Softmaxes of 16 bits are computed in float32."""
    return -746.0 if dtype == torch.float64 else -104.0
