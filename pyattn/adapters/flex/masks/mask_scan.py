"""The native meaning of a mask_mod that any function may be: up to 4 intervals a row, or a mask with holes."""

from collections.abc import Callable, Set
from typing import Any, NamedTuple

import torch

from pyattn.adapters.flex.masks.dense_mask import Holes
from pyattn.adapters.flex.native_forms import Mask, MaskMod
from pyattn.adapters.flex.trace.evaluation import uncompiled
from pyattn.adapters.flex.trace.expressions import value_of
from pyattn.adapters.flex.trace.trace import Trace
from pyattn.masks.key_ranges import by_interval


class Evaluation(NamedTuple):
    """A mask, the sizes (B, Hq, Sq, Sk) for which it holds, and what the mask_mod computed then."""

    mask: Mask
    sizes: tuple[int, int, int, int]
    trace: Trace


@uncompiled
@torch.inference_mode(False)  # so a mask that is remembered can be saved for backward
def evaluate(
    mask_mod: MaskMod, sizes: tuple[int, int, int, int], device: torch.device, before: Evaluation | None = None
) -> Evaluation:
    """Evaluates every pair, in blocks of rows, unless the mask_mod computes the same as ``before``.

    Raises:
        TypeError: a mask_mod that returns no bool tensor.
        ValueError: a mask_mod that returns a tensor with dimensions.
    """
    trace = Trace("mask_mod", mask_mod, device)
    if trace.dtype != torch.bool:
        raise TypeError(f"pyattn: mask_mod must return a bool tensor, got {trace.dtype}")
    repeats = before is not None and trace.repeats(before.trace)
    trace = before.trace if before is not None and repeats else trace
    batch, heads = (size if name in trace.reads else min(1, size) for name, size in zip("bh", sizes, strict=False))
    sizes = batch, heads, *sizes[2:]
    if before is not None and repeats and before.sizes == sizes:
        return before
    reads: Set[str] = {"q_idx", "kv_idx"}
    if trace.result is None:
        function: Callable[..., Any] = mask_mod
    else:  # reads what the recorded one read
        reads, function = trace.reads - {"b", "h"}, lambda *places: value_of(trace.result, (None, *places), {})
    holes = Holes(function, sizes, device, reads, trace=trace)
    ranges = holes.ranges()
    if ranges is None:
        return Evaluation(Mask(holes=(holes,)), sizes, trace)
    mask = Mask(ranges=(lambda *_: ranges,), intervals=by_interval(ranges).shape[2])
    return Evaluation(mask, sizes, trace)
