"""The number of visible pairs of a call, without a tensor of all pairs."""

import torch

from pyattn.ops import visible_pairs
from pyattn.options.axes import take
from pyattn.options.call import Call
from pyattn.options.checks import has_values
from pyattn.options.schema import Options

PAIRS_AT_ONCE = 2**24
"""Pairs that are counted at a time if a mask or bias is read for each: about 100 MB of temporaries."""


def causal_pairs(seqlen_q: int, seqlen_k: int, q_offset: int) -> int:
    """The number of pairs visible under a causal mask: the sum over i of ``i + q_offset + 1`` within [0, seqlen_k]."""
    first = min(max(-q_offset, 0), seqlen_q)
    full = min(max(seqlen_k - q_offset, first), seqlen_q)  # from here on, rows see all keys
    return (full - first) * (first + full + 1 + 2 * q_offset) // 2 + (seqlen_q - full) * seqlen_k


def _pairs_of_formulas(options: Options, batch: int, seqlen_q: int, seqlen_k: int) -> int:
    """Pairs that causal and window leave in the batch: keys up to each query's last, less those before its first."""
    left, right = options.window
    total, shared = 0, options.offset_for(seqlen_q, seqlen_k)
    for q_offset in [shared] * batch if options.q_offsets is None else options.q_offsets.tolist():
        last = q_offset if options.causal else q_offset + right if right >= 0 else seqlen_k
        total += causal_pairs(seqlen_q, seqlen_k, last)
        total -= causal_pairs(seqlen_q, seqlen_k, q_offset - left - 1) if left >= 0 else 0
    return total


def _count(options: Options, batch: int, num_heads: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> int:
    """The number of visible pairs, over batch and query heads."""
    rows = torch.arange(seqlen_q, device=device)
    hidden = not options.mask is options.bias is options.selected is None
    if options.key_ranges is None and not hidden:
        return num_heads * _pairs_of_formulas(options, batch, seqlen_q, seqlen_k)
    if not hidden:
        begin, end = visible_pairs.keys_of(options, rows, seqlen_q, seqlen_k)
        return num_heads * batch * int((end - begin).clamp(min=0).sum()) // begin.shape[0]
    total, step = 0, max(1, PAIRS_AT_ONCE // max(1, batch * num_heads * seqlen_k))
    for first in range(0, seqlen_q, step):
        some = slice(first, first + step)
        here = visible_pairs.visible(take(options, rows=some), rows[some], seqlen_q, seqlen_k, num_heads)
        total += int(here.sum()) * (batch * num_heads // max(1, here.shape[0] * here.shape[1]))
    return total


def pairs(call: Call) -> int:
    """The number of visible pairs, over sequences and query heads.

    If the tensors have no values to read, all pairs are visible, and packed tokens are one sequence.
    """
    q, k, _, options, packing = call
    masks = options.q_offsets, options.key_ranges, options.mask, options.bias, options.selected
    lengths = () if packing is None else (packing.cu_seqlens_q, packing.cu_seqlens_k, packing.seqused_k)
    known = all(t is None or has_values(t) for t in (*lengths, *masks))
    if packing is None:
        batch, num_heads, seqlen_q = q.shape[:3]
        if known:
            return _count(options, batch, num_heads, seqlen_q, k.shape[2], q.device)
        return batch * num_heads * seqlen_q * k.shape[2]
    if not known:
        return q.shape[1] * q.shape[0] * k.shape[0]
    return sum(pairs(sequence.call) for sequence in call.sequences())
