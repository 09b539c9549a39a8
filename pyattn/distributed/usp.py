"""USP: Ulysses within each row of a mesh, around a ring between its rows."""

from torch import Tensor

from pyattn.distributed.agreement.call import AgreedCall
from pyattn.distributed.agreement.ranks import Ranks
from pyattn.distributed.layout import chunks_of
from pyattn.distributed.ring.ring_attention import ring
from pyattn.distributed.ulysses import by_heads
from pyattn.options.schema import Options


def by_mesh(call: AgreedCall, layout: str, between: Ranks, within: Ranks) -> tuple[Tensor, ...]:
    """(out, lse) of this rank's positions, the largest scores of its heads.

    ``between`` are the ranks of its column, ``within`` those of its row.
    """
    queries, keys = (chunks_of(length, between.size, layout) for length in call.lengths)
    row_q, row_k = (chunks_of(sum(map(len, held[between.own])), within.size, "contiguous") for held in (queries, keys))

    def inner(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, ...]:
        row = call._replace(ranks=between, q=q, k=k, v=v, options=options, queries=queries, keys=keys)
        return ring(row)

    return by_heads(call._replace(ranks=within, queries=row_q, keys=row_k), "contiguous", inner)
