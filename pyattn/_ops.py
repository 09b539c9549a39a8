"""The native operators with their vmap rules and FLOP formulas, which only Python can register."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from pyattn.options import Options, Packing
from pyattn.visible import packed_pairs, pairs

attention_forward = torch.ops.pyattn.attention_forward.default
attention_backward = torch.ops.pyattn.attention_backward.default
attention_varlen_forward = torch.ops.pyattn.attention_varlen_forward.default
attention_paged_forward = torch.ops.pyattn.attention_paged_forward.default
attention_varlen_paged_forward = torch.ops.pyattn.attention_varlen_paged_forward.default
attention_varlen_backward = torch.ops.pyattn.attention_varlen_backward.default


Values = dict[str, Any]
"""An operator's arguments by name."""

Results = tuple[Tensor | None, ...]


def _register_vmap(
    op: torch._ops.OpOverload[..., Any],
    name: str,
    loops: Callable[[Values, dict[str, int]], bool],
    fold: Callable[[torch._ops.OpOverload[..., Any], Values, dict[str, int], int], Results],
) -> None:
    """vmap by one call on folded tensors; call by call where ``loops(values, mapped)`` says that can't be.

    ``mapped`` has the mapped dimension of each tensor that has one. ``fold(op, values, mapped, size)`` returns results
    whose first dimension is the mapped one.
    """
    names = [argument.name for argument in op._schema.arguments]

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Results, tuple[int | None, ...]]:
        size = info.batch_size
        values = dict(zip(names, args, strict=False))
        mapped = {name: dim for name, dim in zip(names, in_dims, strict=False) if isinstance(dim, int)}

        def sliced(select: Callable[[Tensor, int], Tensor]) -> Results:
            """The results of one call on slices of what is mapped."""
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

    torch.library.register_vmap(name, rule)


SHARED = {"key_ranges": 3, "mask": 4, "bias": 4, "alibi_slopes": 2}
"""Tensors that all sequences may share, with the number of their dimensions where they don't."""


