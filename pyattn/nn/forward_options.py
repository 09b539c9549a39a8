"""The keyword arguments that modules' ``forward`` share: masks and biases on top of a module's own, and caches."""

import inspect
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, get_type_hints

from torch import Tensor

from pyattn.cache import KVCache
from pyattn.nn.checks import Lengths

Function = TypeVar("Function", bound=Callable[..., Any])


class Masked(TypedDict, total=False):
    """The arguments of modules without a cache; default: None, and False for ``need_weights``.

    Attributes:
        key_ranges: as for :func:`pyattn.attention`; jagged for a jagged x.
        mask: bool, True = takes part, broadcasting to (batch, heads, seqlen, keys).
        bias: added to the scores, broadcasting in the same way.
        need_weights: also return the weights.
    """

    key_ranges: Tensor | None
    mask: Tensor | None
    bias: Tensor | None
    need_weights: bool


class Cached(Masked, total=False):
    """The arguments of modules that continue the tokens in a cache.

    Attributes:
        kv_cache: the caller's cache, to which keys and values are appended first.
        lengths: how many of x's tokens are in each sequence, the others being padding; default: all.
    """

    kv_cache: KVCache | None
    lengths: Lengths | None


class Positioned(Cached, total=False):
    """The arguments of modules that may have a rotary embedding.

    Attributes:
        positions: int (batch or 1, seqlen), those of the tokens; default: each token is one after that before it.
    """

    positions: Tensor | None


class Turned(Positioned, total=False):
    """The arguments of modules to which the model may pass its tables of rotary angles.

    Attributes:
        position_embeddings: (cos, sin), each (positions, R), a row for each position from 0, or (batch or 1, seqlen,
            R), a row for each token of x. R, the columns of a head that turn, is even, and the two columns of a pair
            have the same angle: ``cat([angles, angles], -1)``, or ``angles.repeat_interleave(2, -1)`` with
            ``rotary_interleaved``.
        kv_from: another module's keys and values in place of W_key's and W_value's, as layers of Gemma 4 share them:
            (k, v) from its :meth:`keys_and_values <pyattn.nn.classes.projected.ProjectedHeads.keys_and_values>`, or the
            ``kv_cache`` that it has just been called with. W_key and W_value are then unused, and may be None.
    """

    position_embeddings: tuple[Tensor, Tensor] | None
    kv_from: tuple[Tensor, Tensor] | KVCache | None


class Unmasked(TypedDict, total=False):
    """The arguments of :class:`pyattn.nn.Attention`, whose mask is a separate argument, with another meaning."""

    key_ranges: Tensor | None
    bias: Tensor | None
    kv_cache: KVCache | None
    lengths: Lengths | None
    positions: Tensor | None
    need_weights: bool


def takes(options: type[Masked] | type[Unmasked]) -> Callable[[Function], Function]:
    """Shows the arguments of a TypedDict in help() and inspect for a ``forward`` that takes ``**options``."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    shown = [
        inspect.Parameter(name, keyword, default=False if kind is bool else None, annotation=kind)
        for name, kind in get_type_hints(options).items()
    ]

    def decorated(forward: Function) -> Function:
        signature = inspect.signature(forward)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        forward.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
        return forward

    return decorated
