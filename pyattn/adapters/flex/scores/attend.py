"""Attention under any mask and score_mod, differentiable twice in query, key, value and what the score_mod captures.

What has a native meaning runs in native code. All else runs in torch operations, one block of
:mod:`pyattn.adapters.flex.scores.score_blocks` after another, so memory is linear in the sequence lengths; each
derivative computes a block's scores again. 16-bit types are computed in float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyattn import attention
from pyattn.adapters.flex.native_forms import Mask, Score, ScoreMod, intersection, native_options, ranges_for
from pyattn.adapters.flex.scores.score_blocks import ScoredCall, blocks
from pyattn.adapters.flex.scores.score_masks import mask_of_conditions, masking_of
from pyattn.adapters.flex.scores.score_terms import score_of_terms
from pyattn.adapters.flex.trace.evaluation import uncompiled
from pyattn.adapters.flex.trace.trace import Trace
from pyattn.derivatives.second_order import Last, apply, save, saved
from pyattn.derivatives.transforms import transforming
from pyattn.masks.key_ranges import MOST_RANGES
from pyattn.options import Options
from pyattn.options.autocast import cast, without


def native(
    score: Score, mask: Mask, query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) and lse (B, Hq, Sq) under a score_mod with a native meaning."""
    out, lse = attention(query, key, value, **native_options(score, mask, query, key, scale), return_lse=True)
    return out, lse


@uncompiled
def attend(
    score_mod: ScoreMod, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float | None
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) in query's dtype and lse (B, Hq, Sq); errors are attention's and the score_mod's."""
    if transforming():
        raise NotImplementedError(
            "pyattn: a score_mod of your own must run outside of torch.func's transforms and forward mode, got one"
        )
    q, k, v = cast(query), cast(key), cast(value)
    attention(*(x.to("meta") for x in (q, k, v)), softmax_scale=scale)  # checks them
    meaning = meaning_of(score_mod, q, k, mask, scale, score_mod)
    if isinstance(meaning, ScoredCall):
        return attend_in_blocks(meaning, q, k, v)
    return native(*meaning, query, key, value, scale)


def meaning_of(
    score_mod: ScoreMod, q: Tensor, k: Tensor, mask: Mask, scale: float | None, remembers: object
) -> tuple[Score, Mask] | ScoredCall:
    """A score_mod and a mask as native options, or else as what blocks share.

    q: (B, Hq, Sq, D), k: (B, Hkv, Sk, D). ``remembers`` is the object that remembers the mask in the score_mod.
    """
    trace = Trace("score_mod", score_mod, q.device, _wide(q).dtype)
    read = trace.captured
    if trace.result is not None:
        masking = masking_of(trace.result)
        if masking.conditions:
            most = MOST_RANGES + 1 - mask.intervals
            hidden = mask_of_conditions(masking, remembers, (*q.shape[:3], k.shape[2]), _wide(q).dtype, most)
            mask = intersection([mask, hidden])
        score = score_of_terms(masking.rest, q, k.shape[2])
        if score is not None:
            return score, mask
        score_mod, read = masking.score_mod, masking.captured
    captured = [x for x in read if x.requires_grad] if torch.is_grad_enabled() else []
    traces = [trace, *(x.trace for x in mask.holes if x.trace is not None)]
    ranges, factor = ranges_for(q, mask, k.shape[2]), Options(softmax_scale=scale).scale_for(q.shape[3])
    return ScoredCall(score_mod, captured, ranges, mask.holes, factor, traces)


def attend_in_blocks(call: ScoredCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse."""
    out, lse = apply(_Attention, call, q, k, v, *call.read())
    return out, lse


def gradients_in_blocks(
    call: ScoredCall, dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *read: Tensor
) -> tuple[Tensor, ...]:
    """dq, dk, dv and the gradients of the first of ``read``, tensors in place of ``call.read()``."""
    call.check()
    dout = q.new_zeros(*q.shape[:3], v.shape[3]) if dout is None else dout
    dlse = _wide(q).new_zeros(q.shape[:3]) if dlse is None else dlse
    return apply(_Gradients, call, dout, dlse, q, k, v, *read)


class _Attention(torch.autograd.Function):
    """``apply(call, q, k, v, *call.read())``: out and lse."""

    @staticmethod
    def forward(call: ScoredCall, q: Tensor, k: Tensor, v: Tensor, *read: Tensor) -> tuple[Tensor, Tensor]:
        captured = read[: len(call.captured)]
        wide = _wide(q), _wide(k), _wide(v)
        out = torch.zeros_like(q) if q.shape[3] == v.shape[3] else q.new_zeros(*q.shape[:3], v.shape[3])
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide[0].dtype, device=q.device)
        with without(q.device):
            for block in blocks(call, q, k):
                out[block.queries], lse[block.queries] = block.forward(block.parts(wide), captured)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        save(ctx, inputs, forward_mode=False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        call, *inputs = saved(ctx)
        found = gradients_in_blocks(call, dout, dlse, *inputs)
        return None, *found, *(None,) * (len(inputs) - len(found))


class _Gradients(torch.autograd.Function):
    """``apply(call, dout, dlse, q, k, v, *call.read())``: dq, dk, dv and the gradients of ``call.captured``."""

    @staticmethod
    def forward(call: ScoredCall, *inputs: Tensor) -> tuple[Tensor, ...]:
        dout, dlse, q, k, v, *captured = (x.detach() for x in inputs[: 5 + len(call.captured)])
        leaves = [x.requires_grad_() for x in captured]
        sums = [torch.zeros_like(_wide(x)) for x in (q, k, v, *captured)]
        wide = [_wide(x) for x in (dout, dlse, q, k, v)]
        with without(q.device):
            for block in blocks(call, q, k):
                _add(sums, block.places[2:], block.backward(block.parts(wide), leaves, sums[3:]))
        return tuple(total.to(x.dtype) for total, x in zip(sums, (q, k, v, *captured), strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        save(ctx, inputs, forward_mode=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call, *inputs = saved(ctx)
        call.check()
        count = 5 + len(call.captured)
        found = apply(_SecondGradients, call, count, *inputs[:count], *gradients)
        return None, *found, *(None,) * (len(inputs) - count)


class _SecondGradients(Last):
    """``apply(call, number of inputs, *inputs of _Gradients, *gradients of its results)``: those of the inputs."""

    @staticmethod
    def forward(call: ScoredCall, number: int, *given: Tensor | None) -> tuple[Tensor, ...]:
        inputs, gradients = [x.detach() for x in given[:number] if x is not None], given[number:]
        q, k = inputs[2:4]
        wide = [_wide(x) for x in inputs[:5]]
        sums = [torch.zeros_like(_wide(x)) for x in inputs]
        moved = [None if x is None else _wide(x) for x in gradients]
        with without(q.device):
            for block in blocks(call, q, k):
                into = [None if x is None else x[place] for x, place in zip(moved[:3], block.places[2:], strict=True)]
                _add(sums, block.places, block.double_backward([*into, *moved[3:]], block.parts(wide), inputs[5:]))
        return tuple(total.to(x.dtype) for total, x in zip(sums, inputs, strict=True))


def _wide(x: Tensor) -> Tensor:
    """``x`` in float32 or float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _add(sums: Sequence[Tensor], places: Sequence[Any], parts: Sequence[Tensor | None]) -> None:
    """Adds the block's parts to the sums, and those of captured tensors, which have no place, as a whole."""
    for place, total, part in zip((*places, *[...] * (len(sums) - len(places))), sums, parts, strict=True):
        if part is not None:
            total[place] += part
