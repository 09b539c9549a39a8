"""The dimensions of each tensor of a call, written once, and the parts of options that belong to part of a call.

A string has one word for each dimension::

    b  sequences        q  queries        d, e  columns of k, of v        x?   that size, or 1 for all
    h  query heads      k  keys           r     distances                 (x)  may be missing
    g  KV heads         n  intervals or entries of a list    2     that number

Dimensions in parentheses are left out from the left: (q, k), (h, q, k) and (b, h, q, k) all fit ``(b?) (h?) (q?) k?``.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pyattn.options.attention_options import OPTIONS

Index = slice | Tensor | None
"""Some of the numbers along an axis: a slice, or int64 indices; None: all."""

Named = TypeVar("Named", bound=NamedTuple)

_OPERATORS = {"q_offsets": "b", "dropout_origins": "b? 5"}
"""Options of the operators alone."""

AXES: dict[str, str] = {name: o.axes for name, o in OPTIONS.items() if o.axes is not None} | _OPERATORS
"""The axes of every option that may be a tensor."""

PACKED_AXES: dict[str, str] = AXES | {name: option.packed for name, option in OPTIONS.items() if option.packed}
"""The same for packed sequences."""

TENSORS: dict[str, str] = (
    {"q": "b h q d", "k": "b g k d", "v": "b g k e"}
    | dict.fromkeys(("out", "dout"), "b h q e")
    | dict.fromkeys(("lse", "dlse", "row_max", "row_sum"), "b h q")
)
"""The axes of an operator's other tensors."""

PACKED_TENSORS: dict[str, str] = (
    {"q": "q h d", "k": "k g d", "v": "k g e"}
    | dict.fromkeys(("out", "dout"), "q h e")
    | dict.fromkeys(("lse", "dlse", "row_max", "row_sum"), "h q")
)


def _forms(axes: str) -> dict[int, tuple[str, ...]]:
    """The words for a tensor's dimensions, by how many it has."""
    words = axes.split()
    optional = [at for at, word in enumerate(words) if word.startswith("(")]
    without = [{*optional[:count]} for count in range(len(optional) + 1)]
    forms = [tuple(word.strip("()") for at, word in enumerate(words) if at not in left_out) for left_out in without]
    return {len(form): form for form in forms}


FORMS = {axes: _forms(axes) for table in (AXES, PACKED_AXES, TENSORS, PACKED_TENSORS) for axes in table.values()}
"""Made here once: torch.compile traces no caches."""


def words_of(axes: str, dims: int) -> tuple[str, ...]:
    """The words for the dimensions of a tensor that has that many; none if it has too many or too few."""
    return FORMS[axes].get(dims, ())


def dims_of(axes: str, tensor: Any) -> dict[str, int]:
    """The dimension of each axis along which the tensor has its own values, counted from the last one.

    An axis that is missing, or of size 1 for all, is left out.
    """
    words = words_of(axes, len(tensor.shape))
    sizes = zip(words, range(-len(words), 0), strict=True)
    return {word[0]: dim for word, dim in sizes if not (word.endswith("?") and tensor.shape[dim] == 1)}


def dim_of(axis: str, axes: str, tensor: Tensor) -> int:
    """The dimension of an axis that the tensor has, whatever its size, counted from the last one."""
    letters = [word[0] for word in words_of(axes, tensor.dim())]
    return letters.index(axis) - len(letters)


def part(axes: str, tensor: Tensor, index: Mapping[str, Index]) -> Tensor:
    """The part of a tensor for some of the numbers along its axes; slices share its memory."""
    for axis, dim in dims_of(axes, tensor).items():
        chosen = index.get(axis)
        if isinstance(chosen, Tensor):
            tensor = tensor.index_select(dim, chosen)
        elif chosen is not None:  # indexing would take an alias of the whole, for which torch's older vmap has no rule
            tensor = torch.ops.aten.slice(tensor, dim, chosen.start, chosen.stop)
    return tensor


def kv_heads(heads: Index, num_heads: int, num_heads_kv: int) -> Index:
    """The KV heads of some of ``num_heads`` query heads: a slice if these are whole groups, else one for each head."""
    group = num_heads // max(1, num_heads_kv)
    if isinstance(heads, Tensor):
        return heads // max(1, group)
    if heads is None or group <= 1:
        return heads
    first, after_last, _ = heads.indices(num_heads)
    if first % group or after_last % group:
        return torch.arange(first, after_last) // group
    return slice(first // group, after_last // group)


def parts(
    options: Mapping[str, Any],
    *,
    batch: Index = None,
    heads: Index = None,
    rows: Index = None,
    keys: Index = None,
    packed: bool = False,
    num_heads: int = 0,
) -> dict[str, Any]:
    """The tensors among the options, by name, for some sequences, query heads, queries and keys.

    Positions stay those of the whole call: :func:`pyattn.options.positions.shift` counts them from the part's own.

    Args:
        options: by name; others than tensors are left out.
        batch, heads, rows, keys: which of them; None: all.
        packed: whether the options are those of packed sequences, of which ``rows`` are tokens.
        num_heads: how many query heads there are in all, for options that have values for each KV head.
    """
    index, table = dict(zip("bhqk", (batch, heads, rows, keys), strict=True)), PACKED_AXES if packed else AXES
    found = {}
    for name, value in options.items():
        if name in table and isinstance(value, Tensor):
            at = dims_of(table[name], value).get("g")
            groups = None if at is None else kv_heads(heads, num_heads, value.shape[at])
            found[name] = part(table[name], value, index | {"g": groups})
    return found


def take(options: Named, **chosen: Any) -> Named:
    """:class:`pyattn.options.Options`, or another NamedTuple of options, with the tensors of :func:`parts`."""
    taken: Named = options._replace(**parts(options._asdict(), **chosen))
    return taken


def having(*axes: str) -> list[str]:
    """The options with any of these axes."""
    return [name for name, words in AXES.items() if any(word.strip("()")[0] in axes for word in words.split())]
