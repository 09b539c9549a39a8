"""Compares a model's attention with pure-Python attention."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from pyattn.cli.gpt import GPT, Attend, Block, attend_reference
from pyattn.cli.timing import stopwatch
from pyattn.cli.train.loop import autocast, loss_of

Result = TypeVar("Result")


@dataclass(frozen=True)
class Comparison:
    """The model's attention against the pure-Python one, on the same weights and batches.

    Attributes:
        attention_speedup: pure-Python attention's time over this one's, forward and backward; median over batches.
        step_speedup: the same for forward and backward of the whole model.
        difference: largest absolute difference between the two losses, over the batches.
        bound: largest difference that rounding alone explains.
    """

    attention_speedup: float
    step_speedup: float
    difference: float
    bound: float


def rounding_bound(model: GPT, dtype: torch.dtype, loss: float) -> float:
    """How much ``loss`` may change when attention sums in another order.

    An output of attention is a sum of up to ``context`` float32 terms. Their rounding errors add up like a random walk
    to sqrt(context) eps(float32), and the sum is rounded to ``dtype``, eps(dtype). The relative errors of the
    ``layers`` add up, and the loss is assumed to change by the same relative amount.
    """
    eps, sum_eps = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    return model.config.layers * (eps + math.sqrt(model.config.context) * sum_eps) * loss


def attention_inputs(model: GPT, windows: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The q, k and v (B, heads, S, head_dim) of the last block's attention on ``windows``, with their strides."""
    met: list[list[Tensor]] = []
    attend = model.attend

    def record(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, **options: Any) -> Tensor:
        met.append([q.detach(), k.detach(), v.detach()])
        return attend(q, k, v, dropout_p, **options)

    model.attend = record
    with torch.no_grad():
        loss_of(model, windows, dtype)
    model.attend = attend
    return [tensor.requires_grad_() for tensor in met[-1]]


def attention_pass(
    attend: Attend, inputs: list[Tensor], dout: Tensor, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Forward and backward of attention alone."""
    with autocast(dout.device, dtype):
        out = attend(inputs[0], inputs[1], inputs[2], 0.0, **options)
    torch.autograd.grad(out, inputs, dout)


def model_pass(attend: Attend, model: GPT, windows: Tensor, dtype: torch.dtype) -> float:
    """Forward and backward of the whole model. Returns the loss."""
    model.attend = attend
    model.zero_grad()
    loss = loss_of(model, windows, dtype)
    torch.autograd.backward(loss)
    return loss.item()


def timed(work: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """The seconds that ``work`` took, and its result."""
    seconds = stopwatch(device.type)
    result = work()
    return seconds(), result


def compare(model: GPT, batches: list[Tensor], dtype: torch.dtype) -> Comparison:
    """Time the model's attention and the pure-Python one in turn, without dropout; the weights don't change.

    The first of ``batches`` is a warm-up and is not counted, so there must be at least two.
    """
    model.eval()
    device, chosen = model.device, model.attend
    sides, options = (chosen, attend_reference), cast(Block, model.blocks[-1]).options()
    attention_ratios, step_ratios, differences, losses = [], [], [], []
    for windows in batches:
        inputs = attention_inputs(model, windows, dtype)
        dout = torch.randn_like(inputs[2])
        ours, theirs = [timed(partial(attention_pass, side, inputs, dout, dtype, options), device) for side in sides]
        attention_ratios.append(theirs[0] / ours[0])
        own, other = [timed(partial(model_pass, side, model, windows, dtype), device) for side in sides]
        step_ratios.append(other[0] / own[0])
        differences.append(abs(own[1] - other[1]))
        losses.append(other[1])
        model.attend = chosen
    model.zero_grad()
    return Comparison(
        statistics.median(attention_ratios[1:]),
        statistics.median(step_ratios[1:]),
        max(differences),
        rounding_bound(model, dtype, max(losses)),
    )
