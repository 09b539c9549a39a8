"""A call of attention as one value: its tensors, its options, and how its sequences lie."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from pyattn.options.axes import AXES, PACKED_AXES, take
from pyattn.options.schema import Options, Packing

_WITHOUT_BATCH = [name for name, axes in AXES.items() if axes.split()[:1] != PACKED_AXES[name].split()[:1]]
"""Options whose sequences are a dimension of batches alone."""


class Call(NamedTuple):
    """Attention of q over k and v.

    Attributes:
        q: (B, Hq, Sq, D), or (tokens, Hq, D) of packed sequences.
        k, v: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), or (tokens, Hkv, D) and (tokens, Hkv, Dv).
        options: of the operators.
        packing: where packed sequences begin; None for a batch.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: Options
    packing: Packing | None = None

    def sequences(self) -> Iterator["Sequence"]:
        """The packed sequences one by one; their lengths are read on the host."""
        q, k, v, options, packing = self
        assert packing is not None
        begins_q, begins_k = packing.cu_seqlens_q.tolist(), packing.cu_seqlens_k.tolist()
        used = packing.cu_seqlens_k.diff() if packing.seqused_k is None else packing.seqused_k
        origins = options.origins_for(len(begins_q) - 1, q.shape[1], packing.cu_seqlens_q.device)
        options = options._replace(dropout_origins=origins)
        for number, length in enumerate(used.tolist()):
            queries = slice(begins_q[number], begins_q[number + 1])
            keys = slice(begins_k[number], begins_k[number] + length)
            own = take(options, batch=slice(number, number + 1), rows=queries, keys=keys, packed=True)
            own = own._replace(**{n: getattr(own, n)[None] for n in _WITHOUT_BATCH if getattr(own, n) is not None})
            alone = Call(as_batch(q, queries), as_batch(k, keys), as_batch(v, keys), own)
            yield Sequence(number, queries, keys, begins_k[number + 1] - keys.stop, alone)


class Sequence(NamedTuple):
    """Sequence ``number`` of a packed call: its queries, its keys, how many ``unused`` ones follow, it as a batch."""

    number: int
    queries: slice
    keys: slice
    unused: int
    call: Call


def as_batch(tokens: Tensor, at: slice) -> Tensor:
    """(tokens, H, C) -> (1, H, those tokens, C)."""
    return tokens[at].transpose(0, 1)[None]
