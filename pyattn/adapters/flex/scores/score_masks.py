"""The mask in a score_mod: the pairs whose score it sets to -inf, by conditions that don't read the score."""

import dataclasses
import math
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pyattn.adapters.flex.masks.dense_mask import Holes
from pyattn.adapters.flex.masks.mask_scan import Evaluation, evaluate
from pyattn.adapters.flex.native_forms import Mask
from pyattn.adapters.flex.trace.expressions import Argument, Node, reads_score, signs, tensors_in, value_of

EVALUATED: WeakKeyDictionary[Any, Evaluation] = WeakKeyDictionary()
"""The last evaluation of each score_mod's conditions."""


class Masking(NamedTuple):
    """An expression of a score_mod: ``rest`` where every condition has its value, -inf elsewhere."""

    conditions: tuple[tuple[Any, bool], ...]
    rest: Any

    def score_mod(self, *arguments: Tensor) -> Tensor:
        """``rest``, for the arguments of a score_mod."""
        return torch.as_tensor(value_of(self.rest, arguments, {}))

    @property
    def captured(self) -> list[Tensor]:
        """The tensors that ``rest`` reads."""
        return tensors_in(self.rest)


def masking_of(x: object, infinity: float = -math.inf) -> Masking:
    """The conditions outside of which an expression is ``infinity``, and the expression without them.

    ``where`` and ``masked_fill`` by a condition on indices and captured tensors alone are taken apart, also inside each
    other and in sums: there -inf masks its pair whatever is added, as in a bias.
    """
    if not isinstance(x, Node) or x.named:
        return Masking((), x)
    each = signs(x)
    if each is not None:
        parts = [masking_of(y, sign * infinity) for y, sign in zip(x.arguments, each, strict=True)]
        conditions = tuple(condition for part in parts for condition in part.conditions)
        if not conditions:
            return Masking((), x)
        return Masking(conditions, dataclasses.replace(x, arguments=tuple(part.rest for part in parts)))
    chosen = _choice(x)
    if chosen is not None and not reads_score(chosen[0]):
        condition, *branches = chosen
        for value, kept, other in ((True, *branches), (False, *branches[::-1])):
            if _is_always(other, infinity):
                conditions, rest = masking_of(kept, infinity)
                return Masking(((condition, value), *conditions), _in_dtype_of(x, rest))
    return Masking((), x)


def _in_dtype_of(node: Node, x: Any) -> Any:
    """``x``, which takes the node's place in expressions, as a tensor of its dtype."""
    same = isinstance(x, Argument | Node | Tensor) and x.dtype == node.dtype
    return x if same else Node(torch.as_tensor, (x,), {"dtype": node.dtype}, node.dtype)


def mask_of_conditions(
    masking: Masking, score_mod: object, sizes: tuple[int, int, int, int], dtype: torch.dtype, most: int
) -> Mask:
    """The pairs where all conditions hold, exactly, for ``sizes`` (B, Hq, Sq, Sk) and scores of this dtype.

    The score_mod is what remembers them, if it is compared by identity. Rows of more than ``most`` intervals are holes.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        inputs, known = (b.new_zeros((), dtype=dtype), b, h, q_idx, kv_idx), dict[int, Any]()
        visible = b.new_ones((), dtype=torch.bool)
        for condition, value in masking.conditions:
            found = value_of(condition, inputs, known)
            visible = visible & (found if value else ~found)
        return visible

    kind = type(score_mod)
    is_key = kind.__hash__ is object.__hash__ and kind.__weakrefoffset__ != 0
    before = EVALUATED.get(score_mod) if is_key else None
    now = evaluate(mask_mod, sizes, torch.device("cpu"), before)
    if is_key:
        EVALUATED[score_mod] = now
    if now.mask.intervals > most:
        return Mask(holes=(Holes(mask_mod, now.sizes, torch.device("cpu"), {"q_idx", "kv_idx"}, trace=now.trace),))
    return now.mask


def _choice(node: Node) -> tuple[Any, Any, Any] | None:
    """The condition of a ``where`` or ``masked_fill``, its value where that is true, and elsewhere."""
    if len(node.arguments) != 3:
        return None
    first, second, third = node.arguments
    choices = {
        torch.where: (first, second, third),
        Tensor.where: (second, first, third),
        **dict.fromkeys((torch.masked_fill, Tensor.masked_fill), (second, third, first)),
    }
    chosen = choices.get(node.function)
    # where takes uint8, too, whose bits are no condition.
    return chosen if chosen is not None and chosen[0].dtype == torch.bool else None


def _is_always(x: object, number: float) -> bool:
    """Whether an expression is this number for every pair; captured tensors of one element are read."""
    if isinstance(x, Node):
        if x.form.depends_on():
            return False
        x = value_of(x, (), {})
    if isinstance(x, Tensor):
        return x.dim() == 0 and not x.requires_grad and bool(x == number)
    return isinstance(x, float) and x == number
