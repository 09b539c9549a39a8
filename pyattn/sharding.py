"""DTensor's rules for the dense operators: sequences and heads don't know of each other, so either may be sharded.

:func:`register` makes them known to torch.distributed.tensor; nothing else in pyattn imports that. Without rules, and
for packed sequences, DTensor raises. With dropout all is replicated first, because a weight's draw depends on its
sequence and head among all.
"""

from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from pyattn import ops
from pyattn.ops.schema import LEARNED

Placements = list[Any]

DIMS = (
    {"mask": -4, "bias": -4, "alibi_slopes": -2, "key_ranges": -3, "q_offsets": -1},
    {"mask": -3, "bias": -3, "alibi_slopes": -1, "sinks": -1},
)
"""Where options that may have a place for each sequence, or for each query head, have it."""

ROWS = 8
"""How many arguments of backward lie like q."""


def register() -> None:
    """Lets ``pyattn.attention`` take DTensors that are sharded over the batch or over heads, forward and backward.

    A batch that the mesh does not divide stays together, and so do heads where it does not divide the KV heads: query
    heads would meet other KV heads. Everything else that comes sharded is gathered. It may be called again.

    >>> from pyattn import sharding
    >>> sharding.register()
    """
    register_sharding(ops.attention_forward)(_forward)
    register_sharding(ops.attention_backward)(_backward)


def _forward(*args: Any, **named: Any) -> list[tuple[Placements, Placements]]:
    options = ops.arguments_of(ops.attention_forward, args, named)
    found = []
    for dim in _dims(options["q"], options["k"], options):
        where = Replicate() if dim is None else Shard(dim)
        inputs = [where] * 3 + [_place(name, value, dim) for name, value in list(options.items())[3 : len(args)]]
        found.append(([where] * 4, inputs))
    return found


def _backward(*args: Any, **named: Any) -> list[tuple[Placements, Placements]]:
    options = ops.arguments_of(ops.attention_backward, args, named)
    found = []
    for dim in _dims(options["q"], options["k"], options):
        where = Replicate() if dim is None else Shard(dim)
        inputs = [
            (None if value is None else where) if i < ROWS else _place(name, value, dim)
            for i, (name, value) in enumerate(options.items())
        ]
        wanted = options["output_mask"] or (False, False, False)
        learned = []
        for name, want in zip(LEARNED, wanted, strict=True):
            place = _place(name, options[name], dim)
            # Each shard gives its own share of what all of them see.
            learned.append(None if not want else Partial() if dim is not None and place == Replicate() else place)
        found.append(([where] * 3 + learned, inputs[: len(args)]))
    return found


def _dims(q: Any, k: Any, options: dict[str, Any]) -> list[int | None]:
    """The dimensions that may be sharded: none, the batch, heads."""
    if options["dropout_p"]:
        return [None]
    return [None] + [dim for dim, size in enumerate((q.shape[0], k.shape[1])) if size % q.mesh.size() == 0]


def _place(name: str, value: Any, dim: int | None) -> Any:
    """Where an option lies if q is sharded in ``dim``: replicated where it has no such dimension, or broadcasts."""
    if not hasattr(value, "shape"):
        return None
    at = None if dim is None else DIMS[dim].get(name)
    if at is None or len(value.shape) < -at or value.shape[at] == 1:
        return Replicate()
    return Shard(len(value.shape) + at)
