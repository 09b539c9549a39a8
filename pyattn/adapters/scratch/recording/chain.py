"""The meaning of recorded operators as attention: scores grow by a scale, a cap, terms and masks, then become weights.

score = sign * factor * tanh(scale * <q, k>)  or  sign * scale * <q, k>     then, in the order of the calls,
score = score + coefficient * term     or  value where fill
score = score - row maximum, which changes no weight;  a column of sinks, which takes part in the softmax alone
weight = softmax(score), by one function or as e / sum(e), e being exp(score) or 0, perhaps with 0 for NaN
weight = weight after dropout, times gates, in any order

Scores are computed without casts in between; ``least`` is the least finite number of all dtypes that they are cast to,
``now`` the dtype that the caller's code has for them at this step.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pyattn.adapters.scratch.recording.expressions import Noise
from pyattn.adapters.scratch.recording.leading import Shape, fine_shape, ordered
from pyattn.adapters.scratch.recording.session import Product
from pyattn.adapters.scratch.recording.terms import Factor, Fill, Floor, Gate, Read, Split, Term, rounded


class LeftError(Exception):
    """Why a recorded operator does not continue attention."""


EXPONENTIALS, LOGARITHMS = "exponentials", "logarithms of weights"

_LEAST_HIDING = -104.0
"""A fill with more may have a weight that is not 0, also in 16 bits: :mod:`pyattn.adapters.scratch.masks.proofs`."""


class Chain(NamedTuple):
    """Scores or weights (*leads[-1], Sq, Sk) of q (..., Sq, D) and k (..., Sk, D), leading dimensions of leads[0].

    Their tensor's dimension i is dimension order[i] of that shape, None = i. Where the softmax shows that the keys are
    the first operand of the first product, q and k are ``swapped``. A view may have ``split`` queries and keys, as in
    (..., height, width, height, width), or joined them with other dimensions: ``split`` is its shape.

    ``sinks`` (..., Sq, 1) are one more column until the weights lose it again: ``joined``. Scores that are ``final``,
    joined or less their row maximum, become weights next. No score on the way is more than ``growth`` times as large
    as the sum of all parts of the last ones. ``nan_is_zero``: weights that are NaN became 0.

    Between scores and weights they may be :data:`EXPONENTIALS` or :data:`LOGARITHMS`: ``halfway``. Exponentials of
    scores that are not ``shifted``, less their row maximum in the last step, are those of a softmax if the size of
    every visible key's score, plus the logarithm of the number of keys, is less than ``range``.
    """

    product: Product
    q: Read
    k: Read
    leads: tuple[Shape, ...]
    sizes: tuple[int, int]
    dtype: torch.dtype
    now: torch.dtype
    scale: float = 1.0
    sign: int = 1
    growth: float = 1.0
    factors: tuple[Factor, ...] = ()
    capped: bool = False
    factor: float = 1.0
    changes: tuple[Term | Fill | Floor, ...] = ()
    cleared: tuple[Fill, ...] = ()
    least: float = -math.inf
    sinks: Term | None = None
    joined: bool = False
    final: bool = False
    shifted: bool = False
    halfway: str = ""
    range: float = math.inf
    exponents: float = math.inf
    weights: bool = False
    order: Shape | None = None
    split: Shape | None = None
    swapped: bool = False
    nan_is_zero: bool = False
    gain: float = 1.0
    gates: tuple[Gate, ...] = ()
    dropout: Noise | None = None

    def expect_scores(self, name: str) -> None:
        """Raises LeftError, for the operator ``name``, unless they are scores that may change further."""
        if self.weights or self.halfway:
            raise LeftError(f"{name} of {self.halfway or 'weights'}")
        if self.final and name != "softmax":
            raise LeftError(f"{name} of scores with sinks or without their maximum")

    def multiplied(self, c: float) -> "Chain":
        """Scores times a number."""
        self.expect_scores("a multiple")
        if c < 0 and not self.changes:
            return self._replace(sign=-self.sign).multiplied(-c)
        if not 0 < c < math.inf:
            raise LeftError(f"scores times {c}")
        changes = tuple(x.times(c, self.now) for x in self.changes)
        growth = self.growth * max(c, 1 / c)
        if self.capped:
            return self._replace(factor=self.factor * c, growth=growth, changes=changes)
        return self._replace(scale=self.scale * c, growth=growth, changes=changes)

    def multiplied_by(self, tensor: Tensor) -> "Chain":
        """Scores times a tensor that is the same for all queries and keys of a head: a learned temperature."""
        may_grow = not (self.halfway or self.final)
        found = self._times(tensor, divides=False) if may_grow else None
        return self.kept(tensor) if found is None else found

    def divided_by(self, tensor: Tensor) -> "Chain":
        """Scores divided by such a tensor."""
        self.expect_scores("a multiple")
        found = self._times(tensor, divides=True)
        if found is None:
            raise LeftError("scores divided by a tensor")
        return found

    def _times(self, tensor: Tensor, *, divides: bool) -> "Chain | None":
        whole = self.order is None and self.split is None
        per_head = tensor.numel() == 1 or (tensor.shape[-2:] == (1, 1) and whole)
        if self.changes or self.capped or len(self.leads) > 1 or not per_head:
            return None
        return self._replace(factors=(*self.factors, Factor(Read.of(tensor), divides)))

    def plus(self, tensor: Tensor, coefficient: float) -> "Chain":
        """Scores plus a tensor: a bias, or a mask of large negative numbers."""
        self.expect_scores("a sum")
        if not tensor.dtype.is_floating_point:
            raise LeftError(f"scores plus {tensor.dtype}")
        split = None if self.split is None else Split(self.split, self.sizes)
        added = Term(Read.of(tensor), coefficient, self.leads[-1], self.now, self.order, split)
        return self._replace(changes=(*self.changes, added))

    def filled(self, mask: Tensor, value: float, *, where: bool = True, passes: bool = False) -> "Chain":
        """Scores replaced by ``value``, or weights by 0, where ``mask`` is ``where``.

        ``passes``: gradients pass as if nothing was replaced.
        """
        if mask.dtype != torch.bool:
            raise LeftError(f"a mask of {mask.dtype}")
        self.expect_whole("a fill")
        fill = Fill.at(mask, rounded(value, self.now), self.leads[-1], self.order, where=where)._replace(passes=passes)
        if self.halfway:
            return self.without(fill)
        if self.dropout is not None or (self.weights and (value != 0 or self.is_gated)):
            raise LeftError("a fill of weights")
        if self.sinks is not None or (self.final and not self.weights and value != -math.inf):
            raise LeftError("a fill beside sinks, or of scores without their maximum")
        if self.weights:
            return self._replace(cleared=(*self.cleared, fill))
        if value != 0 and not value < _LEAST_HIDING:
            raise LeftError(f"a fill with {value}, which hides no key")
        return self._replace(changes=(*self.changes, fill), shifted=False)

    def without(self, fill: Fill) -> "Chain":
        """Exponentials replaced by 0: hidden keys, if no visible one's vanishes beside the largest of all."""
        if self.halfway != EXPONENTIALS or fill.value != 0:
            raise LeftError(f"a fill of {self.halfway}")
        changes = (*self.changes, fill._replace(value=-math.inf))
        return self._replace(changes=changes, range=min(self.range, self.exponents / 2))

    def kept(self, mask: Tensor) -> "Chain":
        """Scores, or exponentials, times a tensor of ones and zeros: a fill with 0."""
        inner = self.final and not self.halfway
        known = not (inner or mask.requires_grad or isinstance(mask, FakeTensor))
        if not known or not bool(((mask == 0) | (mask == 1)).all()):
            raise LeftError("scores times a tensor")
        self.expect_whole("a product")
        if self.halfway:
            return self.without(Fill.at_zeros(mask, self.leads[-1], self.order))
        if not sum(x.size for x in self.changes) * self.growth < torch.finfo(self.dtype).max / 2:
            raise LeftError("scores of -inf, or that may overflow, times a tensor")
        return self._replace(changes=(*self.changes, Fill.at_zeros(mask, self.leads[-1], self.order)))

    def cast(self, dtype: torch.dtype) -> "Chain":
        """Scores or weights in ``dtype``, in which numbers below ``least`` become -inf."""
        if self.halfway or torch.finfo(dtype).bits < 16:  # 8 bits quantize
            raise LeftError(f"a cast of {self.halfway or 'scores or weights'} to {dtype}")
        return self if self.weights else self._replace(least=max(self.least, torch.finfo(dtype).min))

    def with_sinks(self, sinks: Tensor) -> "Chain":
        """Scores with one more column."""
        self.expect_scores("one more column")
        self.expect_order("one more column")
        return self._replace(sinks=Term(Read.of(sinks), 1.0, self.leads[-1], self.now), joined=True, final=True)

    def without_sinks(self) -> "Chain":
        """Weights without the column of sinks."""
        return self._replace(joined=False)

    def permuted(self, dims: Shape) -> "Chain":
        """A view of the same scores or weights whose dimension i is dimension dims[i] of theirs."""
        if self.joined or (self.final and not self.weights) or self.halfway:
            raise LeftError(f"transposed {self.halfway or 'scores with sinks or without their maximum'}")
        self.expect_whole("a transposed view")
        own = self.order or range(len(dims))
        return self._replace(order=ordered(tuple(own[at] for at in dims)))

    def expect_order(self, name: str) -> None:
        """Raises LeftError, for the operator ``name``, unless dimensions are in the order (*lead, Sq, Sk)."""
        self.expect_whole(name)
        if self.order is not None:
            raise LeftError(f"{name} of transposed {'weights' if self.weights else 'scores'}")

    def expect_whole(self, name: str) -> None:
        """Raises LeftError, for the operator ``name``, if queries or keys are split, or joined with others."""
        if self.split is not None:
            raise LeftError(f"{name} of scores of shape {self.split}")

    def viewed(self, shape: Shape) -> "Chain":
        """A view that folds or unfolds leading dimensions, or one for sums alone."""
        if self.split is not None:
            return self._replace(split=None).viewed(shape)
        self.expect_order("a view")
        if shape[-2:] != self.sizes or self.joined:
            if self.weights or self.halfway or self.final:
                raise LeftError(f"a view of shape {shape}")
            return self._replace(split=shape)
        leads = (*self.leads, shape[:-2])
        if math.prod(shape[:-2]) != math.prod(self.leads[-1]) or fine_shape(leads) is None:
            raise LeftError(f"views of shapes {self.leads[-1]} and {shape[:-2]}")
        return self._replace(leads=leads)

    def of(self, q: Tensor, k: Tensor, rest: list[Tensor]) -> "Chain":
        """The same attention of other tensors, in the order of :meth:`reads`."""
        tensors = iter(rest)
        factors = tuple(x.of(next(tensors)) for x in self.factors)
        sinks = None if self.sinks is None else self.sinks.of(next(tensors))
        changes = tuple(x.of(next(tensors)) if isinstance(x, Term | Fill) and x.read else x for x in self.changes)
        cleared = tuple(x.of(next(tensors)) if x.read else x for x in self.cleared)
        gates = tuple(x.of(next(tensors)) for x in self.gates)
        made = self._replace(q=Read.of(q), k=Read.of(k), factors=factors, sinks=sinks, changes=changes)
        return made._replace(cleared=cleared, gates=gates)

    def resized(self, lead: Shape, sizes: tuple[int, int]) -> "Chain":
        """The same attention of scores (*lead, *sizes) of which no view was taken."""
        changes = tuple(x if isinstance(x, Floor) else x._replace(lead=lead) for x in self.changes)
        cleared = tuple(x._replace(lead=lead) for x in self.cleared)
        sinks = None if self.sinks is None else self.sinks._replace(lead=lead)
        gates = tuple(x._replace(lead=lead) for x in self.gates)
        made = self._replace(leads=(lead,) * len(self.leads), sizes=sizes, sinks=sinks, changes=changes)
        return made._replace(cleared=cleared, gates=gates)

    @property
    def is_gated(self) -> bool:
        """Whether weights were multiplied by something else than dropout's factors."""
        return bool(self.gates) or self.gain != 1

    @property
    def has_sizes_of_its_own(self) -> bool:
        """Whether it is bound to these sizes, by a view or a triangle."""
        bound = any(x.read is None or (isinstance(x, Term) and x.split is not None) for x in self.changes)
        return bound or any(lead != self.leads[0] for lead in self.leads)

    def reads(self) -> list[Read]:
        """Everything that the attention will read."""
        changes = [x.read for x in (*self.changes, *self.cleared) if x.read is not None]
        sinks = [] if self.sinks is None else [self.sinks.read]
        return [self.q, self.k, *(x.read for x in self.factors), *sinks, *changes, *(x.read for x in self.gates)]
