"""vmap of the native operators: one call on folded tensors where possible."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyattn import ops
from pyattn.options.axes import AXES, PACKED_AXES, PACKED_TENSORS, TENSORS, dims_of, words_of
from pyattn.options.schema import LEARNED

Values = dict[str, Any]
"""An operator's arguments by name."""

Results = tuple[Tensor | None, ...]

DENSE = AXES | TENSORS
PACKED = PACKED_AXES | PACKED_TENSORS


def _register(
    op: ops.Operator,
    loops: Callable[[Values, dict[str, int]], bool],
    fold: Callable[[ops.Operator, Values, dict[str, int], int], Results],
) -> None:
    """Registers vmap: one call on folded tensors, or call by call if ``loops(values, mapped)``.

    ``mapped`` holds the mapped dimension of each tensor that has one. ``fold(op, values, mapped, size)`` returns
    results whose first dimension is the mapped one.
    """
    names = [argument.name for argument in op._schema.arguments]

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Results, tuple[int | None, ...]]:
        size = info.batch_size
        values = dict(zip(names, args, strict=False))
        mapped = {name: dim for name, dim in zip(names, in_dims, strict=False) if isinstance(dim, int)}

        def sliced(select: Callable[[Tensor, int], Tensor]) -> Results:
            """The results of one call on slices of the mapped tensors."""
            results: Results = op(
                *(select(value, mapped[name]) if name in mapped else value for name, value in values.items())
            )
            return results

        if size == 0:  # a call on zeros gives the shapes
            one = sliced(lambda t, dim: t.new_zeros(t.movedim(dim, 0).shape[1:]))
            results = tuple(None if t is None else t[None][:0] for t in one)
        elif loops(values, mapped):
            many = [sliced(lambda t, dim, i=i: t.select(dim, i)) for i in range(size)]  # type: ignore[misc]
            results = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*many, strict=True))
        else:
            results = fold(op, values, mapped, size)
        return results, tuple(None if t is None else 0 for t in results)

    torch.library.register_vmap(op._schema.name, rule)


def _into_batch(name: str, tensor: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """Moves the mapped dimension into the batch: (size, B, ...) -> (size * B, ...). Shared tensors stay as they are."""
    axes = DENSE[name]
    if dim is None and "b" not in dims_of(axes, tensor):
        return tensor
    tensor = tensor.unsqueeze(0).expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    words = words_of(axes, tensor.dim() - 1)
    if words and words[0][0] != "b":  # the sequences share each of the mapped tensors
        tensor = tensor[(slice(None), *(None,) * (len(axes.split()) - len(words)))]
    if tensor.dim() < 2:
        raise ValueError(f"pyattn: under vmap each tensor keeps its batch dimension, got {tuple(tensor.shape[1:])}")
    return tensor.expand(size, batch, *tensor.shape[2:]).flatten(0, 1)


def _fold_into_batch(op: Callable[..., Results], values: Values, mapped: dict[str, int], size: int) -> Results:
    batch = values["q"].shape[1 if mapped.get("q") == 0 else 0]
    folded = [
        _into_batch(name, value, mapped.get(name), size, batch)
        if isinstance(value, Tensor) and name != "sinks"
        else value
        for name, value in values.items()
    ]
    return tuple(None if t is None else t.unflatten(0, (size, batch)) for t in op(*folded))


def _heads_of(axes: str) -> tuple[int, str] | None:
    """The dimension of the heads, counted from the last one, and its word; None without one."""
    words = [word.strip("()") for word in axes.split()]
    places = [at for at, word in enumerate(words) if word[0] in "hg"]
    return (places[0] - len(words), words[places[0]]) if places else None


def _fold_into_heads(
    axes: Mapping[str, str], op: ops.Operator, values: Values, mapped: dict[str, int], size: int
) -> Results:
    """Folds the mapped dimension into the heads, as the outer one: heads are independent of each other."""

    def into_heads(name: str, value: Any) -> Any:
        at = _heads_of(axes.get(name, ""))
        if at is None or value is None:
            return value
        (place, word), dim = at, mapped.get(name)
        if dim is None and (value.dim() < -place or (word.endswith("?") and value.shape[place] == 1)):
            return value  # it broadcasts over heads
        tensor = value.unsqueeze(0).expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
        return tensor.movedim(0, place - 1).flatten(place - 1, place)

    def out_of_heads(name: str, t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        at = _heads_of(axes[name if name in axes else name.removeprefix("d")])
        assert at is not None
        return torch.unflatten(t, at[0], (size, t.shape[at[0]] // size)).movedim(at[0] - 1, 0)

    results = op(*(into_heads(name, value) for name, value in values.items()))
    return tuple(out_of_heads(r.name, t) for r, t in zip(op._schema.returns, results, strict=True))


def _fold(op: ops.Operator, values: Values, mapped: dict[str, int], size: int) -> Results:
    if _apart(values, mapped):
        return _fold_into_heads(DENSE, op, values, mapped, size)
    return _fold_into_batch(op, values, mapped, size)


def _apart(values: Values, mapped: dict[str, int]) -> bool:
    """Whether the batch can't hold the slices: sinks have no batch, and gradients of LEARNED are summed over it."""
    return "sinks" in mapped or any(values.get("output_mask") or ())


def _loops(values: Values, mapped: dict[str, int]) -> bool:
    """Whether one call won't do: dropout counts batch and heads; mapped masks and biases' gradients need the batch."""
    if values.get("dropout_seed") is not None:
        return True
    scores = not mapped.keys().isdisjoint(("mask", "bias")) or _wants(values, "bias") or _relative(values, mapped)
    shared = values.get("selected") is not None  # folded heads would no longer share lists
    return _apart(values, mapped) and (scores or shared or not _all_have_heads(DENSE, mapped))


def _packed_loops(values: Values, mapped: dict[str, int]) -> bool:
    """Whether one call won't do: dropout counts heads; all heads share lengths and key_ranges."""
    if values.get("dropout_seed") is not None or _relative(values, mapped):
        return True
    return not _all_have_heads(PACKED, mapped)


def _all_have_heads(axes: Mapping[str, str], mapped: dict[str, int]) -> bool:
    """Whether the heads of every mapped tensor can hold the slices."""
    return all(_heads_of(axes.get(name, "")) for name in mapped)


def _relative(values: Values, mapped: dict[str, int]) -> bool:
    """Whether slices have their own relative bias, or gradient of it: its heads may share both."""
    return "relative_bias" in mapped or _wants(values, "relative_bias")


def _wants(values: Values, name: str) -> bool:
    """Whether the gradient of one of LEARNED is wanted."""
    wanted = values.get("output_mask") or (False,) * len(LEARNED)
    return bool(wanted[LEARNED.index(name)])


_fold_packed = partial(_fold_into_heads, PACKED)

_register(ops.attention_forward, _loops, _fold)
_register(ops.attention_backward, _loops, _fold)
_register(ops.attention_varlen_forward, _packed_loops, _fold_packed)
_register(ops.attention_varlen_backward, _packed_loops, _fold_packed)


def _refuse_vmap(*_: object) -> NoReturn:
    raise NotImplementedError("pyattn: torch.vmap cannot change a KVCache: its lengths are shared; change it outside")


for _name in ("append", "append_pages", "keep", "keep_pages", "reorder", "reorder_pages", "truncate"):
    torch.library.register_vmap(f"pyattn::cache_{_name}", _refuse_vmap)
