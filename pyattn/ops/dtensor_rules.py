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
from pyattn.options.schema import LEARNED

Placements = list[Any]

DIMS = (
    {
        "mask": -4,
        "bias": -4,
        "alibi_slopes": -2,
        "relative_bias": -3,
        "key_ranges": -3,
        "q_offset": -1,
        "q_offsets": -1,
        "dropout_origins": -2,
    },
    {"mask": -3, "bias": -3, "alibi_slopes": -1, "sinks": -1, "relative_bias": -2},
    {"mask": -2, "bias": -2, "key_ranges": -2},
)
"""The dimension of each option that indexes sequences, then those that index query heads and queries."""


def register() -> None:
    """Lets ``pyattn.attention`` take DTensors that are sharded over the batch or over heads, forward and backward.

    The batch is sharded only if its size is a multiple of the mesh's, heads only if the number of KV heads is:
    otherwise query heads would meet the wrong KV heads. A tensor sharded in any other way is gathered first. A second
    call does no harm.

    >>> from pyattn.ops import dtensor_rules
    >>> dtensor_rules.register()
    """
    for op, rows in ((ops.attention_forward, 3), (ops.attention_backward, 8)):
        register_sharding(op)(partial(_placements, op, rows))


def _placements(op: ops.Operator, rows: int, *args: Any, **named: Any) -> list[tuple[Placements, Placements]]:
    """The placements of results and arguments that DTensor may choose from; the first ``rows`` arguments are like q."""
    options = ops.arguments_of(op, args, named)
    found = []
    for dim in _dims(options["q"], options["k"], options):
        where = Replicate() if dim is None else Shard(dim)
        inputs = [
            (None if value is None else where) if i < rows else place(name, value, dim, 4)
            for i, (name, value) in enumerate(options.items())
        ]
        results = [where] * 4 if op is ops.attention_forward else [where] * 3 + _of_learned(options, dim)
        found.append((results, inputs[: len(args)]))
    return found


def _of_learned(options: dict[str, Any], dim: int | None) -> Placements:
    """The gradients of LEARNED; that of a replicated tensor is the sum of the shards' shares."""
    wanted = options["output_mask"] or (False,) * len(LEARNED)
    places = [place(name, options[name], dim, 4) if want else None for name, want in zip(LEARNED, wanted, strict=True)]
    return [Partial() if dim is not None and place == Replicate() else place for place in places]


def _dims(q: Any, k: Any, options: dict[str, Any]) -> list[int | None]:
    """The dimensions that may be sharded: None (replicated), the batch, the heads."""
    if options["dropout_p"]:
        return [None]
    return [None] + [dim for dim, size in enumerate((q.shape[0], k.shape[1])) if size % q.mesh.size() == 0]


def place(name: str, value: Any, dim: int | None, dims: int) -> Any:
    """An option's placement if q, of ``dims`` dimensions, is sharded in ``dim``.

    It is replicated if it lacks that dimension or broadcasts.
    """
    if not hasattr(value, "shape"):
        return None
    at = None if dim is None else DIMS[dim].get(name)
    if at is not None and name == "key_ranges" and len(value.shape) == dims:
        at -= 1  # several intervals
    if at is None or len(value.shape) < -at or value.shape[at] == 1:
        return Replicate()
    return Shard(len(value.shape) + at)
