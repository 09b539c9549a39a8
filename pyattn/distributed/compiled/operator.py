"""Functions as operators, into which torch.compile does not look: their messages depend on the values of all ranks."""

import builtins
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyattn import ops
from pyattn.distributed.agreement.ranks import Group, Ranks, groups_of, process_group, ranks_of
from pyattn.distributed.partial_results import PartialResults
from pyattn.options.schema import DEFAULTS, LEARNED, Options

FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""The public functions that are operators too, by name."""

_OPTIONS = str(ops.attention_forward._schema).partition("Tensor v, ")[2].rpartition(") ->")[0]
_OPTIONS = re.sub(r"=(\[.*?\]|[^,]+)", "", _OPTIONS)
"""Without defaults: the dispatcher drops arguments that are defaults, and autograd wants a gradient for each."""

_RESULTS = "Tensor out, Tensor lse, Tensor row_max, Tensor row_sum, Tensor seed, Tensor max_score"
_SAVED = "Tensor? dout, Tensor? dlse, Tensor out, Tensor row_max, Tensor row_sum"
_NUM_SAVED = 5

_library = torch.library.Library("pyattn_distributed", "DEF")

Given = dict[str, Any]
"""The arguments of an operator before its options, by name."""

Forward = Callable[[Given, Options], tuple[PartialResults, Tensor, Options]]
Backward = Callable[[Given, Options, Tensor, Tensor | None, PartialResults], Sequence[Tensor | None]]


def names_of(group: Group) -> list[str]:
    """The names of the groups, by which :func:`ranks_named` finds them: an operator takes no group."""
    groups = groups_of(group) if isinstance(group, DeviceMesh) else [process_group(group)]
    return [of.group_name for of in groups]


def ranks_named(groups: Sequence[Any]) -> list[Ranks]:
    """The ranks of the groups with these names: all, and of a mesh also those of this rank's column and row."""
    ranks, *parts = (ranks_of(_resolve_process_group(group)) for group in groups)
    return [ranks._replace(inner=parts[1].size) if parts else ranks, *parts]


def told(problem: Exception) -> str:
    """An error that a rank has while it compiles, for the operator to raise on all ranks when the graph runs."""
    return f"{type(problem).__name__}: {problem.args[0]}"  # torch.compile traces no str of an error


def known_error(given: Given) -> Exception | None:
    """The error that :func:`told` describes."""
    kind, _, message = given["error"].partition(": ")
    error: Exception | None = getattr(builtins, kind)(message) if kind else None
    return error


def placeholders(tensors: Sequence[Any], dims: int) -> list[Tensor]:
    """The tensors, and others for those that an operator that raises anyway could not take."""
    return [t if isinstance(t, Tensor) and t.dim() == dims else torch.zeros([1] * dims) for t in tensors]


