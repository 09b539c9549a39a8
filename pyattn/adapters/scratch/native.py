"""Recorded attention as one call of :func:`pyattn.attention`."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyattn import attention
from pyattn.adapters.scratch.masks.filled import appended, merged
from pyattn.adapters.scratch.masks.kinds import Masks
from pyattn.adapters.scratch.masks.proofs import proved
from pyattn.adapters.scratch.recording.chain import Chain, LeftError
from pyattn.adapters.scratch.recording.leading import fine_shape_of, folded, grouped, refined, shared_heads


def attend(chain: Chain, v: Tensor, dtype: torch.dtype, masks: Callable[..., Masks] = proved, size: int = 1) -> Tensor:
    """The weights of ``chain`` times v (..., Sk, Dv): (*lead, Sq, Dv) in ``dtype``.

    Keys and values that ``size`` heads after one another share are (..., groups, 1, Sk, D).

    Raises LeftError if the values of a mask or bias give other weights than :func:`pyattn.attention` computes, before
    anything is computed.
    """
    start, lead = chain.leads[0], chain.leads[-1]
    of_k, of_v = grouped(start, size), grouped(lead, size)
    fine = fine_shape_of(chain.leads, size)
    assert fine is not None
    if v.shape[-2] != chain.sizes[1] or not _broadcasts(v.shape[:-2], of_v):
        raise LeftError("values of another batch")
    if chain.joined:
        raise LeftError("values of sinks")
    if v.layout is not torch.strided or v.device != chain.q.tensor.device:
        raise LeftError(f"values of {v.layout} on {v.device}")
    compute = torch.promote_types(chain.dtype, v.dtype)
    q = chain.q.tensor
    for factor in chain.factors:
        q = factor.applied(q)
    q, k, v = (x.to(compute) for x in (q, chain.k.tensor, v))
    q, k, v = refined(q, start, fine), refined(k, of_k, fine), refined(v, of_v, fine)
    hidden, bias, blind, filled, nan_is_zero = masks(chain, q, k, fine)
    q, k, v = (q, k, v) if blind is None else blind.of(q, k, v, nan_is_zero=nan_is_zero)
    if chain.is_gated:  # 16 bits would round the results before the gates
        compute = torch.promote_types(compute, torch.float32)
        q, k, v = (x.to(compute) for x in (q, k, v))
    shared = shared_heads(k.shape[:-2], v.shape[:-2], fine)
    heads = shared + 1 if len(fine) > shared + 1 else max(shared, min(1, len(fine)))
    q = folded(q.expand(*fine, *q.shape[-2:]), fine, heads)
    k, v = (_grouped(x, fine, len(fine) - shared, heads) for x in (k, v))
    mask = None if hidden is None else folded(~hidden, fine, heads)
    bias = None if bias is None else folded(bias, fine, heads)
    apart = filled is not None and not isinstance(filled.scores, Tensor)
    if filled is not None and isinstance(filled.scores, Tensor):
        assert mask is not None
        if chain.sizes[0] < MIN_QUERIES:
            raise LeftError("few queries, and a fill with a finite number beside other numbers, in compiled code")
        (q, k, v), mask, bias = appended(filled, filled.scores, (q, k, v), (fine, heads), mask, bias)
    options: dict[str, Any] = {
        "causal": False,
        "softmax_scale": chain.sign * chain.scale * chain.factor,
        "softcap": chain.factor if chain.capped else 0.0,
        "mask": mask,
        "bias": None if bias is None else _cast(bias, compute),
        "dropout_p": 0.0 if chain.dropout is None else chain.dropout.p,
        "dropout_seed": None if chain.dropout is None else chain.dropout.seed,
    }
    out: Tensor
    lse: Tensor
    if filled is not None and apart:
        out, lse = merged(filled, (q, k, v), (fine, heads), options)
    elif chain.sinks is not None or nan_is_zero:
        out, lse = attention(q, k, v, **options, return_lse=True)
    else:
        out = attention(q, k, v, **options)
    if chain.sinks is not None:
        sinks = folded(refined(chain.sinks.read.tensor, chain.sinks.lead, fine), fine, heads)
        out = (out * torch.sigmoid(lse.unsqueeze(-1) - sinks)).to(compute)
    if nan_is_zero:
        out = out.masked_fill(~lse.isfinite().unsqueeze(-1), 0)
    if blind is not None:
        out = out.masked_fill(folded(blind.results, fine, heads), 0.0 if nan_is_zero else math.nan)
    for gate in chain.gates:
        factors = folded(refined(gate.tensor, gate.lead, fine), fine, heads)
        out = out / factors if gate.divides else out * factors
    out = out if chain.gain == 1 else out * chain.gain
    return out.reshape(*lead, *out.shape[-2:]).to(dtype)


def _broadcasts(shape: torch.Size, lead: tuple[int, ...]) -> bool:
    return len(shape) <= len(lead) and all(
        own in (1, full) for own, full in zip(reversed(shape), reversed(lead), strict=False)
    )


def _grouped(x: Tensor, fine: tuple[int, ...], groups: int, heads: int) -> Tensor:
    """``x`` as (batch, KV heads, Sk, D): the dimensions after the first ``groups`` are query heads that share it."""
    x = x.expand(*fine[:groups], *x.shape[groups:])
    at = len(fine) - heads
    return x.reshape(math.prod(fine[:at]), math.prod(x.shape[at:-2]), *x.shape[-2:])


def _cast(bias: Tensor, dtype: torch.dtype) -> Tensor:
    return bias if bias.dtype == torch.float32 else bias.to(dtype)


def enough(q: Tensor, k: Tensor, lead: tuple[int, ...]) -> bool:
    """Whether the scores are so many that native code gains more than recording costs."""
    return math.prod(lead) * q.shape[-2] * k.shape[-2] >= MIN_SCORES


def worth_reading_again(chain: Chain) -> bool:
    """Whether native code gains where the caller's code has computed the scores or the weights already."""
    few = math.prod(chain.leads[-1]) * math.prod(chain.sizes) < MIN_SCORES_READ
    return torch.is_grad_enabled() or chain.dropout is not None or not few


MIN_SCORES = 2**19
"""Scores of a product below which plain code is as fast: recording takes time (tests/records/LOG.md, 2026-11-27)."""

MIN_QUERIES = 2**7
"""Queries below which copying keys and values, for filled keys beside sums, takes as long as plain code (the same)."""

MIN_SCORES_READ = 2**22
"""The same, without gradients, for scores that something has read before, as top-k does."""
