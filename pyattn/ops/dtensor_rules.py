"""DTensor's rules for the dense operators: sequences and heads are independent, so either may be sharded.

:func:`register` passes them to torch.distributed.tensor, which nothing else in pyattn imports. Without rules, and for
packed sequences, DTensor raises. With dropout everything is replicated first, because a weight's draw depends on the
global numbers of its sequence and head; :mod:`pyattn.distributed` computes those calls, and sharded sequences.
"""

from functools import partial
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from pyattn import ops
from pyattn.options.axes import AXES, PACKED_AXES, PACKED_TENSORS, TENSORS, dims_of
from pyattn.options.schema import LEARNED

Placements = list[Any]

BATCH, HEADS, POSITIONS = "b", "h", "q"
"""The axes over which calls may be divided: sequences, query heads with their KV heads, queries."""


def register() -> None:
    """Lets ``pyattn.attention`` take DTensors that are sharded over the batch or over heads, forward and backward.

    The batch is sharded only if its size is a multiple of the mesh's, heads only if the number of KV heads is:
    otherwise query heads would meet the wrong KV heads. A tensor sharded in any other way is gathered first. A second
    call does no harm.

    >>> from pyattn.ops import dtensor_rules
    >>> dtensor_rules.register()
    """
    for op in (ops.attention_forward, ops.attention_backward):
        register_sharding(op)(partial(_placements, op))


def _placements(op: ops.Operator, *args: Any, **named: Any) -> list[tuple[Placements, Placements]]:
    """The placements of results and arguments that DTensor may choose from."""
    given = ops.arguments_of(op, args, named)
    found = []
    for axis in _axes(given["q"], given["k"], given):
        inputs = [place(name, value, axis) for name, value in given.items()]
        where = Replicate() if axis is None else place("out", given["q"], axis)
        results = [where] * 4 if op is ops.attention_forward else [where] * 3 + _of_learned(given, axis)
        found.append((results, inputs[: len(args)]))
    return found


def _of_learned(given: dict[str, Any], axis: str | None) -> Placements:
    """The gradients of LEARNED; that of a replicated tensor is the sum of the shards' shares."""
    wanted = given["output_mask"] or (False,) * len(LEARNED)
    places = [place(name, given[name], axis) if want else None for name, want in zip(LEARNED, wanted, strict=True)]
    return [Partial() if axis is not None and place == Replicate() else place for place in places]


def _axes(q: Any, k: Any, given: dict[str, Any]) -> list[str | None]:
    """The axes over which a call may be divided: none (replicated), the batch, the heads."""
    if given["dropout_p"]:
        return [None]
    sizes = {BATCH: q.shape[0], HEADS: k.shape[1]}
    return [None, *(axis for axis, size in sizes.items() if size % q.mesh.size() == 0)]


def place(name: str, value: Any, axis: str | None, packed: bool = False) -> Any:
    """A tensor's placement if a call is divided along an axis: replicated if it lacks that axis or broadcasts."""
    if not hasattr(value, "shape"):
        return None
    axes = (PACKED_AXES | PACKED_TENSORS if packed else AXES | TENSORS).get(name)
    dims = dims_of(axes, value) if axes else {}
    at = dims.get("g" if axis == HEADS and "g" in dims else axis) if axis else None
    return Replicate() if at is None else Shard(len(value.shape) + at)
