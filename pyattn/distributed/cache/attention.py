"""Decoding: queries that every rank has, over a sequence whose keys lie in the caches of several ranks."""

import torch
from torch import Tensor
from typing_extensions import Unpack

from pyattn.cache import KVCache
from pyattn.distributed.agreement.call import chosen
from pyattn.distributed.agreement.ranks import Group
from pyattn.distributed.agreement.signature import all_hear
from pyattn.distributed.cache.call import agreed_on_caches
from pyattn.distributed.cache.merge import merged
from pyattn.distributed.cache.operator import compiled
from pyattn.distributed.compiled.operator import FUNCTIONS
from pyattn.options.attention_options import AttentionOptions
from pyattn.options.autocast import cast
from pyattn.options.checks import positional_error
from pyattn.options.parse import takes_options


@all_hear
@takes_options
def attention_with_cache(
    q: Tensor,
    cache: KVCache,
    group: Group = None,
    *positional: object,
    return_lse: bool = False,
    return_max_score: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, ...]:
    """:func:`pyattn.attention_with_cache` over a sequence whose keys lie in the caches of several ranks.

    Rank 0's cache holds the first keys of each sequence, the next rank's those after them, and so on. Each rank
    computes the queries over its own keys; one exchange merges the results, in the order of the ranks, so all ranks get
    the same bits. To continue a text, only the last rank appends the keys of the new tokens.

    Args:
        q: (B, Hq, Sq, D), the same on all ranks: the newest Sq positions.
        cache: this rank's keys and values: a :class:`pyattn.KVCache` without a ring buffer.
        group: the ranks: a process group or a mesh of one dimension; None: all.
        return_lse: also return lse.
        return_max_score: also return max_score, after lse.
        options: as for :func:`pyattn.attention_with_cache`, with positions of the whole sequence and these differences.
            q_offset: after an append with lengths, pass it: the ranks do not know that append. mask, bias: the columns
            of this rank's own cache, max_seqlen of them. A mask with Sq columns on all ranks is one over the queries'
            own keys, as of a drafted tree, on whichever ranks these keys lie. dropout_seed: default: drawn by rank 0.

    Returns:
        As for :func:`pyattn.attention_with_cache`, on every rank, differentiable once. The loss is one that every rank
        computes, and the gradients of q, alibi_slopes, sinks and relative_bias are those of one process, the same bits
        on every rank; the gradient of a bias has this rank's columns. Backward, too, is a call of all ranks.

    Raises:
        ValueError, TypeError, NotImplementedError: as for :func:`pyattn.attention_with_cache`; a ring buffer. If the
            arguments of ranks differ, or one rank's are wrong, every rank raises.
        RuntimeError, in backward: as there, if this rank has appended since; the other ranks raise ValueError, in a
            compiled graph only after the group's timeout.
    """
    error = positional_error(attention_with_cache, positional)
    if torch.compiler.is_compiling():
        out, lse, most = compiled(attention_with_cache, q, cache, group, options, error)
    else:
        call = agreed_on_caches(attention_with_cache, q, cache, group, options, error)
        out, lse, most = merged(call, cast(q))
    return chosen(out, lse, most, return_lse, return_max_score)


FUNCTIONS[attention_with_cache.__name__] = attention_with_cache
