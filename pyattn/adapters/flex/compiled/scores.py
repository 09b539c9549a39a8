"""A score_mod of the user's own in a compiled graph: one operator, and one for its backward."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyattn import attention, ops
from pyattn.adapters.flex.compiled import operators
from pyattn.adapters.flex.compiled.operators import Operator, define
from pyattn.adapters.flex.compiled.programs import (
    PROGRAMS,
    absolute_among,
    calls_abs,
    captures_arguments,
    graph_in_progress,
    name_of,
)
from pyattn.adapters.flex.masks.dense_mask import Holes
from pyattn.adapters.flex.native_forms import Mask, Score, ScoreMod, native_options
from pyattn.adapters.flex.scores.attend import attend_in_blocks, gradients_in_blocks, meaning_of
from pyattn.adapters.flex.scores.score_blocks import ScoredCall
from pyattn.adapters.flex.trace.evaluation import outermost
from pyattn.adapters.flex.trace.expressions import mapped
from pyattn.adapters.flex.trace.recording import Recording
from pyattn.adapters.flex.trace.trace import MOST_BYTES
from pyattn.derivatives import autograd
from pyattn.derivatives.second_order import never, save, saved
from pyattn.derivatives.tangents import DENSE
from pyattn.options.autocast import cast
from pyattn.options.parse import parse


class Inputs(NamedTuple):
    """The operator's arguments: tensors, then a mask as in :class:`pyattn.adapters.flex.native_forms.Mask`.

    Attributes:
        learned: which captured tensors need a gradient.
        program: the name of the score_mod.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    captured: Sequence[Tensor]
    numbers: Sequence[float]
    learned: Sequence[bool]
    window: Sequence[int]
    offset: int
    offsets: Tensor | None
    ranges: Sequence[Tensor]
    intervals: int
    holes: Sequence[Tensor]
    program: str
    scale: float | None

    def mask(self) -> Mask:
        """The mask."""
        left, right = self.window
        return Mask(
            (left, right),
            self.offset if self.offsets is None else self.offsets,
            tuple(functools.partial(_first, x) for x in self.ranges),
            tuple(map(Holes.given, self.holes)),
            self.intervals,
        )

    def with_learned(self) -> "Inputs":
        """The same with captured tensors that require a gradient if they are learned."""
        captured = [x.detach().requires_grad_(y) for x, y in zip(self.captured, self.learned, strict=True)]
        return self._replace(captured=captured)

    def meaning(self) -> tuple[Score, Mask] | ScoredCall:
        """The score_mod and the mask as native options, or else as what blocks share."""
        program = PROGRAMS.get(self.program)
        if program is None:
            raise RuntimeError(f"pyattn: a score_mod must be compiled in the process that runs it, got {self.program}")
        replayed = program.replayed
        return meaning_of(
            lambda *x: replayed(x, self.captured, self.numbers), self.q, self.k, self.mask(), self.scale, program
        )

    def options(self, score: Score, mask: Mask) -> tuple[Any, ...]:
        """The arguments of the native operators after q, k and v."""
        return parse(attention, native_options(score, mask, self.q, self.k, self.scale), self.q.device)


def _first(x: Tensor, *_: object) -> Tensor:
    return x


CAPTURED = Inputs._fields.index("captured")
SAVED = 5
"""How many arguments the backward operator has before those of the forward one."""

UNSEEN = "pyattn: a score_mod of your own must not read attributes or parts of what depends on its arguments"

UNRECORDED = (
    "pyattn: a score_mod of your own must not switch gradients on or off, nor give a function of torch anything but "
    "tensors and constants"
)


def attend_in_graph(
    score_mod: ScoreMod, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float | None
) -> tuple[Tensor, Tensor] | None:
    """out and lse in the graph that dynamo builds; None if it can't record the score_mod there."""
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_exporting():
        return None
    graph = graph_in_progress()
    q, k, v = cast(query), cast(key), cast(value)
    arguments = operators.arguments(torch.promote_types(q.dtype, torch.float32))
    recording = Recording(arguments, _copied)
    with recording:
        result = score_mod(*arguments)
    if graph is None or graph != graph_in_progress():
        return None  # the score_mod broke the graph: what ran is one pair
    if recording.switches or not recording.is_known:
        torch._dynamo.graph_break(msg=f"{UNRECORDED}, got fullgraph=True")
        return None
    returned = mapped(recording.named, result)
    absolute = _absolute(recording) if calls_abs() else ()
    program = name_of(tuple(recording.calls), returned, absolute)
    offset, offsets = (0, _copied(mask.offset)) if isinstance(mask.offset, Tensor) else (mask.offset, None)
    inputs = Inputs(
        q=q,
        k=k,
        v=v,
        captured=recording.read,
        numbers=recording.numbers,
        learned=[x.requires_grad and torch.is_grad_enabled() for x in recording.captured],
        window=list(mask.window),
        offset=offset,
        offsets=offsets,
        ranges=[part(q.shape[2], k.shape[2], q.device) for part in mask.ranges],
        intervals=mask.intervals,
        holes=[x.bits() for x in mask.holes],
        program=program,
        scale=scale,
    )
    out, lse, _, _ = scored(*inputs)
    if captures_arguments(CAPTURED, tuple([name for name, _ in absolute])):
        torch._dynamo.graph_break(msg=f"{UNSEEN}, got fullgraph=True")
        return None
    return out, lse


