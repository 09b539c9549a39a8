"""The functions as operators, into which torch.compile does not look: their messages depend on the values of all ranks.

``torch.ops.pyattn_distributed.attend`` is a whole call on one rank, ``attend_backward`` its backward. Both begin with
the agreement of the ranks, as eager calls do.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh

from pyattn import ops
from pyattn.autocast import cast
from pyattn.distributed.call import Call, Parsed, agreed
from pyattn.distributed.max_score import of_ranks
from pyattn.distributed.ranks import Group, groups_of, ranks_of
from pyattn.distributed.ring import Ring
from pyattn.distributed.rows import Rows
from pyattn.distributed.ulysses import Ulysses, by_heads
from pyattn.distributed.usp import by_mesh
from pyattn.ops.schema import LEARNED, PLACES, Options
from pyattn.options import AttentionOptions

FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""The public functions that are operators too, by name."""

_OPTIONS = str(ops.attention_forward._schema).partition("Tensor v, ")[2].rpartition(") ->")[0]
_OPTIONS = re.sub(r"=(\[.*?\]|[^,]+)", "", _OPTIONS)
"""Without defaults: the dispatcher drops arguments that are defaults, and autograd wants a gradient for each."""

_CALL = "str name, str[] groups, str layout, bool chosen, bool max_score, "
_CALL += f"Tensor q, Tensor k, Tensor v, Tensor[] begins, {_OPTIONS}"
_RESULTS = "Tensor out, Tensor lse, Tensor row_max, Tensor row_sum, Tensor seed, Tensor max_score"
_SAVED = "bool[4] wanted, Tensor? dout, Tensor? dlse, Tensor out, Tensor row_max, Tensor row_sum"

_library = torch.library.Library("pyattn_distributed", "DEF")
_library.define(f"attend({_CALL}) -> ({_RESULTS})")
_library.define(f"attend_backward({_SAVED}, {_CALL}) -> Tensor[]")
_attend, _attend_backward = (
    getattr(torch.ops.pyattn_distributed, name).default for name in ("attend", "attend_backward")
)
_TENSORS, _BEGINS, _FIRST_OPTION = slice(5, 8), 8, 9


def compiled(
    function: Callable[..., Any],
    tensors: tuple[Tensor, Tensor, Tensor],
    group: Group,
    layout: str,
    options: AttentionOptions,
    max_score: bool,
    begins: tuple[Tensor, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_score) of a call that torch.compile traces."""
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        groups = groups_of(group)
    elif isinstance(group, dist.ProcessGroup):
        groups = [group]
    else:
        raise TypeError(f"pyattn: group must be a ProcessGroup or a DeviceMesh, got {type(group).__name__}")
    parsed = Parsed.of(function, options, tensors[0].device)
    place = function.__name__, [of.group_name for of in groups], layout, parsed.chosen, max_score
    out, lse, *_, most = _attend(*place, *map(cast, tensors), list(begins), *parsed.options)
    return out, lse, most.detach()


def _agreed(arguments: tuple[Any, ...]) -> tuple[Call, Ring | Ulysses]:
    name, groups, layout, chosen, max_score, q, k, v, cu_seqlens, *given = arguments
    ranks, *parts = (ranks_of(_resolve_process_group(group)) for group in groups)
    if parts:
        ranks = ranks._replace(inner=parts[1].size)
    begins = [t.tolist() for t in cu_seqlens]
    call = agreed(FUNCTIONS[name], (q, k, v), ranks, layout, Parsed(Options(*given), chosen), max_score, begins)
    if name == "usp_attention":
        return call, Ulysses(call, lambda call: by_mesh(call, layout, *parts))
    if name == "ulysses_attention":
        return call, Ulysses(call, lambda call: by_heads(call, layout))
    return call, Ring(call)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    call, method = _agreed(arguments)
    rows, largest = method.forward(call.q, call.k, call.v)
    most = of_ranks(call, largest) if call.max_score else rows.lse.new_empty(0)
    seed = torch.zeros((), dtype=torch.int64, device=call.q.device)
    if call.options.dropout_p:
        seed.copy_(call.options.dropout_seed)
    return rows.out, rows.lse, rows.row_max, rows.row_sum, seed, most


def _backward(
    wanted: list[bool],
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    *arguments: Any,
) -> list[Tensor]:
    call, method = _agreed(arguments)
    dout = torch.zeros_like(out) if dout is None else dout
    rows = Rows(out, row_max, row_sum)
    found = method.backward(dout, dlse, call.q, call.k, call.v, rows, wanted)
    given = call.q, call.k, call.v, *(getattr(call.options, name) for name in LEARNED)
    return [g.to(t.dtype) for g, t in zip(found, given, strict=True) if g is not None]


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    q, _, v = arguments[_TENSORS]
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0])
    numbers = [q.new_empty(rows, dtype=wide) for _ in range(3)]
    most = (rows[0] if q.dim() == 4 else arguments[_BEGINS][0].shape[0] - 1, q.shape[1]) if arguments[4] else (0,)
    seed = q.new_empty((), dtype=torch.int64)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), *numbers, seed, q.new_empty(most, dtype=wide)


def _fake_backward(wanted: list[bool], *arguments: Any) -> list[Tensor]:
    call = arguments[5:]
    learned = [call[_FIRST_OPTION + PLACES[name]] for name in LEARNED]
    tensors = [*call[_TENSORS], *(t for t, want in zip(learned, wanted, strict=True) if want)]
    return [t.new_empty(t.shape) for t in tensors]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    out, _, row_max, row_sum, seed, _ = output
    *before, begins = inputs[:_FIRST_OPTION]
    options = Options(*inputs[_FIRST_OPTION:])
    if options.dropout_p:
        options = options._replace(dropout_seed=seed)
    ctx.tensors = [isinstance(x, Tensor) for x in (*before, *options)]
    ctx.values = [None if isinstance(x, Tensor) else x for x in (*before, *options)]
    ctx.begins = len(begins)
    ctx.save_for_backward(out, row_max, row_sum, *begins, *(x for x in (*before, *options) if isinstance(x, Tensor)))


def _differentiated(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    out, row_max, row_sum, *others = ctx.saved_tensors
    begins, tensors = others[: ctx.begins], iter(others[ctx.begins :])
    arguments = [next(tensors) if at else value for at, value in zip(ctx.tensors, ctx.values, strict=True)]
    arguments[3] = True  # the seed is the forward's, on all ranks
    places = [_FIRST_OPTION + PLACES[name] for name in LEARNED]
    wanted = [ctx.needs_input_grad[place] for place in places]
    call = [*arguments[: _FIRST_OPTION - 1], begins, *arguments[_FIRST_OPTION - 1 :]]
    found = iter(_attend_backward(wanted, dout, dlse, out, row_max, row_sum, *call))
    gradients: list[Any] = [None] * len(call)
    gradients[_TENSORS] = [next(found) for _ in range(3)]
    gradients[_FIRST_OPTION - 1] = [None] * len(begins)
    for place, want in zip(places, wanted, strict=True):
        gradients[place] = next(found) if want else None
    return tuple(gradients)


for _name, _run, _fake in (("attend", _forward, _fake_forward), ("attend_backward", _backward, _fake_backward)):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pyattn_distributed::{_name}", _fake, lib=_library)
torch.library.register_autograd("pyattn_distributed::attend", _differentiated, setup_context=_save, lib=_library)