class Operator:
    """``torch.ops.pyattn_distributed.NAME``, a whole call on one rank, and ``NAME_backward``, its backward.

    Both begin with the agreement of the ranks, as eager calls do.

    Attributes:
        call: the operator.

    Args:
        name: NAME.
        arguments: the schema of those before the options. Among them are q, v and these two: ``bool chosen``, whether
            the caller chose the seed, and ``bool[] wanted``, which of ``tensors`` and LEARNED need a gradient.
        tensors: the arguments with gradients.
        forward: ``forward(arguments, options)``: the results, max_score, and the options with rank 0's seed.
        backward: ``backward(arguments, options, dout, dlse, results)``: the gradients of ``tensors`` and LEARNED.
        shape: ``shape(arguments)``: that of max_score.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        tensors: Sequence[str],
        forward: Forward,
        backward: Backward,
        shape: Callable[[Given], Sequence[int]],
    ) -> None:
        self._forward, self._backward, self._shape = forward, backward, shape
        schema = f"{arguments}, {_OPTIONS}"
        _library.define(f"{name}({schema}) -> ({_RESULTS})")
        _library.define(f"{name}_backward({_SAVED}, {schema}) -> Tensor[]")
        names = name, f"{name}_backward"
        self.call: OpOverload
        self.call, self._call_backward = (getattr(torch.ops.pyattn_distributed, each).default for each in names)
        self._names = [argument.name for argument in self.call._schema.arguments]
        self._learned = [self._names.index(each) for each in (*tensors, *LEARNED)]
        runs = (self._run, self._fake), (self._run_backward, self._fake_backward)
        for each, (run, fake) in zip(names, runs, strict=True):
            _library.impl(each, run, "CompositeExplicitAutograd")
            torch.library.register_fake(f"pyattn_distributed::{each}", fake, lib=_library)
        torch.library.register_autograd(
            f"pyattn_distributed::{name}", self._differentiated, setup_context=self._save, lib=_library
        )

    def _parts(self, arguments: Sequence[Any]) -> tuple[Given, Options]:
        own = len(arguments) - len(DEFAULTS)
        return dict(zip(self._names[:own], arguments, strict=False)), Options(*arguments[own:])

    def _wanted(self, arguments: Sequence[Any]) -> list[int]:
        """The places of the arguments that need a gradient."""
        wanted = arguments[self._names.index("wanted")]
        return [place for place, want in zip(self._learned, wanted, strict=True) if want]

    def _run(self, *arguments: Any) -> tuple[Tensor, ...]:
        rows, max_score, options = self._forward(*self._parts(arguments))
        seed = torch.zeros((), dtype=torch.int64, device=rows.out.device)
        if options.dropout_p:
            seed.copy_(options.dropout_seed)
        results = rows.out, rows.lse, rows.row_max, rows.row_sum
        return *(t.contiguous() for t in results), seed, max_score

    def _run_backward(
        self, dout: Tensor | None, dlse: Tensor | None, out: Tensor, row_max: Tensor, row_sum: Tensor, *arguments: Any
    ) -> list[Tensor]:
        dout = torch.zeros_like(out) if dout is None else dout
        found = self._backward(*self._parts(arguments), dout, dlse, PartialResults(out, row_max, row_sum))
        by_place = zip(self._learned, found, strict=True)
        gradients = {place: gradient for place, gradient in by_place if gradient is not None}
        wanted = [(arguments[place], gradients[place]) for place in self._wanted(arguments)]
        return [gradient.sum_to_size(t.shape).to(t.dtype).contiguous() for t, gradient in wanted]

    def _fake(self, *arguments: Any) -> tuple[Tensor, ...]:
        given, _ = self._parts(arguments)
        q, v = given["q"], given["v"]
        wide = torch.promote_types(q.dtype, torch.float32)
        rows = q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0])
        numbers = [q.new_empty(rows, dtype=wide) for _ in range(3)]
        seed, max_score = q.new_empty((), dtype=torch.int64), q.new_empty(self._shape(given), dtype=wide)
        return q.new_empty(*q.shape[:-1], v.shape[-1]), *numbers, seed, max_score

    def _fake_backward(self, *arguments: Any) -> list[Tensor]:
        call = arguments[_NUM_SAVED:]
        return [call[place].new_empty(call[place].shape) for place in self._wanted(call)]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        out, _, row_max, row_sum, seed, _ = output
        arguments = list(inputs)
        if inputs[self._names.index("dropout_p")]:
            arguments[self._names.index("dropout_seed")] = seed
        values, ctx.structure = tree_flatten(arguments)
        ctx.values = [Tensor if isinstance(value, Tensor) else value for value in values]
        ctx.save_for_backward(out, row_max, row_sum, *(value for value in values if isinstance(value, Tensor)))

    def _differentiated(self, ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Any, ...]:
        out, row_max, row_sum, *others = ctx.saved_tensors
        tensors = iter(others)
        values = [next(tensors) if value is Tensor else value for value in ctx.values]
        arguments = tree_unflatten(values, ctx.structure)
        found = self._call_backward(dout, dlse, out, row_max, row_sum, *arguments)
        lists = (isinstance(value, (list, tuple)) and all(isinstance(x, Tensor) for x in value) for value in arguments)
        gradients: list[Any] = [
            [None] * len(value) if listed else None for value, listed in zip(arguments, lists, strict=True)
        ]
        for place, gradient in zip(self._wanted(arguments), found, strict=True):
            gradients[place] = gradient
        return tuple(gradients)
