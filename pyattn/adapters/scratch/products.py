"""The two products of attention as people write them: matmul, @, bmm, baddbmm and einsum, with any letters."""

import string
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyattn.adapters.scratch.recording.deferred import Deferred
from pyattn.adapters.scratch.recording.leading import broadcast

MATMULS: set[Any] = {
    *(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.linalg.matmul),
    *(torch.bmm, torch.Tensor.bmm, torch.mm, torch.Tensor.mm),
}
BADDBMMS: set[Any] = {torch.baddbmm, torch.Tensor.baddbmm}
_EINSUMS: set[Any] = {torch.einsum, torch.functional.einsum}
PRODUCTS: set[Any] = {*MATMULS, *BADDBMMS, *_EINSUMS}


class Operands(NamedTuple):
    """Queries (..., Sq, D) and keys (..., Sk, D) of one call that multiplies them.

    Attributes:
        lifted: which argument, counted among the call's tensors, carries the recording: the queries.
        lead: leading dimensions of the scores.
        alpha: the factor of the product.
        added: the tensor added to it, and its factor.
        order: dimension i of the product is dimension order[i] of (*lead, Sq, Sk); None = i.
    """

    q: Tensor
    k: Tensor
    lifted: int
    lead: tuple[int, ...]
    alpha: float = 1.0
    added: tuple[Tensor, float] | None = None
    order: tuple[int, ...] | None = None

    @property
    def are_weights_and_values(self) -> bool:
        """Whether k looks like transposed values (..., Dv, Sk): strided, and with fewer columns than keys."""
        return self.k.stride(-1) != 1 and self.k.shape[-2] < self.k.shape[-1]

    def __str__(self) -> str:
        q, k = tuple(self.q.shape), tuple(self.k.shape)
        return f"{q} x {k}, {str(self.q.dtype).removeprefix('torch.')}"


class Values(NamedTuple):
    """How a product of weights and values is written.

    Attributes:
        at: which of its operands are the values.
        own, wanted: letters of their dimensions, and of (*lead, Sk, Dv); both are empty for a matmul.
        out, result: letters of (*lead, Sq, Dv), and of the result's dimensions.
        memory: letters of the result in the order in which torch's product has them in memory.
    """

    at: int
    own: str = ""
    wanted: str = ""
    out: str = ""
    result: str = ""
    memory: str = ""

    def v(self, values: Tensor) -> Tensor:
        """``values`` as (*lead, Sk, Dv)."""
        return _arranged(values, self.own, self.wanted) if self.own else values

    def arranged(self, out: Tensor, *, copied: bool = False) -> Tensor:
        """The result of the product for ``out`` (*lead, Sq, Dv), with the strides of torch's own, which views need.

        It may have the memory of ``out`` unless it is ``copied``.
        """
        out = _arranged(out, self.out, self.memory) if self.own else out
        out = out.clone(memory_format=torch.contiguous_format) if copied else out.contiguous()
        return _arranged(out, self.memory, self.result) if self.own else out


