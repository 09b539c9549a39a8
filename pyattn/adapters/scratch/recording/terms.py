"""Sums, fills and lower bounds of scores between the products, and the tensors that they read."""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from pyattn.adapters.scratch.recording.expressions import State
from pyattn.adapters.scratch.recording.leading import Shape, arranged, exchanged


class Read(NamedTuple):
    """A caller's tensor that the attention will read, and its state when it was recorded."""

    tensor: Tensor
    state: State

    @classmethod
    def of(cls, tensor: Tensor) -> "Read":
        """``tensor`` as it is now."""
        return cls(tensor, State.of(tensor))

    @property
    def unchanged(self) -> bool:
        """Whether torch has not changed the tensor in place since."""
        return State.of(self.tensor) == self.state


class Factor(NamedTuple):
    """Scores times ``read.tensor``, or divided by it: the same number for all pairs of a head."""

    read: Read
    divides: bool

    def applied(self, q: Tensor) -> Tensor:
        """``q`` whose scores are multiplied or divided."""
        return q / self.read.tensor if self.divides else q * self.read.tensor

    def of(self, tensor: Tensor) -> "Factor":
        """The same with another tensor."""
        return self._replace(read=Read.of(tensor))


class Gate(NamedTuple):
    """Weights (*lead, Sq, Sk) in this ``order`` times ``read.tensor``, or divided by it: a number for all keys."""

    read: Read
    divides: bool
    lead: Shape
    order: Shape | None = None

    @property
    def tensor(self) -> Tensor:
        """The tensor as it broadcasts to (*lead, Sq, 1)."""
        return arranged(self.read.tensor, self.order)

    def of(self, tensor: Tensor) -> "Gate":
        """The same with another tensor."""
        return self._replace(read=Read.of(tensor))


class Split(NamedTuple):
    """A view of scores (*lead, Sq, Sk), ``sizes``, with their numbers in the same order, that has another ``shape``."""

    shape: Shape
    sizes: tuple[int, int]

    def whole(self, tensor: Tensor, lead: Shape) -> Tensor:
        """``tensor``, which broadcasts to the view, as (*lead, Sq, Sk)."""
        return tensor.expand(self.shape).reshape(*lead, *self.sizes)


class Term(NamedTuple):
    """``coefficient * tensor`` added to the scores, which had the leading dimensions ``lead``, in this ``order``.

    ``dtype`` is that of the sum, ``split`` how the scores were viewed, if queries or keys were split or joined.
    """

    read: Read
    coefficient: float
    lead: Shape
    dtype: torch.dtype
    order: Shape | None = None
    split: Split | None = None

    @property
    def tensor(self) -> Tensor:
        """The tensor as it broadcasts to (*lead, Sq, Sk)."""
        tensor = self.read.tensor if self.split is None else self.split.whole(self.read.tensor, self.lead)
        return arranged(tensor, self.order)

    @property
    def size(self) -> float:
        """The largest number that it adds, in size."""
        return abs(self.coefficient) * float(self.read.tensor.detach().abs().max())

    def times(self, c: float, _: torch.dtype) -> "Term":
        """The same of scores times ``c``."""
        return self._replace(coefficient=self.coefficient * c)

    def of(self, tensor: Tensor) -> "Term":
        """The same with another tensor."""
        return self._replace(read=Read.of(tensor))


class Fill(NamedTuple):
    """Scores (*lead, Sq, Sk) in this ``order`` replaced by ``value`` where ``make(tensor)``, bool, is True.

    A fill of ``scores.data`` ``passes`` gradients on, as if it replaced nothing.
    """

    make: Callable[..., Tensor]
    read: Read | None
    value: float
    lead: Shape
    order: Shape | None = None
    passes: bool = False

    @classmethod
    def at(cls, mask: Tensor, value: float, lead: Shape, order: Shape | None, *, where: bool) -> "Fill":
        """A fill where ``mask`` is ``where``."""
        return cls(_same if where else torch.logical_not, Read.of(mask), value, lead, order)

    @classmethod
    def at_zeros(cls, factors: Tensor, lead: Shape, order: Shape | None) -> "Fill":
        """A fill with 0 where ``factors`` is 0."""
        return cls(_zero, Read.of(factors), 0.0, lead, order)

    @classmethod
    def beyond(cls, diagonal: int, sizes: tuple[int, int], device: torch.device, lead: Shape, *, upper: bool) -> "Fill":
        """A fill with 0 below (``upper``) or above the diagonal."""
        return cls(partial(_beyond, sizes, device, diagonal, upper), None, 0.0, lead)

    @property
    def mask(self) -> Tensor:
        """The mask, True = filled, as it broadcasts to (*lead, Sq, Sk)."""
        return arranged(self.make(None if self.read is None else self.read.tensor), self.order)

    @property
    def size(self) -> float:
        """The size of its number."""
        return abs(self.value)

    def times(self, c: float, dtype: torch.dtype) -> "Fill":
        """The same of scores times ``c``, which are then of ``dtype``."""
        return self._replace(value=rounded(self.value * c, dtype))

    def of(self, tensor: Tensor) -> "Fill":
        """The same with another tensor."""
        return self._replace(read=Read.of(tensor))


def turned(change: "Term | Fill | Floor") -> "Term | Fill | Floor":
    """The same change of scores whose queries and keys are exchanged."""
    if isinstance(change, Floor):
        return change
    return change._replace(order=exchanged(change.order, len(change.lead) + 2))


class Floor(NamedTuple):
    """Scores raised to at least ``value``."""

    value: float

    @property
    def size(self) -> float:
        """The size of its number."""
        return abs(self.value)

    def times(self, c: float, dtype: torch.dtype) -> "Floor":
        """The same of scores times ``c``, which are then of ``dtype``."""
        return self._replace(value=rounded(self.value * c, dtype))

    @property
    def read(self) -> None:
        """It reads no tensor."""


@cache
def rounded(value: float, dtype: torch.dtype) -> float:
    """``value`` as ``dtype`` holds it."""
    with unset_fake_temporarily():
        return float(torch.tensor(value, dtype=dtype, device="cpu"))


def _same(mask: Tensor) -> Tensor:
    return mask


def _zero(mask: Tensor) -> Tensor:
    return mask == 0


def _beyond(sizes: tuple[int, int], device: torch.device, diagonal: int, upper: bool, _: Tensor | None) -> Tensor:
    ones = torch.ones(sizes, dtype=torch.bool, device=device)
    return ones.tril(diagonal - 1) if upper else ones.triu(diagonal + 1)
