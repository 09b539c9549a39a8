"""The mask that travels through a model of transformers in place of a tensor of queries x keys.

The attention function recognises it by its type. A tensor comes from the user and describes packed documents
completely; a :class:`Mask` does not.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyattn.masks import KeyRanges

EAGER = 'pyattn: attn_implementation must be "eager", because the model has its own attention'


class AbsentError(NotImplementedError, AttributeError):
    """A model that computes attention itself uses a mask as a tensor; ``hasattr`` is False, as for any absent name."""


@dataclass(frozen=True, eq=False)
class Mask:
    """A mask from :func:`mask_function` for the attention function: causal, ranges of keys per row, or pairs.

    It passes through ``generate``, checkpoints and layers as a mask of four dimensions
    does. A model that computes attention itself passes it to a function of torch, which
    raises NotImplementedError: with None, each of its queries would see every key.

    Args:
        shape: (B, 1, Sq, Sk), the shape of the mask that transformers requests.
        ranges: the whole mask, (B or 1, Sq, 2) or (B or 1, Sq, n, 2): query ``i`` sees the keys ``begin <= j < end`` of
            its pairs; or None.
        pairs: bool (B or 1, 1, Sq, Sk), True = takes part; or None. Without
            ranges and pairs: causal from the upper left.
        first: the first query's place among those that the causal mask was made for.
    """

    shape: tuple[int, int, int, int]
    ranges: KeyRanges | None = None
    pairs: Tensor | None = None
    first: int = 0

    ndim = 4

    @property
    def is_causal(self) -> bool:
        """Whether the mask has neither ranges nor pairs."""
        return self.ranges is None and self.pairs is None

    def __getitem__(self, index: object) -> "Mask":
        """The mask of some queries, ``mask[:, :, -n:, :]``: the last layers of Gemma 4 compute no others."""
        every = slice(None)
        match index:
            case (batch, head, slice() as queries, keys) if (batch, head, keys) == (every,) * 3:
                rows = range(self.shape[2])[queries]
            case _:
                rows = range(0)
        if not rows or rows.step != 1:
            raise NotImplementedError(f"{EAGER}, got {index} as the index of a mask")
        part = slice(rows.start, rows.stop)
        return replace(
            self,
            shape=(*self.shape[:2], len(rows), self.shape[3]),
            ranges=None if self.ranges is None else KeyRanges(self.ranges[:, part], whole=True),
            pairs=self.pairs if self.pairs is None or self.pairs.shape[2] == 1 else self.pairs[:, :, part],
            first=self.first + rows.start,
        )

    def of_rows(self, device: torch.device) -> "Mask":
        """A causal mask with ranges, where the first query is not the first key, or there is one query alone."""
        if not self.is_causal or self.first == 0 < self.shape[2] - 1:
            return self
        end = torch.arange(1, self.shape[2] + 1, device=device).add(self.first).clamp(max=self.shape[3])
        ranges = torch.stack([torch.zeros_like(end), end], -1)[None]
        return replace(self, ranges=KeyRanges(ranges.to(torch.int32), whole=True))

    def contiguous(self) -> "Mask":
        """The mask itself: ``generate`` calls this."""
        return self

    def to(self, *arguments: Any, **named: Any) -> "Mask":
        """The mask on another device, as ``Tensor.to``."""
        ranges, pairs = (None if x is None else x.to(*arguments, **named) for x in (self.ranges, self.pairs))
        return replace(self, ranges=None if ranges is None else KeyRanges(ranges, whole=True), pairs=pairs)

    def __getattr__(self, name: str) -> NoReturn:
        """Raises for attributes of tensors that masks lack, such as ``mask.dtype``."""
        raise AbsentError(f"{EAGER}, got .{name} of a mask")

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], *_: object) -> NoReturn:
        """Refuses every function of torch."""
        raise NotImplementedError(f"{EAGER}, got {getattr(function, '__name__', function)}() of a mask")
