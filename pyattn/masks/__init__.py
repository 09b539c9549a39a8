"""Interval masks: ``key_ranges`` for :func:`pyattn.attention`, in the forms that models need.

Every function but :func:`tree`, whose bool mask is for drafted tokens, returns :class:`KeyRanges`, int64
(B or 1, seqlen, 2): query ``i`` sees the keys ``begin <= j < end`` of its pair, on top of ``causal`` and ``window``.
Rows of up to 4 intervals, sorted and disjoint, are (B or 1, seqlen, n, 2), as :func:`streaming`, :func:`union` and
``from_bool(mask, intervals=4)`` give them. Those of :func:`prefix_lm` and :func:`from_bool` are the whole mask and are
refused with ``causal=True``, the default; the others work with either. Attention also takes a bare int32 or int64
tensor of such a shape, with any ``causal``. Memory is linear in seqlen, and a block of keys that no query of a block
sees costs nothing. Results are on the device of the tensors given here, or on torch's default device if only ints are
given.

Drawn below: query ``i`` down, key ``j`` across, 1 = takes part.
"""

from pyattn.masks.algebra import from_bool, union, within
from pyattn.masks.constructors import chunked, documents, padding, prefix_lm, streaming
from pyattn.masks.draft_trees import tree
from pyattn.masks.key_ranges import KeyRanges

__all__ = [
    "KeyRanges",
    "chunked",
    "documents",
    "from_bool",
    "padding",
    "prefix_lm",
    "streaming",
    "tree",
    "union",
    "within",
]
