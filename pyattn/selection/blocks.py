"""Selection of blocks of keys by their means."""

import torch
from torch import Tensor

from pyattn.options.autocast import without
from pyattn.options.checks import check_names, check_size, check_sizes, check_type
from pyattn.selection.arguments import checked_heads, constant, offsets_of
from pyattn.selection.ranking import KEYS_AT_ONCE, ROUND, largest, padded, rows_at_once

FAR = 2**60
"""Beyond any sequence, and twice that still fits in 64 bits."""


@check_names
def top_blocks(
    q: Tensor,
    k: Tensor,
    block: int,
    n: int,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    own: bool = True,
    first: bool = True,
) -> Tensor:
    """The n blocks of keys whose means have the largest products with each query.

    ::

        score_ic = <sum_h q_hi, mean_j k_j>        h: the query heads of the KV head, j: the keys of block c that exist

    Block ``c`` holds the keys ``c block <= j < (c + 1) block``. With one query head for each KV head this is MoBA's
    gate; as in NSA, the query heads of a KV head share their blocks, here by the sum of their products. 16-bit inputs
    are summed and multiplied in float32. Work is done in blocks of queries, so memory is O(Sq n + Sk D).

    Args:
        q: (B, Hq, Sq, D), float16, bfloat16, float32 or float64, any strides.
        k: (B, Hkv, Sk, D) in q's dtype; query head ``h`` belongs to KV head ``h // (Hq // Hkv)``.
        block: keys of a block, at least 1; the last block may have fewer.
        n: how many blocks, at least 0; it may exceed their number.
        causal: query ``i`` sees the blocks that begin at or before its position ``i + q_offset``. Default: True.
        q_offset: the key position of query 0, an int or an int32 or int64 tensor (B,). Default: ``Sk - Sq``.
        own: the block of the query's position comes first, whatever its score; none where the position is outside of
            the blocks. Default: True. With ``own=False`` and ``causal``, the mean of that block is a score like any
            other, though it contains keys after the query: a model then learns from the future which block it picks.
        first: block 0, where visible, comes next, whatever its score. Default: True.

    Returns:
        int32 (B, Hkv, Sq, n): the own and the first block if requested, then blocks by descending score, the lower
        block first among equal scores. -1 where a query sees fewer blocks. A NaN score counts as -inf: after all
        numbers.

    Raises:
        ValueError: wrong shapes or devices, n below 0, block below 1.
        TypeError: wrong types or dtypes.
        NotImplementedError: nested or sparse tensors, vmap.

    There is no gradient. The host reads a q_offset that is on a GPU.

    Source: Lu et al. 2025 (MoBA), equations 4 to 6; Yuan et al. 2025 (NSA), section 3.3.2.

    >>> q, k = torch.ones(1, 1, 6, 1), torch.tensor([1.0, 3.0, 9.0, 7.0, 5.0, 5.0])[None, None, :, None]
    >>> top_blocks(q, k, block=2, n=2, first=False)[0, 0].tolist()
    [[0, -1], [0, -1], [1, 0], [1, 0], [2, 1], [2, 1]]
    """
    q, k = map(constant, ("q", "k"), checked_heads(q, k))
    check_size("block", block, least=1)
    for name, value in (("causal", causal), ("own", own), ("first", first)):
        check_type(name, value, bool)
    batch, seqlen_q, (heads, seqlen_k) = q.shape[0], q.shape[2], k.shape[1:3]
    check_sizes(batch=batch, num_heads_kv=heads, seqlen_q=seqlen_q, n=n)
    offsets = offsets_of(q_offset, seqlen_q, [seqlen_k] * batch, beyond=min(block, FAR))
    found = torch.full((batch, heads, seqlen_q, n), -1, dtype=torch.int32, device=q.device)
    blocks = -(-seqlen_k // block)
    if not blocks:
        return found
    step = rows_at_once(1, blocks)
    with torch.no_grad(), without(q.device):
        for b, offset in enumerate(offsets):
            for head, queries in enumerate(q[b].unflatten(0, (heads, -1)) if heads else ()):
                means = padded(_means(k[b, head], block), KEYS_AT_ONCE)
                for start in range(0, seqlen_q, step):
                    rows = slice(start, min(start + step, seqlen_q))
                    position = torch.arange(start + offset, rows.stop + offset, device=q.device)
                    counts = (position // block + 1).clamp(0, blocks) if causal else torch.full_like(position, blocks)
                    summed = queries[:, rows].to(means.dtype).sum(0)
                    scores = torch.mm(padded(summed, ROUND), means.t())[: len(summed), :blocks]
                    before = [position // block] * own + [torch.zeros_like(position)] * first
                    best = largest(scores, counts, 0, n, before)
                    found[b, head, rows, : best.shape[1]] = best
    return found


def _means(k: Tensor, block: int) -> Tensor:
    """(keys, D) -> (blocks, D) in float32 or float64: the means of blocks, the last one of the keys that it has."""
    wide = torch.promote_types(k.dtype, torch.float32)
    whole = len(k) // block * block
    means = k[:whole].unflatten(0, (-1, block)).mean(1, dtype=wide)
    return torch.cat([means, k[whole:].mean(0, keepdim=True, dtype=wide)]) if whole < len(k) else means
