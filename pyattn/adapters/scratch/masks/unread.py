"""Masks of compiled code, in which no value is known.

Fills with -inf hide keys, and sums are biases. Keys that are filled with a number c get a second attention, in which
all scores are c, merged with that of the other keys. The compiled code finds out by the largest numbers of q and k
whether filled keys have weights; if not, no key takes part in the second one.
"""

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from pyattn.adapters.scratch.masks import blind
from pyattn.adapters.scratch.masks.blind import Blind
from pyattn.adapters.scratch.masks.kinds import Filled, Masks, least_weight
from pyattn.adapters.scratch.recording.chain import Chain, LeftError
from pyattn.adapters.scratch.recording.leading import Shape, refined
from pyattn.adapters.scratch.recording.terms import Fill, Floor, Term


def unread(chain: Chain, q: Tensor, k: Tensor, fine: Shape) -> Masks:
    """The masks and the bias of compiled code; LeftError if they depend on values."""
    _expect_known(chain)
    value = _finite_fill(chain, q.dtype)
    hidden: Tensor | None = None
    filled: Tensor | None = None
    biases: list[tuple[Tensor, float, Tensor | None]] = []
    for x in reversed(chain.changes):
        if isinstance(x, Fill):
            mask = refined(x.mask, x.lead, fine)
            first = mask if hidden is None else mask & ~hidden  # later fills count
            hidden = mask if hidden is None else hidden | mask
            if x.value > -math.inf:
                filled = first if filled is None else filled | first
        elif isinstance(x, Term):
            biases.insert(0, (refined(x.tensor, x.lead, fine), x.coefficient, hidden))
    if filled is not None:
        assert hidden is not None
        return _with_filled(chain, (q, k), hidden, filled, value)
    return _with_biases(chain, hidden, biases)


def _expect_known(chain: Chain) -> None:
    """Raises LeftError for operators that are a part of attention only where values prove it."""
    floors = [x.value for x in chain.changes if isinstance(x, Floor)]
    reasons = {
        f"scores of at least {max(floors, default=0)}": floors,
        "a fill of weights": chain.cleared,
        "nan_to_num of weights": chain.nan_is_zero,
        "exponentials that may overflow": chain.range < math.inf,
    }
    for reason, found in reasons.items():
        if found:
            raise LeftError(f"{reason}, in compiled code")


def _finite_fill(chain: Chain, dtype: torch.dtype) -> float:
    """The number of all fills that are not with -inf, if there are any."""
    found = {x.value for x in chain.changes if isinstance(x, Fill) and x.value != -math.inf}
    if not found:
        return -math.inf
    if len(found) > 1:
        raise LeftError("fills with several numbers, in compiled code")
    if chain.sinks is not None or any(isinstance(x, Term) for x in chain.changes):
        raise LeftError("a fill with a finite number beside a sum or sinks, in compiled code")
    value = found.pop()
    if not max(chain.least, torch.finfo(dtype).min) <= value <= torch.finfo(dtype).max:
        raise LeftError(f"a fill with {value}, which overflows, in compiled code")
    return value


def _with_filled(chain: Chain, products: tuple[Tensor, Tensor], hidden: Tensor, filled: Tensor, value: float) -> Masks:
    """Masks without sums, of which some fill with ``value``: ``filled`` among all that are ``hidden``."""
    sees = (~hidden).any(-1, keepdim=True)
    keys = filled & ~(sees & _vanish(chain, *products, value))
    endless = any(isinstance(x, Fill) and x.value == -math.inf for x in chain.changes)
    rows = (hidden & ~filled).all(-1, keepdim=True) if endless else None
    return Masks(hidden, None, None if rows is None else Blind(rows), Filled(keys, value))


def _vanish(chain: Chain, q: Tensor, k: Tensor, value: float) -> Tensor:
    """Whether keys with the score ``value`` have weights of 0 beside any other, as in :mod:`.proofs`."""
    if chain.capped:
        bound = torch.full((), chain.factor, dtype=torch.float64, device=q.device)
    else:
        largest = [x.detach().abs().amax().to(torch.float64) for x in (q, k)]
        bound = largest[0] * largest[1] * (chain.scale * q.shape[-1])
    return value + 2 * bound < least_weight(q.dtype)


def _with_biases(chain: Chain, hidden: Tensor | None, biases: list[tuple[Tensor, float, Tensor | None]]) -> Masks:
    """Fills with -inf and sums, each with its coefficient and what is filled after it."""
    if not biases:
        rows = None if hidden is None or chain.sinks is not None else hidden.all(-1, keepdim=True)
        return Masks(hidden, None, None if rows is None else Blind(rows))
    bias = _sum(x * c for x, c, _ in biases)
    if chain.sinks is not None:
        return Masks(hidden, bias)
    endless = bias.detach() == -math.inf
    rows = (endless if hidden is None else hidden | endless).all(-1, keepdim=True)
    bias = _sum(blind.bias_of(x, rows, filled) * c for x, c, filled in biases)
    return Masks(hidden, bias, Blind(rows, torch.zeros_like(rows) if hidden is None else hidden))


def _sum(biases: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, biases)
