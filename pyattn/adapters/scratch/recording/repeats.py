"""Keys and values that were repeated for groups of heads, proved by the copy that repeated them.

A copy of a tensor that has stride 0 in one dimension, and ``repeat_interleave``, fill new memory with ``size`` equal
runs of numbers after one another, again and again. Whatever views such memory sees them, until something changes it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from pyattn.adapters.scratch.recording.expressions import address, packer
from pyattn.adapters.scratch.recording.leading import Shape

_INTERLEAVED = {torch.repeat_interleave, torch.Tensor.repeat_interleave}
REPEATING: set[Any] = {
    *_INTERLEAVED,
    *(torch.reshape, torch.Tensor.reshape, torch.Tensor.contiguous, torch.flatten, torch.Tensor.flatten),
}
"""Functions whose result may be such a copy."""

_MOST = 64
"""Remembered copies, beyond which those whose memory is gone are forgotten."""


class _Repeat(NamedTuple):
    """Memory, at ``version``, in which ``size`` runs of ``run`` numbers are equal, again and again from its start.

    A checkpoint that computes something again sees only repetitions within it, so no others count in it: ``packer``.
    """

    memory: StorageWeakRef
    version: int
    packer: object
    size: int
    run: int


class Repeats:
    """The copies that a session has seen: those with a gradient, or, ``of_graph``, all tensors without memory."""

    def __init__(self, *, of_graph: bool = False) -> None:
        self.of_graph = of_graph
        self._known: dict[int, _Repeat] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Remembers ``out``, the result of one of :data:`REPEATING`, if it is a copy with repetitions."""
        x = args[0] if args else kwargs.get("input")
        kind = FakeTensor if self.of_graph else Tensor
        if not isinstance(x, Tensor) or type(x) is not kind or type(out) is not kind or out.is_inference():
            return
        if out.grad_fn is None and not self.of_graph:
            return
        fresh = x.layout is torch.strided and out.is_contiguous() and out.storage_offset() == 0 and out.numel() > 0
        if not fresh or address(out) == address(x):
            return
        found = _interleaved(args[1:], kwargs, x, out) if func in _INTERLEAVED else _expanded(x)
        if found is None:
            return
        if len(self._known) >= _MOST:
            self._known = {at: y for at, y in self._known.items() if not y.memory.expired()}
        self._known[address(out)] = _Repeat(StorageWeakRef(out.untyped_storage()), out._version, packer(), *found)

    def forget(self, addresses: set[int]) -> None:
        """Forgets copies in memory that is about to change."""
        for changing in addresses & self._known.keys():
            del self._known[changing]

    def heads(self, x: Tensor, lead: Shape) -> int:
        """How many heads after one another of ``x`` (*lead, S, D), a view of all of a copy, are equal; 1 if none.

        A leaf has 1, since its gradient is its owner's; a graph has none but its inputs.
        """
        known = self._known.get(address(x)) if tuple(x.shape[:-2]) == lead and lead else None
        if known is None or known.packer != packer():
            return 1
        if x._version != known.version or lead[-1] % known.size or x.stride(-3) != known.run:
            return 1
        whole = x.numel() * x.element_size() == x.untyped_storage().nbytes() and x.storage_offset() == 0
        leaf = x.is_leaf or (x._base is not None and x._base.is_leaf)
        if not whole or (leaf and not self.of_graph):
            return 1
        within = 0
        for n, stride in zip((*lead[:-1], *x.shape[-2:]), (*x.stride()[:-3], *x.stride()[-2:]), strict=True):
            if stride < known.run:
                within += (n - 1) * stride
            elif n > 1 and stride % (known.size * known.run):
                return 1
        return known.size if within < known.run else 1


def _interleaved(given: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor, out: Tensor) -> tuple[int, int] | None:
    """The size and the run of ``x.repeat_interleave(size, dim)``."""
    named = dict(zip(("repeats", "dim"), given, strict=False)) | kwargs
    size, dim = named.get("repeats"), named.get("dim")
    if type(size) is not int or type(dim) is not int or size < 2 or out.dim() != x.dim():
        return None
    return size, out.stride(dim)


def _expanded(x: Tensor) -> tuple[int, int] | None:
    """The size and the run of a copy of ``x`` in the order of its dimensions, if one alone has stride 0."""
    repeated = [at for at in range(x.dim()) if x.stride(at) == 0 and x.shape[at] > 1]
    if len(repeated) != 1:
        return None
    run = 1
    for n in x.shape[repeated[0] + 1 :]:
        run *= n
    return x.shape[repeated[0]], run