def _absolute(recording: Recording) -> tuple[tuple[str, str], ...]:
    """The names of captured tensors that are the abs of others, and those of these."""
    tensors = list(recording.names)
    for x in (*recording.captured, *tensors):
        operators.copied(x)  # marks the tensors' nodes in the graph, which drops unused results
    found = absolute_among(len(recording.captured), len(tensors))
    return tuple([(f"%captured{number}", recording.names[tensors[of]]) for number, of in found])


def _copied(x: Tensor) -> Tensor:
    """A copy of ``x`` for backward, if it is small: graphs write changes in place to inputs that they have saved."""
    is_small = x.layout == torch.strided and x.numel() * x.itemsize <= MOST_BYTES
    return operators.copied(x) if is_small else x


@outermost
@torch.no_grad()
def _scored(*arguments: Any) -> tuple[Tensor, ...]:
    given = Inputs(*arguments).with_learned()
    q, k, v, *_ = given
    meaning = given.meaning()
    if not isinstance(meaning, ScoredCall):
        return autograd.attend(DENSE, q, k, v, given.options(*meaning))
    out, lse = attend_in_blocks(meaning, q, k, v)
    like, *_ = _fake_scored(q.to("meta"), k.to("meta"), v.to("meta"))
    return _in_layout_of(like, out), lse, torch.zeros_like(lse), torch.zeros_like(lse)


def _fake_scored(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return ops.attention_forward(q, k, v)


@outermost
def _scored_backward(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, row_max: Tensor, row_sum: Tensor, *arguments: Any
) -> list[Tensor]:
    given = Inputs(*arguments).with_learned()
    q, k, v = rows = [x.detach().requires_grad_() for x in (given.q, given.k, given.v)]
    leaves = [*rows, *(x for x in given.captured if x.requires_grad)]
    meaning = given.meaning()
    found: list[Tensor | None]
    if isinstance(meaning, ScoredCall):
        with torch.no_grad():
            dq, dk, dv, *of_captured = gradients_in_blocks(meaning, dout, dlse, q, k, v, *meaning.read())
        found = [dq, dk, dv]
        if of_captured:
            found += torch.autograd.grad(meaning.captured, leaves[3:], of_captured, allow_unused=True)
    else:
        lse = row_max.new_empty(out.shape[:3])  # no derivative reads its values
        known = out.detach(), lse, row_max.detach(), row_sum.detach()
        again = dataclasses.replace(DENSE, forward=lambda *_: known)
        results = autograd.Attention.apply(again, q, k, v, *given.options(*meaning))  # type: ignore[no-untyped-call]
        pairs = [(x, dx) for x, dx in zip(results, (dout, dlse), strict=False) if dx is not None]
        reached, moved = zip(*pairs, strict=True)
        found = list(torch.autograd.grad(reached, leaves, moved, allow_unused=True))
    gradients = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(leaves, found, strict=True)]
    return [_in_layout_of(torch.empty_like(x, device="meta"), dx) for x, dx in zip(leaves, gradients, strict=True)]


def _fake_scored_backward(*arguments: Any) -> list[Tensor]:
    given = Inputs(*arguments[SAVED:])
    learned = [x for x, wanted in zip(given.captured, given.learned, strict=True) if wanted]
    return [torch.empty_like(x) for x in (given.q, given.k, given.v, *learned)]


def _in_layout_of(like: Tensor, x: Tensor) -> Tensor:
    """``x`` with the strides of ``like``, on meta, which the graph expects."""
    return x if x.stride() == like.stride() else torch.empty_strided(x.shape, like.stride(), dtype=x.dtype).copy_(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, _, row_max, row_sum = output
    values, ctx.structure = tree_flatten((out, row_max, row_sum, *inputs))
    save(ctx, values, forward_mode=False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
    out, row_max, row_sum, *inputs = tree_unflatten(saved(ctx), ctx.structure)
    given = Inputs(*inputs)
    # Autograd expects a list for a list of tensors; an empty list of anything is one.
    none = [[None] * len(x) if isinstance(x, list) and all(isinstance(y, Tensor) for y in x) else None for x in given]
    if dout is None and dlse is None:
        return tuple(none)
    dq, dk, dv, *moved = scored_backward(dout, dlse, out, row_max, row_sum, *given)
    each = iter(moved)
    return dq, dk, dv, [next(each) if wanted else None for wanted in given.learned], *none[CAPTURED + 1 :]


_GIVEN = (
    "Tensor q, Tensor k, Tensor v, Tensor[] captured, Scalar[] numbers, bool[] learned, SymInt[] window, "
    "SymInt offset, Tensor? offsets, Tensor[] ranges, SymInt intervals, Tensor[] holes, str program, float? scale"
)
_SAVED = "Tensor? dout, Tensor? dlse, Tensor out, Tensor row_max, Tensor row_sum"

_SECOND = never("pyattn: second derivatives of a score_mod of your own are not implemented in compiled graphs")

scored: Operator = define(
    f"scored({_GIVEN}) -> (Tensor out, Tensor lse, Tensor row_max, Tensor row_sum)",
    _scored,
    _fake_scored,
    _backward,
    _save,
)
scored_backward: Operator = define(
    f"scored_backward({_SAVED}, {_GIVEN}) -> Tensor[]", _scored_backward, _fake_scored_backward, _SECOND
)
