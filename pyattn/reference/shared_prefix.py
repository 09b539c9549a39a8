"""Answers that share prompts, by the formula: a prompt's keys and values are repeated before those of each answer."""

from typing import Any

import torch
from torch import Tensor

from pyattn.reference.formula import attention


def attention_with_prefix(
    q: Tensor, k: Tensor, v: Tensor, prefix_k: Tensor, prefix_v: Tensor, **options: Any
) -> Tensor | tuple[Tensor, ...]:
    """:func:`attention` of q (B, Hq, Sq, D) over the keys of a prompt (P of them) and those of its answer (Sk).

    Args:
        q, k, v: of the answers, as for :func:`attention`.
        prefix_k, prefix_v: (G, Hkv, P, D) and (G, Hkv, P, Dv); answer ``b`` belongs to prompt ``b // (B / G)``.
        options: as for :func:`attention` over P + Sk keys.
    """
    answers = len(q) // max(1, len(prefix_k))
    whole = (torch.cat([p.repeat_interleave(answers, 0), t], 2) for p, t in ((prefix_k, k), (prefix_v, v)))
    found: Tensor | tuple[Tensor, ...] = attention(q, *whole, **options)
    return found