def positional(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a product with its operands by position, each for itself."""
    if func in _EINSUMS and args and isinstance(args[0], str):
        return (args[0], *tensors_of(func, args)), kwargs
    if not kwargs:
        return args, kwargs
    names = ("input", "batch1", "batch2") if func in BADDBMMS else ("input", "mat2" if "mat2" in kwargs else "other")
    rest = names[len(args) :]
    if not all(name in kwargs for name in rest):
        return args, kwargs
    return (*args, *(kwargs[name] for name in rest)), {x: y for x, y in kwargs.items() if x not in rest}


def tensors_of(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """The operands of a product, in order."""
    if func in _EINSUMS:
        return list(args[1]) if len(args) == 2 and isinstance(args[1], list | tuple) else list(args[1:])
    return list(args)


def with_tensors(func: Any, args: tuple[Any, ...], tensors: list[Any]) -> tuple[Any, ...]:
    """``args`` with other operands."""
    return (args[0], *tensors) if func in _EINSUMS else tuple(tensors)


def _dense(x: Any, kind: type[Tensor]) -> bool:
    """Whether ``x`` may be queries or keys. A Parameter is none, nor are integers, whose products overflow."""
    known = type(x) is kind and x.dtype.is_floating_point and x.layout is torch.strided
    return known and not (x.is_nested or x.is_meta) and x.numel() > 0


def queries_and_keys(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[Tensor] = Tensor
) -> Operands | None:
    """The operands if ``func`` may multiply queries and keys, tensors of exactly this ``kind``, else None."""
    tensors = tensors_of(func, args)
    if not all(_dense(x, kind) for x in tensors) or "out" in kwargs or len({(x.dtype, x.device) for x in tensors}) > 1:
        return None
    if func in BADDBMMS:
        return _baddbmm(tensors, kwargs)
    if len(tensors) != 2 or kwargs:
        return None
    a, b = tensors
    if func in MATMULS:
        if min(a.dim(), b.dim()) < 2 or (2 in (a.dim(), b.dim()) and a.dim() != b.dim()) or a.shape[-1] != b.shape[-2]:
            return None
        lead = broadcast(tuple(a.shape[:-2]), tuple(b.shape[:-2]))
        return None if lead is None else Operands(a, b.transpose(-2, -1), 0, lead)
    return _einsum_scores(args[0], a, b)


def _baddbmm(tensors: list[Tensor], kwargs: dict[str, Any]) -> Operands | None:
    alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
    if len(tensors) != 3 or kwargs.keys() - {"alpha", "beta"} or tensors[1].dim() != 3 or tensors[2].dim() != 3:
        return None
    added, a, b = tensors
    numbers = all(type(x) in (int, float) for x in (alpha, beta))  # and no symbols
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1] or not numbers or not alpha > 0:
        return None
    return Operands(a, b.transpose(1, 2), 1, (a.shape[0],), alpha, None if beta == 0 else (added, beta))


def _labels(equation: Any, *tensors: Tensor) -> list[str] | None:
    """The letters of each operand's dimensions and of the result's; an ellipsis gets separate capital letters."""
    if not isinstance(equation, str):
        return None
    left, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:  # then what is not repeated is the result, in alphabetical order
        once = sorted(c for c in left if c.isalpha() and left.count(c) == 1)
        result = "..." * ("..." in left) + "".join(once)
    given = left.split(",")
    if len(given) != len(tensors):
        return None
    free = [c for c in string.ascii_letters if c not in equation]
    hidden = max(x.dim() - len(g.replace("...", "")) for g, x in zip(given, tensors, strict=True))
    letters = []
    for labels, x in zip(given, tensors, strict=True):
        missing = x.dim() - len(labels.replace("...", ""))
        labels = labels.replace("...", "".join(free[hidden - missing : hidden])) if missing >= 0 else ""
        if len(labels) != x.dim() or len(set(labels)) != len(labels):
            return None
        letters.append(labels)
    letters.append(result.replace("...", "".join(free[:hidden])))
    return letters if len(set(letters[-1])) == len(letters[-1]) else None


def _arranged(x: Tensor, own: str, wanted: str) -> Tensor:
    """``x`` with its dimensions in the order ``wanted``, those that it has not of size 1."""
    x = x.permute([own.index(c) for c in wanted if c in own])
    for at, c in enumerate(wanted):
        if c not in own:
            x = x.unsqueeze(at)
    return x


def _einsum_scores(equation: Any, a: Tensor, b: Tensor) -> Operands | None:
    letters = _labels(equation, a, b)
    if letters is None:
        return None
    of_a, of_b, scores = letters
    if len(scores) < 2:
        return None
    written, scores = scores, _keys_last(of_a, of_b, scores)
    order, row, column = scores[:-2], scores[-2], scores[-1]
    swapped = row in of_b
    of_q, of_k = (of_b, of_a) if swapped else (of_a, of_b)
    summed = set(of_q) & set(of_k) - set(scores)
    if row not in of_q or row in of_k or column not in of_k or column in of_q or len(summed) != 1:
        return None
    if set(of_q) | set(of_k) != {*scores, *summed}:
        return None
    depth = summed.pop()
    q, k = (b, a) if swapped else (a, b)
    q, k = _arranged(q, of_q, order + row + depth), _arranged(k, of_k, order + column + depth)
    shape = broadcast(tuple(q.shape[:-2]), tuple(k.shape[:-2]))
    if shape is None or q.shape[-1] != k.shape[-1]:
        return None
    places = None if written == scores else tuple(scores.index(c) for c in written)
    return Operands(q, k, int(swapped), shape, order=places)


def _keys_last(of_a: str, of_b: str, scores: str) -> str:
    """``scores`` with the letters that only one operand has at the end, if both have one and stand elsewhere."""
    rows, columns = ([c for c in scores if (c in of_a, c in of_b) == only] for only in ((True, False), (False, True)))
    if len(rows) != 1 or len(columns) != 1 or {*rows, *columns} == set(scores[-2:]):
        return scores
    return "".join([c for c in scores if c not in (*rows, *columns)] + rows + columns)


def values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], order: tuple[int, ...] | None) -> Values | None:
    """The values if ``func`` multiplies weights, the only deferred operand, whose dimensions are in this ``order``."""
    tensors = tensors_of(func, args)
    if len(tensors) != 2 or kwargs or func in BADDBMMS:
        return None
    at = next(i for i, x in enumerate(tensors) if isinstance(x, Deferred))
    if func in MATMULS and order is None:
        return Values(1) if at == 0 and tensors[1].dim() > 1 else None
    lead = string.ascii_letters[: tensors[0].dim() - 2]
    by_matmul = f"{lead}XY,{lead}YZ->{lead}XZ" if tensors[0].dim() == tensors[1].dim() else None
    letters = _labels(by_matmul if func in MATMULS else args[0], *tensors)
    if letters is None:
        return None
    own, of_v, result = letters[at], letters[1 - at], letters[2]
    if len(own) < 2:
        return None
    if order is not None:
        own = "".join(own[order.index(at)] for at in range(len(own)))
    leading, row, key = own[:-2], own[-2], own[-1]
    columns = set(of_v) - set(own)
    if key not in of_v or key in result or row in of_v or len(columns) != 1:
        return None
    column = columns.pop()
    if set(result) != {*leading, row, column}:
        return None
    memory = result if func in MATMULS else _batched(letters, tensors, result)
    return Values(1 - at, of_v, leading + key + column, leading + row + column, result, memory)


def _batched(letters: list[str], tensors: list[Tensor], result: str) -> str:
    """The letters of an einsum's result in memory, as bmm computes it: those of both operands, then each one's own.

    A dimension that broadcasts belongs to the other operand alone.
    """
    a, b = (dict(zip(own, x.shape, strict=True)) for own, x in zip(letters[:2], tensors, strict=True))
    left, right = ([c for c in x if x[c] != 1 or y.get(c, 1) == 1] for x, y in ((a, b), (b, a)))
    both = [c for c in result if c in left and c in right]
    own = [[c for c in result if c in of and c not in both] for of in (left, right)]
    return "".join(c for of in (both, *sorted(own, key=lambda x: result.index(x[0]))) for c in of)