def _into_batch(name: str, tensor: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """Moves the mapped dimension into the batch: (size, B, ...) -> (size * B, ...). What all share stays as it is."""
    if dim is None and name in SHARED and (tensor.dim() < SHARED[name] or tensor.shape[0] != batch):
        return tensor
    tensor = tensor.unsqueeze(0).expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    if name in SHARED:
        tensor = tensor[(slice(None), *(None,) * (SHARED[name] + 1 - tensor.dim()))]
        tensor = tensor.expand(size, batch, *tensor.shape[2:])
    if tensor.dim() < 2:
        raise ValueError(f"pyattn: under vmap each tensor keeps its batch dimension, got {tuple(tensor.shape[1:])}")
    return tensor.flatten(0, 1)


def _fold_into_batch(op: Callable[..., Results], values: Values, mapped: dict[str, int], size: int) -> Results:
    batch = values["q"].shape[1 if mapped.get("q") == 0 else 0]
    folded = [
        _into_batch(name, value, mapped.get(name), size, batch)
        if isinstance(value, Tensor) and name != "sinks"
        else value
        for name, value in values.items()
    ]
    return tuple(None if t is None else t.unflatten(0, (size, batch)) for t in op(*folded))


ROWS = ("dout", "q", "k", "v", "out")
HEADS_PACKED = dict.fromkeys((*ROWS, "dlse", "lse", "row_max", "row_sum"), -2) | {"alibi_slopes": -1, "sinks": -1}
HEADS = HEADS_PACKED | dict.fromkeys((*ROWS, "mask", "bias"), -3)
"""Where the heads are in tensors and in their gradients, counted from the last dimension."""


def _fold_into_heads(
    places: dict[str, int], op: torch._ops.OpOverload[..., Any], values: Values, mapped: dict[str, int], size: int
) -> Results:
    """Heads don't know of each other: the mapped dimension becomes the outer one of theirs."""

    def into_heads(name: str, value: Any) -> Any:
        if name not in places or value is None:
            return value
        at, dim = places[name], mapped.get(name)
        if dim is None and (value.dim() < -at or (name in ("mask", "bias") and value.shape[at] == 1)):
            return value  # it broadcasts over heads
        tensor = value.unsqueeze(0).expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
        return tensor.movedim(0, at - 1).flatten(at - 1, at)

    def out_of_heads(name: str, t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        at = places.get(name) or places[name.removeprefix("d")]
        apart: Tensor = t.unflatten(at, (size, t.shape[at] // size)).movedim(at - 1, 0)
        return apart

    results = op(*(into_heads(name, value) for name, value in values.items()))
    return tuple(out_of_heads(r.name, t) for r, t in zip(op._schema.returns, results, strict=True))


def _fold(op: torch._ops.OpOverload[..., Any], values: Values, mapped: dict[str, int], size: int) -> Results:
    if _apart(values, mapped):
        return _fold_into_heads(HEADS, op, values, mapped, size)
    return _fold_into_batch(op, values, mapped, size)


def _apart(values: Values, mapped: dict[str, int]) -> bool:
    """Whether the batch can't tell slices apart: sinks have none, and gradients of scores are summed over it."""
    return "sinks" in mapped or any(values.get("output_mask") or ())


def _loops(values: Values, mapped: dict[str, int]) -> bool:
    """Dropout's draws depend on batch and heads. Masks of their own need the batch, and so does a bias's gradient."""
    if values.get("dropout_seed") is not None:
        return True
    scores = not mapped.keys().isdisjoint(("mask", "bias")) or any((values.get("output_mask") or ())[:1])
    return _apart(values, mapped) and (scores or not mapped.keys() <= HEADS.keys())


def _packed_loops(values: Values, mapped: dict[str, int]) -> bool:
    """Dropout's draws depend on the heads; lengths and masks are the same for all heads."""
    return values.get("dropout_seed") is not None or not mapped.keys() <= HEADS_PACKED.keys()


_fold_packed = partial(_fold_into_heads, HEADS_PACKED)

_register_vmap(attention_forward, "pyattn::attention_forward", _loops, _fold)
_register_vmap(attention_backward, "pyattn::attention_backward", _loops, _fold)
_register_vmap(attention_varlen_forward, "pyattn::attention_varlen_forward", _packed_loops, _fold_packed)
_register_vmap(attention_varlen_backward, "pyattn::attention_varlen_backward", _packed_loops, _fold_packed)


@register_flop_formula(torch.ops.pyattn.attention_forward, get_raw=True)
def forward_flops(q: Tensor, k: Tensor, v: Tensor, *options: Any, out_val: object = None, **named: Any) -> int:
    """Q K^T and P V: for each pair that the mask leaves, two operations a column."""
    return 2 * pairs(q, k, Options(*options, **named)) * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.pyattn.attention_backward, get_raw=True)
def backward_flops(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    row_max: Tensor | None,
    row_sum: Tensor | None,
    *options: Any,
    deterministic: bool = True,
    part: bool = False,
    out_val: object = None,
    **named: Any,
) -> int:
    """Q K^T again, dO V^T, dV, dK and dQ, counted likewise."""
    known = Options(*options[: len(Options._fields)], **named)
    return 2 * pairs(q, k, known) * (3 * q.shape[3] + 2 * v.shape[3])


@register_flop_formula(torch.ops.pyattn.attention_varlen_forward, get_raw=True)
def varlen_forward_flops(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: object = None, **named: Any) -> int:
    """As :func:`forward_flops`."""
    packing, options = _split(rest, named)
    return 2 * packed_pairs(q, k, packing, options) * (q.shape[2] + v.shape[2])


@register_flop_formula(torch.ops.pyattn.attention_paged_forward, get_raw=True)
def paged_forward_flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    seqlen_k: int,
    *options: Any,
    out_val: object = None,
    **named: Any,
) -> int:
    """As :func:`forward_flops`."""
    keys = q.new_empty(q.shape[0], k.shape[2], seqlen_k, 0)
    return 2 * pairs(q, keys, Options(*options, **named)) * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.pyattn.attention_varlen_paged_forward, get_raw=True)
def varlen_paged_forward_flops(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, *rest: Any, out_val: object = None, **named: Any
) -> int:
    """As :func:`forward_flops`."""
    packing, options = _split(rest, named)
    keys = q.new_empty(block_table.numel() * k.shape[1], k.shape[2], 0)
    return 2 * packed_pairs(q, keys, packing, options) * (q.shape[2] + v.shape[3])


@register_flop_formula(torch.ops.pyattn.attention_varlen_backward, get_raw=True)
def varlen_backward_flops(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    row_max: Tensor | None,
    row_sum: Tensor | None,
    *rest: Any,
    deterministic: bool = True,
    part: bool = False,
    out_val: object = None,
    **named: Any,
) -> int:
    """As :func:`backward_flops`."""
    packing, options = _split(rest[: len(Packing._fields) + len(Options._fields)], named)
    return 2 * packed_pairs(q, k, packing, options) * (3 * q.shape[2] + 2 * v.shape[2])


def _split(rest: tuple[Any, ...], named: dict[str, Any]) -> tuple[Packing, Options]:
    """The operators' arguments behind the tensors, given by position or by name."""
    values = dict(zip(Packing._fields + Options._fields, rest, strict=False)) | named
    packing = {name: value for name, value in values.items() if name in Packing._fields}
    options = {name: value for name, value in values.items() if name in Options._fields}
    return Packing(**packing), Options(**options)
