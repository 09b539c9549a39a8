"""Packed sequences one by one: where each of them lies, and its options as those of a batch of one."""

from collections.abc import Iterator
from typing import NamedTuple

from pyattn.options.axes import AXES, PACKED_AXES, take
from pyattn.options.schema import Options, Packing

_WITHOUT_BATCH = [name for name, axes in AXES.items() if axes.split()[:1] != PACKED_AXES[name].split()[:1]]
"""Options whose sequences are a dimension of batches alone."""


class Sequence(NamedTuple):
    """Sequence ``number`` of a call: its queries, its keys, how many ``unused`` keys come after these, its options."""

    number: int
    queries: slice
    keys: slice
    unused: int
    options: Options


def sequences(packing: Packing, options: Options, num_heads_q: int) -> Iterator[Sequence]:
    """The sequences in their order; their lengths are read on the host."""
    count, device = len(packing.cu_seqlens_q) - 1, packing.cu_seqlens_q.device
    options = options._replace(dropout_origins=options.origins_for(count, num_heads_q, device))
    begins_q, begins_k = packing.cu_seqlens_q.tolist(), packing.cu_seqlens_k.tolist()
    used = packing.cu_seqlens_k.diff() if packing.seqused_k is None else packing.seqused_k
    for number, length in enumerate(used.tolist()):
        queries = slice(begins_q[number], begins_q[number + 1])
        keys = slice(begins_k[number], begins_k[number] + length)
        own = take(options, batch=slice(number, number + 1), rows=queries, packed=True)
        own = own._replace(**{n: getattr(own, n)[None] for n in _WITHOUT_BATCH if getattr(own, n) is not None})
        yield Sequence(number, queries, keys, begins_k[number + 1] - keys.stop, own)
