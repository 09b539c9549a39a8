"""The lightning indexer: the keys with the largest scores."""

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from pyattn.options.autocast import without
from pyattn.options.checks import check_names, check_sizes, check_type
from pyattn.selection.arguments import checked_indexer, constant, lengths_of, offsets_of
from pyattn.selection.ranking import KEYS_AT_ONCE, ROUND, largest, padded, rows_at_once, visible_counts


@check_names
def top_keys(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    n: int,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    k_lengths: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """The n keys to which DeepSeek's lightning indexer gives each query's largest scores.

    ::

        score_ij = sum_h weights_hi relu(<q_hi, k_j>)

    A model's factors, such as 1 / sqrt(Di) or 1 / sqrt(Hi), belong into ``weights``; positive ones change no order.
    16-bit inputs are multiplied and summed in float32. Work is done in blocks of queries, so memory is
    O(Sq n + Sk Di) and no Sq x Sk tensor exists; a block of queries computes no scores beyond its last visible key.

    Args:
        q: (B, Hi, Sq, Di), float16, bfloat16, float32 or float64, any strides.
        k: (B, Sk, Di) in q's dtype: one key for all heads.
        weights: (B, Hi, Sq) in q's dtype or, beside 16-bit q, float32; of any sign.
        n: how many keys, at least 0; it may exceed Sk.
        causal: query ``i`` sees the keys ``j <= i + q_offset``. Default: True.
        q_offset: the key position of query 0, an int or an int32 or int64 tensor (B,). Default: the last query is at
            the last key, ``Sk - Sq``, or ``k_lengths - Sq``.
        k_lengths: how many keys each sequence has, ints or an int32 or int64 tensor (B,): the ``lengths`` of a cache
            whose positions k holds. Default: Sk.

    Returns:
        int32 (B, 1, Sq, n): keys by descending score, the lower key first among equal scores, so results depend neither
        on threads nor on blocks. -1 where a query sees fewer keys. A NaN score counts as -inf: after all numbers.
        Keys that a query does not see have no effect, even if they hold NaN.

    Raises:
        ValueError: wrong shapes or devices, n below 0, a length outside 0 to Sk.
        TypeError: wrong types or dtypes.
        NotImplementedError: nested or sparse tensors, vmap.

    There is no gradient: :func:`indexer_loss` trains the indexer. The host reads a q_offset or k_lengths on a GPU.

    Source: DeepSeek-AI 2025, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", equation 1.

    >>> q, k = torch.tensor([[[[1.0], [1.0], [1.0]]]]), torch.tensor([[[0.3], [0.5], [0.4]]])
    >>> top_keys(q, k, torch.ones(1, 1, 3), n=2)[0, 0].tolist()
    [[0, -1], [1, 0], [1, 2]]
    """
    q, k, weights = map(constant, ("q", "k", "weights"), checked_indexer(q, k, weights))
    check_type("causal", causal, bool)
    batch, heads, seqlen_q, _ = q.shape
    check_sizes(batch=batch, seqlen_q=seqlen_q, n=n)
    lengths = lengths_of(k_lengths, batch, k.shape[1])
    offsets = offsets_of(q_offset, seqlen_q, lengths)
    found = torch.full((batch, 1, seqlen_q, n), -1, dtype=torch.int32, device=q.device)
    step = rows_at_once(heads, k.shape[1])
    with torch.no_grad(), without(q.device):
        for b, (length, offset) in enumerate(zip(lengths, offsets, strict=True)):
            for start in range(0, seqlen_q, step):
                rows = slice(start, min(start + step, seqlen_q))
                counts = visible_counts(start + offset, rows.stop - start, length, causal, q.device)
                last = max(0, min(rows.stop + offset, length)) if causal else length
                scores = index_scores(q[b, :, rows], k[b], weights[b, :, rows], last)
                least = max(0, min(start + offset + 1, length)) if causal else length
                own = largest(scores, counts, least, n)
                found[b, 0, rows, : own.shape[1]] = own
    return found


def index_scores(q: Tensor, k: Tensor, weights: Tensor, count: int) -> Tensor:
    """The scores (rows, at least count) of the first ``count`` keys, in float32 or float64; what follows them varies.

    All products have the same number of keys and a multiple of ROUND rows: a score's bits do not depend on its block.

    Args:
        q: (Hi, rows, D).
        k: (keys, D).
        weights: (Hi, rows).
        count: at most the number of keys.
    """
    heads, rows, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    unit = ROUND // gcd(ROUND, heads)
    q = padded(q.transpose(0, 1).to(dtype), unit).flatten(0, 1)
    factors = padded(weights.t().to(dtype), unit)[:, None]
    scores = q.new_empty(rows, -(-count // KEYS_AT_ONCE) * KEYS_AT_ONCE)
    pairs = q.new_empty(len(q), KEYS_AT_ONCE)
    for start in range(0, scores.shape[1], KEYS_AT_ONCE):
        block = slice(start, start + KEYS_AT_ONCE)
        torch.mm(q, padded(k[block].to(dtype), KEYS_AT_ONCE).t(), out=pairs).relu_()
        scores[:, block] = torch.bmm(factors, pairs.view(len(factors), heads, KEYS_AT_ONCE))[:rows, 0]
    return scores
