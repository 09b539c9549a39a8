"""A score_mod of the user's own in a compiled graph: one operator, and one for its backward."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import noop_mask
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyattn import attention, ops
from pyattn.adapters.flex.any_score import attend_in_blocks, gradients_in_blocks, meaning_of
from pyattn.adapters.flex.evaluation import in_new_thread
from pyattn.adapters.flex.holes import Holes
from pyattn.adapters.flex.meaning import Mask, Score, ScoreMod, key_ranges_of
from pyattn.adapters.flex.native import native_options
from pyattn.adapters.flex.program import PROGRAMS, captures_arguments, graph_in_progress, name_of
from pyattn.adapters.flex.recording import Recording
from pyattn.adapters.flex.row_blocks import Call
from pyattn.autocast import cast
from pyattn.derivatives import autograd
from pyattn.derivatives.second_order import never, save, saved
from pyattn.derivatives.tangents import DENSE
from pyattn.parse import parse


class Inputs(NamedTuple):
    """The operator's arguments: tensors, then a mask as :class:`pyattn.adapters.flex.meaning.Mask` has it.

    Attributes:
        learned: which captured tensors need a gradient.
        program: the name of the score_mod.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    captured: Sequence[Tensor]
    integers: Sequence[int]
    learned: Sequence[bool]
    window: Sequence[int]
    offset: int
    offsets: Tensor | None
    ranges: Tensor | None
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
            () if self.ranges is None else (lambda *_: self.ranges,),
            tuple(Holes(noop_mask, tuple(x.shape), x.device, frozenset(), x) for x in self.holes),
            self.intervals,
        )

    def differentiable(self) -> tuple["Inputs", list[Tensor]]:
        """The same with leaves of a graph in place of tensors that need a gradient, and these."""
        q, k, v = (x.detach().requires_grad_() for x in self[:3])
        captured = [x.detach().requires_grad_(y) for x, y in zip(self.captured, self.learned, strict=True)]
        return self._replace(q=q, k=k, v=v, captured=captured), [q, k, v, *(x for x in captured if x.requires_grad)]

    def meaning(self) -> tuple[Score, Mask] | Call:
        """The score_mod and the mask as native options, or else as what blocks share."""
        program = PROGRAMS.get(self.program)
        if program is None:
            raise RuntimeError(f"pyattn: a graph must run in the process that compiled it, got {self.program!r}")
        score_mod = program.score_mod(program.as_before(self.captured), self.integers)
        return meaning_of(score_mod, self.q, self.k, self.mask(), self.scale, program)

    def options(self, score: Score, mask: Mask) -> tuple[Any, ...]:
        """What the native operators take after q, k and v."""
        return parse(attention, native_options(score, mask, self.q, self.k, self.scale), self.q.device)


CAPTURED = Inputs._fields.index("captured")


def attend_in_graph(
    score_mod: ScoreMod, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float | None
) -> tuple[Tensor, Tensor] | None:
    """out and lse in the graph that is compiled; None if dynamo can't record the score_mod in it."""
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_exporting():
        return None
    graph = graph_in_progress()
    q, k, v = cast(query), cast(key), cast(value)
    arguments = torch.ops.pyattn_flex.arguments(torch.promote_types(q.dtype, torch.float32))
    recording = Recording(arguments)
    with recording:
        result = score_mod(*arguments)
    if graph is None or graph != graph_in_progress():
        return None  # the score_mod broke the graph: it ran on one pair only
    code = recording.encoded(result)
    program = name_of(tuple(recording.calls), code)
    learned = [x.requires_grad and torch.is_grad_enabled() for x in recording.captured]
    offset, offsets = (0, mask.offset) if isinstance(mask.offset, Tensor) else (mask.offset, None)
    ranges = key_ranges_of(Mask(ranges=mask.ranges), q.shape[2], k.shape[2], q.device) if mask.ranges else None
    holes = [x.bits() for x in mask.holes]
    of_mask = list(mask.window), offset, offsets, ranges, mask.intervals, holes
    of_score = recording.captured, recording.integers, learned
    out, lse, _, _ = torch.ops.pyattn_flex.scored(q, k, v, *of_score, *of_mask, program, scale)
    return None if captures_arguments(CAPTURED) else (out, lse)


def _arguments(dtype: torch.dtype) -> list[Tensor]:
    """Those of a score_mod for a pair."""
    return [torch.zeros((), dtype=dtype), *(torch.zeros((), dtype=torch.int64) for _ in range(4))]


