"""Proofs that a fill or a sum hides keys: which weights are exactly 0 in the code as it is written.

A score that is replaced by, or has added, ``value`` gives weight exp(value - row maximum) = 0 if value + 2 bound < -104
(float64: -746), ``bound`` being the largest size of any other score, and some key of its row is not so.
"""

import math

import torch
from torch import Tensor

from pyattn.adapters.scratch.masks import blind
from pyattn.adapters.scratch.masks.kinds import Filled, Masks, least_weight
from pyattn.adapters.scratch.recording.chain import Chain, LeftError
from pyattn.adapters.scratch.recording.changes import Change, changes_of
from pyattn.adapters.scratch.recording.leading import Shape, refined
from pyattn.adapters.scratch.recording.terms import Fill


def _bound(chain: Chain, q: Tensor, k: Tensor) -> float:
    """No product of queries and keys is larger, in size, than this."""
    if chain.capped:
        return chain.factor
    sizes = [max(abs(float(y)) for y in torch.aminmax(x.detach())) for x in (q, k)]
    return chain.scale * q.shape[-1] * math.prod(sizes)


def _proved(
    changes: list[Change], found: list[Change], bound: float, limit: float, sinks: float
) -> tuple[list[Change], float]:
    """The masks among ``found`` whose keys have weight 0, and a bound of other scores: sums may lower all in a row.

    ``sinks`` is the largest sink, in size.
    """
    while True:
        sums = max(bound + sum(x.size for x in changes if not _among(x, found)), sinks)
        kept = [x for x in found if x.low == -math.inf or x.low + 2 * sums < limit]
        if len(kept) == len(found):
            return found, sums
        found = kept


def _among(x: Change, changes: list[Change]) -> bool:
    return any(x is y for y in changes)


def proved(chain: Chain, q: Tensor, k: Tensor, fine: Shape) -> Masks:
    """The masks and biases that give the weights of the code as it is written; LeftError if there are none."""
    sinks = _largest_sink(chain)
    within = chain.range - math.log(chain.sizes[1])
    if not (chain.changes or chain.cleared or chain.nan_is_zero or within < math.inf):
        return Masks(None, None)
    changes = changes_of(chain, fine)
    if chain.nan_is_zero and not blind.finite(changes, chain, q, k):
        raise LeftError("nan_to_num of weights that a NaN or an overflow may have made NaN")
    candidates = [x for x in changes if x.is_mask]
    wanted = within < math.inf or any(-math.inf < x.low < 0 for x in candidates)
    product = _bound(chain, q, k) if wanted else 0.0
    hiding, sums = _proved(changes, candidates, product, least_weight(q.dtype), sinks)
    if within < math.inf and not sums < within:
        raise LeftError("exponentials that may overflow")
    hidden: Tensor | None = None
    for x in reversed(changes):
        shown = x.hidden
        if shown is None:
            if not _among(x, hiding):
                raise LeftError(f"scores of at least {x.low}")
        elif _among(x, hiding):
            hidden = shown if hidden is None else hidden | shown
        elif x.coefficient is None and bool((shown if hidden is None else shown & ~hidden).any()):
            raise LeftError(f"a fill with {x.low}, which may not hide a key")
    bias: Tensor | None = None
    unseen = hidden
    least = max(chain.least, torch.finfo(q.dtype).min)
    biases = [x for x in changes if x.coefficient is not None and not _among(x, hiding)]
    for x in biases:
        bias = x.summand if bias is None else bias + x.summand
    if bias is not None and sum(min(x.low, 0.0) for x in biases) < least:
        unseen = bias < least if unseen is None else unseen | (bias < least)
    cleared = [refined(x.mask, x.lead, fine) for x in chain.cleared]
    if any(unseen is None or bool((x & ~unseen).any()) for x in cleared):
        raise LeftError("a fill of weights")
    rows = None if unseen is None else unseen.all(-1)
    if rows is None or not bool(rows.any()):
        return Masks(hidden, bias)
    if torch.is_grad_enabled() and any(isinstance(x, Fill) and x.passes for x in chain.changes):
        raise LeftError("a query that sees no key, with a gradient")
    if within < math.inf:
        raise LeftError("a query that sees no key, whose exponentials sum up to 0")
    if blind.are_zero(changes, rows, chain, (q, k), product, filled=any(_covers(x, rows) for x in cleared)):
        return Masks(hidden, bias)
    if chain.sinks is not None and bias is None:  # such a query's weight is all its sink's
        return Masks(hidden, None)
    if cleared or chain.sinks is not None:
        raise LeftError("a query that sees no key")
    if (value := _last_fill(changes, rows)) is not None and value >= least:
        return Masks(hidden, bias, filled=Filled(rows[..., None], value))
    return Masks(None, _total(changes, chain, q, rows, (product, sums - product)))


def _last_fill(changes: list[Change], rows: Tensor) -> float | None:
    """The number that all keys of ``rows`` are filled with after everything else, if there is one."""
    value, filled = None, ~rows[..., None]
    for x in reversed(changes):
        if x.coefficient is not None or x.tensor is None or value not in (None, x.low):
            break
        value, filled = x.low, filled | x.tensor
    return value if bool(filled.all()) else None


def _covers(mask: Tensor, rows: Tensor) -> bool:
    """Whether ``mask`` is True at every key of ``rows``."""
    return bool((mask.all(-1) | ~rows).all())


def _largest_sink(chain: Chain) -> float:
    if chain.sinks is None:
        return 0.0
    if chain.cleared:
        raise LeftError("a fill of weights beside sinks")
    least, largest = torch.aminmax(chain.sinks.read.tensor.detach())
    size = max(abs(float(least)), abs(float(largest)))
    if not math.isfinite(size):
        raise LeftError("sinks that are not finite")
    return size


def _total(changes: list[Change], chain: Chain, q: Tensor, rows: Tensor, sizes: tuple[float, float]) -> Tensor:
    """All changes as one bias: ``rows``, which see no key, average the values whose numbers are largest.

    ``sizes`` are the largest product and the largest sum. Fills and floors are sums only beside products that vanish,
    and only without a gradient, which sums pass on. Sums so large that they round products coarsely are left, since
    the kernels round them elsewhere.
    """
    coarse = 2.0**-7 / torch.finfo(q.dtype).eps
    total = torch.zeros((), dtype=q.dtype, device=q.device)
    replaced = torch.zeros((), dtype=torch.bool, device=q.device)
    for x in changes:
        exact = x.coefficient is not None and -coarse <= x.low
        if not exact and not _vanish(x.low, *sizes, q.dtype):
            raise LeftError("a query that sees no key")
        if x.coefficient is None:
            replaced = replaced | (torch.ones_like(replaced) if x.hidden is None else x.hidden)
        total = x.applied(total)
    finite = total >= max(chain.least, torch.finfo(q.dtype).min)
    if not bool(finite.any(-1).all()):
        raise LeftError("a query that sees no key")
    read = [q, chain.k.tensor, *(x.tensor for x in changes if x.tensor is not None)]
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in read)
    if differentiable and bool((replaced & finite & rows[..., None]).any()):
        raise LeftError("a query that sees no key, with a gradient")
    return total


def _vanish(low: float, product: float, others: float, dtype: torch.dtype) -> bool:
    """Whether numbers up to ``product`` change nothing when they are added to ``low``, raised by up to ``others``.

    The kernels add in float32, or in float64; where they change nothing then, they don't in 16 bits.
    """
    least = torch.tensor(low + others, dtype=torch.promote_types(dtype, torch.float32))
    return bool((least + product == least) & (least - product == least))
