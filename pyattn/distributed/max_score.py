"""The largest score of each head, over the queries and keys of all ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pyattn.distributed.call import Call
from pyattn.max_score import of_heads, of_sequences


def of_ranks(call: Call, largest: Tensor, begins_q: Sequence[int] = ()) -> Tensor:
    """(B, Hq), or (sequences, Hq) if packed: the largest of all ranks' ``largest``, which is shaped like lse.

    ``begins_q``: where packed sequences begin among all queries. NaN propagates, which an all-reduce does not promise.
    """
    own = of_heads(largest)
    if begins_q:
        tokens = [
            torch.arange(chunk.start, chunk.stop, device=largest.device) for chunk in call.queries[call.ranks.own]
        ]
        own = of_sequences(largest, torch.tensor(begins_q, device=largest.device), torch.cat(tokens))
    own = own.contiguous()
    found = [torch.empty_like(own) for _ in range(call.ranks.size)]
    dist.all_gather(found, own, group=call.ranks.group)
    return torch.stack(found).amax(0)
