"""The rules of transformers' masks as intervals of keys: causal, windowed, chunked and packed.

A mask function of transformers is a closure. This module recognises transformers' own by name, with the values they
captured, and computes the keys of each query without evaluating any pair. A name could mean something else in another
version, so the caller compares a few rows with the function itself; unknown functions are evaluated row by row.
"""

from types import FunctionType
from typing import Any

import torch
from torch import Tensor

FAR = 2**62
"""Beyond every position, but far enough below int64's end to add to."""

Interval = tuple[Tensor, Tensor]
"""Positions (B or 1, Sq): the first visible key of a query, and one past the last."""

RELATIVE = frozenset(
    {
        "bidirectional_mask_function",
        "causal_mask_function",
        "sliding_window_bidirectional_overlay",
        "sliding_window_overlay",
    }
)
"""Rules of the distance between query and key alone: in packed text, positions and places give the same result."""

PACKING = frozenset({"and_masks", "packed_sequence_mask_function", "remap_positions_for_packed_sequence"})
"""Rules by which transformers packs a mask: the same sequence, and other rules by positions within it."""


def rules(function: object) -> list[tuple[str, dict[str, Any]]]:
    """``(name, captured values)`` of a mask function and of the functions it combines, the outer ones first.

    A method, a partial or any other callable captures what this cannot read: its name is "", as a user's function's is.
    """
    if isinstance(function, tuple):
        return [rule for part in function for rule in rules(part)]
    if not isinstance(function, FunctionType):
        return [("", {})] if callable(function) else []
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    captured = dict(zip(function.__code__.co_freevars, cells, strict=True))
    ours = function.__module__ == "transformers.masking_utils"
    name = function.__qualname__.partition(".")[0] if ours else ""
    return [(name, captured), *(rule for part in captured.values() for rule in rules(part))]


def interval(function: object, queries: Tensor) -> Interval | None:
    """The visible keys of queries at these positions (Sq,), or None if a rule is not known."""
    found = rules(function)
    names = {name for name, _ in found}
    if "remap_positions_for_packed_sequence" in names and not names <= RELATIVE | PACKING:
        return None
    begin, end = torch.full_like(queries, -FAR)[None], torch.full_like(queries, FAR)[None]
    for name, captured in found:
        part = _part(name, captured, queries)
        if part is None:
            return None
        begin, end = torch.maximum(begin, part[0]), torch.minimum(end, part[1])
    return begin, torch.maximum(begin, end)


def _part(name: str, captured: dict[str, Any], at: Tensor) -> Interval | None:
    """The visible keys of queries at these positions by one rule, or None if it is not known."""
    first, past = at.new_tensor(-FAR), at.new_tensor(FAR)
    if name in ("and_masks", "bidirectional_mask_function", "remap_positions_for_packed_sequence"):
        return first, past
    if name == "causal_mask_function":
        return first, at + 1
    if name == "sliding_window_overlay":
        return at - captured["sliding_window"] + 1, past
    if name == "sliding_window_bidirectional_overlay":
        return at - captured["sliding_window"], at + captured["sliding_window"] + 1
    if name == "chunked_overlay":
        size, left = captured["chunk_size"], captured["left_padding"][:, None].to(at.device)
        chunk = (at - left) // size * size + left
        return chunk, chunk + size
    if name == "packed_sequence_mask_function":
        sequence = captured["packed_sequence_mask"].contiguous()
        if (sequence.diff() < 0).any():  # a model's own numbers of its chains: equal ones need not be adjacent
            return None
        return torch.searchsorted(sequence, sequence), torch.searchsorted(sequence, sequence, right=True)
    return None


def packs(function: object) -> bool:
    """Whether the mask packs sequences or blocks of tokens, for which transformers itself requires an explicit mask.

    By the same argument, a model requests a mask to work with.
    """
    names = {name for name, _ in rules(function)}
    return not names.isdisjoint({"packed_sequence_mask_function", "blockwise_overlay"})