def _scored(*arguments: Any) -> tuple[Tensor, ...]:
    @torch.no_grad()
    def rows() -> tuple[Tensor, ...]:
        given, _ = Inputs(*arguments).differentiable()
        meaning, (q, k, v, *_) = given.meaning(), given
        if not isinstance(meaning, Call):
            return autograd.attend(DENSE, q, k, v, given.options(*meaning))
        out, lse = attend_in_blocks(meaning, q, k, v)
        like, *_ = _fake_scored(q.to("meta"), k.to("meta"), v.to("meta"))
        return _in_layout_of(like, out), lse, torch.zeros_like(lse), torch.zeros_like(lse)

    return in_new_thread(rows)


def _fake_scored(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    rows: tuple[Tensor, ...] = ops.attention_forward(q, k, v)
    return rows


def _scored_backward(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, row_max: Tensor, row_sum: Tensor, *arguments: Any
) -> list[Tensor]:
    def gradients() -> list[Tensor]:
        given, leaves = Inputs(*arguments).differentiable()
        meaning, (q, k, v, *_) = given.meaning(), given
        if isinstance(meaning, Call):
            with torch.no_grad():
                found = gradients_in_blocks(meaning, dout, dlse, q, k, v, *meaning.captured)
            by_leaf = dict(zip(map(id, [q, k, v, *meaning.captured]), found, strict=True))
            gradients = [by_leaf.get(id(x)) for x in leaves]
        else:
            lse = row_max.new_empty(out.shape[:3])  # no derivative reads it
            known = out.detach(), lse, row_max.detach(), row_sum.detach()
            kind = dataclasses.replace(DENSE, forward=lambda *_: known)
            rows = autograd.attend(kind, q, k, v, given.options(*meaning))
            reached = [(x, dx) for x, dx in zip(rows, (dout, dlse), strict=False) if dx is not None]
            reached, given_gradients = zip(*reached, strict=True)
            gradients = torch.autograd.grad(reached, leaves, given_gradients, allow_unused=True)
        laid = zip([torch.empty_like(x, device="meta") for x in leaves], leaves, gradients, strict=True)
        return [_in_layout_of(like, torch.zeros_like(x) if dx is None else dx) for like, x, dx in laid]

    return in_new_thread(gradients)


def _fake_scored_backward(*arguments: Any) -> list[Tensor]:
    given = Inputs(*arguments[5:])
    learned = [x for x, wanted in zip(given.captured, given.learned, strict=True) if wanted]
    return [torch.empty_like(x) for x in (*given[:3], *learned)]


def _in_layout_of(like: Tensor, x: Tensor) -> Tensor:
    """``x`` with the strides of a tensor on meta, which a graph expects."""
    return x if x.stride() == like.stride() else torch.empty_strided(x.shape, like.stride(), dtype=x.dtype).copy_(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, _, row_max, row_sum = output
    values, ctx.structure = tree_flatten((out, row_max, row_sum, *inputs))
    save(ctx, values, forward_mode=False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
    arguments = tree_unflatten(saved(ctx), ctx.structure)
    given = Inputs(*arguments[3:])
    # Autograd takes a list for a list of tensors, which it also sees in other empty ones.
    none = [[None] * len(x) if isinstance(x, list) and all(isinstance(y, Tensor) for y in x) else None for x in given]
    if dout is None and dlse is None:
        return tuple(none)
    *moved, = torch.ops.pyattn_flex.scored_backward(dout, dlse, *arguments)
    each = iter(moved[3:])
    gradients = Inputs(*none)._replace(captured=[next(each) if wanted else None for wanted in given.learned])
    return *moved[:3], *gradients[3:]


_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor[] captured, SymInt[] integers, bool[] learned, SymInt[] window, "
    "SymInt offset, Tensor? offsets, Tensor? ranges, SymInt intervals, Tensor[] holes, str program, float? scale"
)
_SAVED = "Tensor? dout, Tensor? dlse, Tensor out, Tensor row_max, Tensor row_sum"

_library = torch.library.Library("pyattn_flex", "FRAGMENT")


def _define(schema: str, run: Any, fake: Any) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pyattn_flex::{name}", fake, lib=_library)


_define("arguments(ScalarType dtype) -> Tensor[]", _arguments, _arguments)
_define(f"scored({_SCHEMA}) -> (Tensor out, Tensor lse, Tensor row_max, Tensor row_sum)", _scored, _fake_scored)
_define(f"scored_backward({_SAVED}, {_SCHEMA}) -> Tensor[]", _scored_backward, _fake_scored_backward)
torch.library.register_autograd("pyattn_flex::scored", _backward, setup_context=_save, lib=_library)
torch.library.register_autograd(
    "pyattn_flex::scored_backward",
    never("pyattn: second derivatives of a score_mod of your own must be computed outside of compiled graphs").__func__,
    lib=_library,
)
