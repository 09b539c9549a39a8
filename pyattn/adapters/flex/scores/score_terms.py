"""The native meaning of a score_mod that is the score, scaled or under tanh, plus terms of indices and tensors."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyattn.adapters.flex.native_forms import Score
from pyattn.adapters.flex.trace.evaluation import over_distances, over_pairs
from pyattn.adapters.flex.trace.expressions import (
    NEGATIONS,
    PRODUCTS,
    QUOTIENTS,
    TANH,
    Argument,
    Node,
    form_of,
    reads_score,
    signs,
    value_of,
)

MODERATE = 2.0**64
"""Bound on a factor of the score and on its inverse: float32 holds the product of a score and some factors of this."""


class Terms(NamedTuple):
    """``factor * score``, or with a cap ``cap * tanh(factor * score / cap)``, plus terms, each with its sign."""

    factor: float
    softcap: float
    terms: list[tuple[int, Any]]


def terms_of(result: object) -> Terms | None:
    """The terms of an expression, None if it is no such sum."""
    terms, sign, node = list[tuple[int, Any]](), 1, result
    while isinstance(node, Node) and (each := signs(node)) is not None:
        (left, right), (of_left, of_right) = node.arguments, each
        if not reads_score(right):
            terms.append((sign * of_right, right))
            sign, node = sign * of_left, left
        elif not reads_score(left):
            terms.append((sign * of_left, left))
            sign, node = sign * of_right, right
        else:
            return None
    outer, node = _factor(node)
    outer *= sign
    if _is_score(node):
        return Terms(outer, 0.0, terms) if _is_moderate(outer) else None
    if not isinstance(node, Node) or node.function not in TANH or node.named:
        return None
    inner, node = _factor(node.arguments[0])
    found = _is_score(node) and all(map(_is_moderate, (outer, inner, outer * inner)))
    return Terms(outer * inner, abs(outer), terms) if found else None


def score_of_terms(result: object, q: Tensor, seqlen_k: int) -> Score | None:
    """The options of a score_mod with this result; None unless they need no more than linear memory.

    q: (B, Hq, Sq, D). A tensor of queries x keys that the score_mod captures, and adds as it is, is a bias.
    """
    sizes = *q.shape[:3], seqlen_k
    terms = terms_of(result)
    if terms is None or 0 in sizes:
        return None
    kinds = [(sign, term, form_of(term).depends_on()) for sign, term in terms.terms]
    whole = [_whole(term, sizes) for _, term, _ in kinds]
    along_keys, along_queries = (any(name in reads for _, _, reads in kinds) for name in ("kv_idx", "q_idx"))
    pairs = [{"q_idx", "kv_idx"} <= reads or len(reads & {"q_idx", "kv_idx", "distance"}) > 1 for _, _, reads in kinds]
    if any(both and view is None for both, view in zip(pairs, whole, strict=True)):
        return None
    if along_keys and along_queries and not any(pairs):
        return None
    wide = torch.promote_types(q.dtype, torch.float32)
    relative: Tensor | None = None
    bias: Tensor | None = None
    for (sign, term, reads), view in zip(kinds, whole, strict=True):
        function = _function(term, wide)
        if not reads & {"q_idx", "kv_idx"}:
            own = sign * _table(function, reads, sizes)
            relative = own if relative is None else relative + own
        else:
            own = sign * (_values(function, reads, sizes) if view is None else view.to(wide))
            bias = own if bias is None else bias + own
    if relative is not None:
        if (relative == -torch.inf).any():  # masks these pairs, and in the native code perhaps whole rows to NaN
            return None
        relative = relative.squeeze(0) if relative.shape[0] == 1 else relative
    return Score(softcap=terms.softcap, factor=terms.factor, bias=bias, relative_bias=relative)


def _factor(node: Any) -> tuple[float, Any]:
    """The numbers by which an expression is multiplied, and the expression; NaN if one is not moderate.

    A factor of 0, or one that overflows on the way, makes NaN or 0 of some scores, as no product of factors tells.
    """
    factor = 1.0
    while isinstance(node, Node) and not node.named:
        numbers = [x for x in node.arguments if isinstance(x, int | float) and not isinstance(x, bool)]
        if node.function in PRODUCTS and len(node.arguments) == 2 and numbers:
            factor *= numbers[0]
            node = next(x for x in node.arguments if x is not numbers[0])
        elif node.function in QUOTIENTS and len(node.arguments) == 2 and numbers and node.arguments[1] is numbers[0]:
            factor = factor / numbers[0] if numbers[0] else math.nan
            node = node.arguments[0]
        elif node.function in NEGATIONS:
            factor, node = -factor, node.arguments[0]
        else:
            break
        factor = factor if _is_moderate(factor) else math.nan
    return factor, node


def _is_moderate(factor: float) -> bool:
    return 1 / MODERATE <= abs(factor) <= MODERATE


def _is_score(x: object) -> bool:
    return isinstance(x, Argument) and x.number == 0


def _places(reads: frozenset[str], sizes: tuple[int, ...], q_idx: Tensor, kv_idx: Tensor) -> list[Tensor]:
    batch, heads = (torch.arange(size if name in reads else 1) for name, size in zip("bh", sizes, strict=False))
    return [batch, heads, q_idx, kv_idx]


def _function(term: Any, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The term as a function of the indices, in this dtype, the scores'; differentiable in what it captures."""
    score = torch.zeros((), dtype=dtype)
    return lambda *indices: torch.as_tensor(value_of(term, (score, *indices), {}), dtype=dtype)


def _table(function: Callable[..., Tensor], reads: frozenset[str], sizes: tuple[int, int, int, int]) -> Tensor:
    """A term of the distance alone as the option relative_bias, (B or 1, H or 1, 2 R + 1)."""
    zero = torch.zeros(1, dtype=torch.int64)
    batch, heads, *_ = places = _places(reads, sizes, zero, zero)
    if "distance" not in reads:
        return over_pairs(function, places).flatten(2)
    found = over_distances(function, batch, heads, sizes[2:])
    reach = max(sizes[2:]) - 1
    distances = torch.arange(-reach, reach + 1).clamp(1 - sizes[2], sizes[3] - 1)  # no pair has those beyond
    return found[:, :, distances + sizes[2] - 1]


def _values(function: Callable[..., Tensor], reads: frozenset[str], sizes: tuple[int, ...]) -> Tensor:
    """A term of queries or keys alone as the option bias, (B or 1, H or 1, Sq or 1, Sk or 1)."""
    rows, columns = (
        torch.arange(size if name in reads else 1) for name, size in zip(("q_idx", "kv_idx"), sizes[2:], strict=True)
    )
    return over_pairs(function, _places(reads, sizes, rows, columns))


def _whole(term: Any, sizes: tuple[int, ...]) -> Tensor | None:
    """A captured tensor that is looked up at (..., q_idx, kv_idx), as the option bias; None for other terms."""
    if not isinstance(term, Node) or term.name != "__getitem__" or not isinstance(term.arguments[1], tuple):
        return None
    table, places = term.arguments
    if not isinstance(table, Tensor) or len(places) != table.dim() or len(places) < 2:
        return None
    *first, query, key = (x.number if isinstance(x, Argument) else None for x in places)
    if (query, key) != (3, 4) or first not in ([], [1], [2], [1, 2]):
        return None
    if any(table.shape[dim] < sizes[place - 1] for dim, place in enumerate([*first, 3, 4]) if place is not None):
        return None  # an index is out of bounds
    view = table[tuple(slice(sizes[place - 1]) for place in [*first, 3, 4] if place is not None)]
    return view.unsqueeze(1) if first == [1] else view
