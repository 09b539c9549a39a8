"""Recorded operators and, once something reads them, their values."""

import math
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyattn.adapters.scratch.recording.leading import Shape
from pyattn.options.dropout import dropout_factor, dropout_mask


def address(tensor: Tensor) -> int:
    """The identity of the memory of ``tensor``, which all its views share."""
    return int(tensor.untyped_storage()._cdata)


def copies(placeholders: list[Any]) -> list[Any]:
    """Tensors like ``placeholders``, of which those that share memory share it still: one may change another."""
    memory = Counter(address(x) for x in placeholders if isinstance(x, Tensor) and x.layout is torch.strided)

    def copied(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        shares = x.layout is torch.strided and memory[address(x)] > 1
        made = x.detach() if shares else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return made.requires_grad_(x.requires_grad)

    return [copied(x) for x in placeholders]


class State(NamedTuple):
    """The memory of a tensor and the number of its in-place changes so far; None if it doesn't count them.

    Neither ``set_`` nor ``swap_tensors`` is a function that modes see, and an inference tensor counts nothing.
    """

    memory: int
    version: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> "State":
        """The state of ``tensor`` now."""
        return cls(address(tensor), None if tensor.is_inference() else tensor._version)


def packer() -> object:
    """The hook that packs what autograd saves, if any, not held: each checkpoint has another, and one in backward."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    try:
        return weakref.ref(hooks[0]) if hooks else None
    except TypeError:  # an object of a class with __slots__
        return hooks[0]


Reads = list[tuple[Tensor, State]]
"""Tensors, and their states when they were recorded."""


class Expression:
    """A recorded operator and its arguments, or the value that it has given. It never changes its meaning.

    ``reads`` are the tensors among the arguments, each with its state: a change that was not announced
    (:meth:`pyattn.adapters.scratch.recording.session.Session.before_change`) is an error, as it is in torch's backward.
    """

    __slots__ = ("__weakref__", "args", "kwargs", "operator", "reads", "value")

    def __init__(
        self, operator: Callable[..., Tensor] | None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> None:
        self.operator: Callable[..., Tensor] | None = operator
        self.args: tuple[Any, ...] = args
        self.kwargs: dict[str, Any] = kwargs or {}
        self.value: Tensor | None = None
        self.reads: Reads = [(x, State.of(x)) for x in (*args, *self.kwargs.values()) if isinstance(x, Tensor)]

    @classmethod
    def of(cls, value: Tensor, reads: Reads) -> "Expression":
        """``value``, which shares memory with a caller's tensor and is valid while the states of ``reads`` are."""
        made = cls(None)
        made.value, made.reads = value, reads
        return made

    def compute(self) -> Tensor:
        """The value, by torch's own kernels and below autograd."""
        for tensor, recorded in self.reads:
            if (now := State.of(tensor)) != recorded:
                raise RuntimeError(
                    "pyattn: a tensor that recorded attention scores were computed from must not change in place, got "
                    f"shape {tuple(tensor.shape)} at version {now.version}, recorded at version {recorded.version}"
                    + ", in other memory"
                    * (now.memory != recorded.memory)
                )
        if self.value is None:
            assert self.operator is not None
            args = [x.compute() if isinstance(x, Expression) else x for x in self.args]
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                self.value = self.operator(*args, **self.kwargs)
            self.args = ()
            self.kwargs = {}
            self.reads = []
        return self.value


class Noise(Expression):
    """Dropout's factors of weights (*lead, Sq, Sk), or in another order: 0, or 1 / (the probability of keeping one).

    The draws are those of :func:`pyattn.dropout_mask` for ``seed``, with the leading dimensions as heads.
    """

    __slots__ = ("p", "seed")

    def __init__(self, seed: Tensor, p: float, size: Shape, dtype: torch.dtype, order: Shape | None = None) -> None:
        super().__init__(partial(_factors, seed, p, size, dtype, order))
        self.seed: Tensor = seed
        self.p: float = p


def _factors(seed: Tensor, p: float, size: Shape, dtype: torch.dtype, order: Shape | None) -> Tensor:
    kept = dropout_mask(seed, 1, math.prod(size[:-2]), size[-2], size[-1], p).view(size)
    kept = kept if order is None else kept.permute(order).contiguous()
    return kept.to(dtype) * dropout_factor(p)
