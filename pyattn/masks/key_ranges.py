"""The type of interval masks: a tensor that knows whether it is the whole mask."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyattn.options.checks import check_type, has_values, shown

INTEGERS = (torch.int32, torch.int64)

MOST_RANGES = 4
"""The most intervals of keys that key_ranges give a query."""

MERGES_ROWS = frozenset({"flatten", "reshape", "squeeze", "view"})
"""Functions whose result may have fewer dimensions and still holds the same pairs."""

TAKES_ROWS = frozenset({"__getitem__", "getitem", "select", "unbind"})
"""Functions that drop a dimension; the pairs survive unless it is the last one."""

BITWISE = frozenset({"__and__", "__iand__", "__rand__", "__or__", "__ior__", "__ror__"})
"""Bitwise operators, refused because they look like set operations; Python would swallow a TypeError here."""

WRITES = frozenset(n for n in dir(Tensor) if n.strip("_") + "_" == n or n.startswith("__i")) | {"__setitem__"}
"""Functions that write to their first argument: what they cannot combine is refused before."""


class KeyRanges(Tensor):
    """``key_ranges``: int32 or int64 (..., 2); query ``i`` sees the keys ``begin <= j < end`` of its pair.

    ::

        visible_ij = begin_i <= j < end_i        and, unless whole:  j <= i + q_offset  where causal

    :mod:`pyattn.masks` returns this type. It is a tensor like any other, (B or 1, Sq or 1, 2) for
    :func:`pyattn.attention` and (total_q, 2), the ``ranges[0]`` of a packed row, for :func:`pyattn.attention_varlen`,
    that also knows :attr:`whole`. A query with several intervals has that many pairs: (B or 1, Sq or 1, n, 2) and
    (total_q, n, 2).

    If the result of a torch function holds pairs again, it keeps the type and ``whole``, also when bare tensors take
    part: slices (``ranges[:, -n:]``, ``ranges[b]``), ``to``, ``expand``, ``repeat``, ``clone``, ``flatten(0, 1)``,
    ``torch.cat``, ``torch.stack``, arithmetic and bounds (``(ranges - n).clamp(0, Sk)``). Other results, such as
    ``ranges[..., 0]``, and four dimensions or more reshaped so that intervals become rows, are bare tensors. Copies,
    pickles, ``torch.save`` (also loaded with ``weights_only=True``), buffers of modules and compiled graphs keep both.
    In ``torch.export`` with ``strict=False`` all ranges are bare, so none is refused; the same holds for ranges that a
    transform of torch.func maps or takes as an argument of its function.

    :func:`pyattn.masks.within` gives the keys that two ranges share, :func:`pyattn.masks.union` those in either one.
    ``&`` and ``|``, bitwise on tensors, are refused.

    Args:
        ranges: int32 or int64 (..., 2); the memory is shared. If it is KeyRanges, its own ``whole`` is ignored.
        whole: see :attr:`whole`.

    Raises:
        TypeError: another type or dtype.
        ValueError: a last dimension other than 2; later, ``causal=True`` with whole ranges, and a function of several
            ranges that differ in ``whole``.
        NotImplementedError: ``&`` and ``|``.

    >>> KeyRanges(torch.tensor([[[0, 2], [0, 2], [0, 3]]]), whole=True)[:, :1]
    KeyRanges(tensor([[[0, 2]]]), whole=True)
    """

    if TYPE_CHECKING:
        _plain: Tensor  # the same memory as a bare tensor; torch's functions run on it
    _is_param = False  # torch.Tensor annotates it alone; pdoc wants it to be somewhere
    __module__ = "pyattn.masks"  # the public name: pickles contain it

    @property
    def whole(self) -> bool:
        """Whether the ranges are the whole mask, so attention needs ``causal=False``: masks.prefix_lm, masks.from_bool.

        False: they work with either ``causal``, as documents, chunks and padding do.
        """
        return isinstance(self, _WholeKeyRanges)

    def __new__(cls, ranges: Tensor, whole: bool = False) -> "KeyRanges":  # noqa: D102
        check_type("ranges", ranges, Tensor)
        check_type("whole", whole, bool)
        if ranges.dtype not in INTEGERS:
            raise TypeError(f"pyattn: ranges must be int32 or int64, got {ranges.dtype}")
        if ranges.shape[-1:] != (2,):
            raise ValueError(f"pyattn: ranges must have shape (..., 2), got {tuple(ranges.shape)}")
        return known(bare(ranges), whole)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in BITWISE:
            raise NotImplementedError(f"pyattn: masks.within gives the keys in both ranges, got the bitwise {name}")
        inputs = [bare(argument) for argument in args]
        named = {name: bare(argument) for name, argument in kwargs.items()} if kwargs else {}
        if name in WRITES or "out" in named:
            _check_alike(types)
        result = func(*inputs, **named)
        if name == "__get__":  # an attribute, such as .shape
            return result
        first = inputs[0] if inputs else None
        if type(result) in (tuple, list):
            return type(result)([_kept(cls, types, name, first, one) for one in result])
        return _kept(cls, types, name, first, result)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        lines = repr(bare(self)).replace("\n", "\n" + " " * len("KeyRanges("))
        return f"KeyRanges({lines}, whole=True)" if self.whole else f"KeyRanges({lines})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "KeyRanges":
        copied: KeyRanges = memo.setdefault(id(self), self.clone())
        return copied

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return KeyRanges, (bare(self), self.whole)


class _WholeKeyRanges(KeyRanges):
    """A class rather than an attribute of each tensor: torch.compile tracks types."""

    __module__ = "pyattn.masks"


torch.serialization.add_safe_globals([KeyRanges])


def known(ranges: Tensor, whole: bool) -> KeyRanges:
    """KeyRanges over a bare tensor; a tensor of another class, such as a fake one, stays as it is."""
    typed: KeyRanges = _as(_WholeKeyRanges if whole else KeyRanges, ranges)
    return typed


def plain(key_ranges: Any, causal: object) -> Any:
    """``key_ranges`` as operators take them: KeyRanges become bare tensors, anything else passes unchanged.

    Raises:
        ValueError: ranges that are the whole mask, with ``causal``.
    """
    kind = type(key_ranges)
    if kind is KeyRanges:
        return _memory(key_ranges)
    if kind is not _WholeKeyRanges:
        return key_ranges
    if causal:
        raise ValueError(
            "pyattn: key_ranges that are the whole mask, as masks.prefix_lm and masks.from_bool give them, need "
            f"causal=False, got causal={shown(causal)}"
        )
    return _memory(key_ranges)


def bare(value: Any) -> Any:
    """KeyRanges as a bare tensor of the same memory, also within tuples and lists; anything else as it is."""
    kind = type(value)  # isinstance would take longer than everything else here
    if kind is KeyRanges or kind is _WholeKeyRanges:
        return _memory(value)
    return kind([bare(one) for one in value]) if kind is tuple or kind is list else value


def _memory(ranges: KeyRanges) -> Tensor:
    if not torch.compiler.is_compiling():
        try:
            return ranges._plain
        except AttributeError:  # made by as_subclass, or by a compiled graph
            ranges._plain = ranges.as_subclass(Tensor)
            return ranges._plain
    # A compiled graph treats an attribute of an input as another input. The input itself, which is not a plain Tensor,
    # would fail at the first call, where torch 2.13 looks for aliases. An exported graph has no attributes.
    if hasattr(ranges, "_plain") and not torch.compiler.is_exporting():
        return ranges._plain
    with torch._C.DisableTorchFunctionSubclass():
        return ranges.view_as(ranges)


def _as(cls: type[KeyRanges], ranges: Tensor) -> Any:
    if type(ranges) is not Tensor:
        return ranges
    typed = ranges.as_subclass(cls)
    typed._plain = ranges
    return typed


def _kept(cls: type[KeyRanges], types: Sequence[type], name: str, first: Any, result: Any) -> Any:
    """``result`` of a function of KeyRanges, as ``cls`` if it holds pairs again."""
    if type(result) is not Tensor or result.dtype not in INTEGERS or result.dim() == 0:
        return result
    fewer = type(first) is Tensor and result.dim() < first.dim() and name not in MERGES_ROWS
    if type(first) is Tensor and name in MERGES_ROWS and first.dim() > 3 and result.shape[-2:] != first.shape[-2:]:
        return result  # intervals of a query became rows, or rows intervals
    if fewer and (name not in TAKES_ROWS or result.stride(-1) != first.stride(-1)):
        return result
    if result.shape[-1] != 2:
        return result
    _check_alike(types)
    return _as(cls, result)


def _check_alike(types: Sequence[type]) -> None:
    if KeyRanges in types and _WholeKeyRanges in types:
        raise ValueError(
            "pyattn: key_ranges that are combined must all be the whole mask, as masks.prefix_lm and "
            "masks.from_bool give them, or none of them, got both"
        )


def by_interval(key_ranges: Tensor, dims: int = 2) -> Tensor:
    """(..., n, 2): ``key_ranges`` with a dimension of intervals after the ``dims`` before it, also for one interval."""
    return key_ranges if key_ranges.dim() == dims + 2 else key_ranges.unsqueeze(dims)


def are_ranges(key_ranges: Tensor, batch: int, seqlen_q: int) -> bool:
    """Whether key_ranges are (B or 1, Sq or 1, 2) or (B or 1, Sq or 1, 1 to MOST_RANGES, 2)."""
    several = key_ranges.dim() == 4 and 1 <= key_ranges.shape[2] <= MOST_RANGES
    shape = key_ranges.shape[:2] + key_ranges.shape[3:] if several else key_ranges.shape
    return len(shape) == 3 and shape[0] in (1, batch) and shape[1] in (1, seqlen_q) and shape[2] == 2


def wrong_rows(ranges: Tensor, seqlen_k: int | Tensor) -> Tensor:
    """bool (...): the queries whose intervals (..., n, 2) are out of bounds, reversed, unsorted or not disjoint."""
    ends = ranges.flatten(-2)
    return (ends.diff(dim=-1) < 0).any(-1) | (ends[..., 0] < 0) | (ends[..., -1] > seqlen_k)


def rule_for(row: Tensor, seqlen_k: int) -> str:
    """The operator's message about the intervals (n, 2) of a query, up to the query's number."""
    rule = "0 <= begin <= end" if len(row) == 1 else "sorted, disjoint intervals 0 <= begin <= end"
    return f"pyattn: key_ranges must hold {rule} <= seqlen_k = {seqlen_k}, got {row.flatten().tolist()}"


def check_ranges(key_ranges: Tensor, seqlen_k: int, first: int = 0) -> None:
    """ValueError for the first query whose ranges are out of bounds, reversed or unsorted, with the operator's message.

    Args:
        key_ranges: (B or 1, Sq, 2) or (B or 1, Sq, n, 2).
        seqlen_k: the number of keys.
        first: the number of the first sequence.
    """
    ranges = by_interval(key_ranges)
    wrong = wrong_rows(ranges, seqlen_k)
    if has_values(wrong) and wrong.any():
        sequence, query = divmod(int(wrong.flatten().to(torch.uint8).argmax()), wrong.shape[1])
        rule = rule_for(ranges[sequence, query], seqlen_k)
        raise ValueError(f"{rule} for query {query} of sequence {first + sequence}")
