"""The largest score of each head, over the queries and keys of all ranks."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from pyattn.distributed.agreement.call import AgreedCall
from pyattn.weights.max_score import of_heads, of_sequences


def of_ranks(call: AgreedCall, largest: Tensor) -> Tensor:
    """(B, Hq), or (sequences, Hq) if packed: the largest of all ranks' ``largest``, which is shaped like lse.

    NaN propagates, which an all-reduce does not promise.
    """
    own = of_heads(largest)
    if call.sequences:
        queries = call.sequences[0]
        runs = [run for chunk in call.queries[call.ranks.own] for run in queries.tokens(chunk)]
        tokens = torch.tensor([token for run in runs for token in run], dtype=torch.int64, device=largest.device)
        own = of_sequences(largest, pad(queries.lengths.cumsum(0), (1, 0)).to(largest.device), tokens)
    own = own.contiguous()
    found = [torch.empty_like(own) for _ in range(call.ranks.size)]
    dist.all_gather(found, own, group=call.ranks.group)
    return torch.stack(found).amax(0)
