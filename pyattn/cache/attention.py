"""Attention over a cache: queries at the newest positions, over the keys and values of all positions so far."""

import torch
from torch import Tensor
from typing_extensions import Unpack

from pyattn import ops
from pyattn.attention import attention
from pyattn.cache import KVCache, paged_attention
from pyattn.cache.ring_buffer import check_ring, in_slots, narrowed
from pyattn.masks.draft_trees import behind_cache
from pyattn.masks.key_ranges import are_ranges, check_ranges, plain
from pyattn.options.attention_options import AttentionOptions
from pyattn.options.checks import check_64_bits, check_tensor, check_type, check_window, int64_of, refuse_positional
from pyattn.options.parse import check_known, takes_options
from pyattn.options.schema import UNBOUNDED
from pyattn.options.tensor_types import check_outside
from pyattn.weights.attention_weights import attention_weights

__all__ = ["attention_with_cache", "weights_with_cache"]


@takes_options
def attention_with_cache(
    q: Tensor,
    cache: KVCache,
    *positional: object,
    return_lse: bool = False,
    return_max_score: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, ...]:
    """:func:`pyattn.attention` over a cache to which the queries' own keys have already been appended.

    Query ``i`` of sequence ``b`` is at position ``cache.lengths[b] - Sq + i``, so the last query is at the newest key.
    The result equals the last rows of one call over all tokens. ::

        cache.lengths 3, Sq 1     1 1 1 . .          cache.lengths 4, Sq 2     1 1 1 0 .
                                                                               1 1 1 1 .

    After ``cache.append(k, v, lengths)``, q is padded like k: query ``i`` is at position ``before[b] + i``, where
    ``before`` is cache.lengths before that append. Queries from ``lengths[b]`` on are padding and have out 0, lse -inf
    (with sinks, the sink) and gradient 0. If q has more rows than k had, its last rows belong to that append, and its
    other rows directly precede them. If q has fewer rows, or a sequence's length has changed since, q holds the newest
    positions, as above. Only the last append matters: after several ragged appends, either call this function after
    each of them or pass q_offset. ::

        append of 2, lengths [2, 1], Sq 2     sequence 0, before 2   1 1 1 0 .      sequence 1, before 1   1 1 0 0 .
                                                                     1 1 1 1 .                             0 0 0 0 .
    Args:
        q: (B, Hq, Sq, D) in the cache's dtype: one token to decode, or a chunk of a prompt.
        cache: a :class:`KVCache`.
        return_lse: also return lse.
        return_max_score: also return max_score, after lse.
        options: as for :func:`pyattn.attention`, with these differences. q_offset: the position of query 0, an int or a
            (B,) int32 or int64 tensor; no query is then padding. Default: as above. window, key_ranges: they count
            positions and apply in addition to the cache's own window. bias: it has max_seqlen keys. mask: the same, or
            Sq keys, which are those at the queries' own positions, as of a drafted tree (:func:`pyattn.masks.tree`);
            the keys before and after them then take part.

    Without a ring buffer, the result has the same bits as :func:`pyattn.attention` over the keys so far, with two
    exceptions, in which it agrees up to rounding. The first is a ragged append. The second is a call with all of
    these: queries before the first key, a window with a left bound, and causal=False or a q_offset.

    Returns:
        As for :func:`pyattn.attention`, differentiable in q, bias, alibi_slopes, sinks and relative_bias. If you append
        or reorder between forward and backward, backward raises an error, unless the cache has pages: backward then has
        a copy.

    Raises:
        ValueError, TypeError: as for :func:`pyattn.attention`; more than max_seqlen - left queries over a ring buffer;
            on the CPU, lengths set beyond the cache's size, and queries that see keys which a ring buffer has dropped.
        NotImplementedError: as for :func:`pyattn.attention`; over a ring buffer, whose slots are not positions,
            key_ranges, bias, and a mask with other than Sq keys.
    """
    if positional:
        refuse_positional(attention_with_cache, positional)
    check_outside("attention_with_cache")
    check_known(attention_with_cache, options)
    check_tensor("q", q)
    check_type("cache", cache, KVCache)
    seqlen_q = q.shape[2] if q.dim() == 4 else 0  # attention refuses any other q
    check_ring(cache.window, cache.max_seqlen, seqlen_q, options)
    over_slots: AttentionOptions = options | masks_in_slots(cache, seqlen_q, options)
    try:
        if cache.block_table is None:
            results = attention(q, cache.k, cache.v, return_lse=True, return_max_score=return_max_score, **over_slots)
        else:
            table = cache.block_table, cache.lengths, cache.max_seqlen
            results = paged_attention.attention(
                q, cache.k, cache.v, *table, return_max_score=return_max_score, **over_slots
            )
    except (ValueError, TypeError) as error:  # checking beforehand would cost 1 % of a token's time
        raise (misfit(q, cache) or error) from None
    out, lse, *most = results
    return (out, lse, *most) if return_lse else (out, *most) if most else out


def masks_in_slots(cache: KVCache, seqlen_q: int, options: AttentionOptions) -> AttentionOptions:
    """Converts causal, q_offset, window, key_ranges and mask from positions to the cache's slots."""
    causal, window, q_offset = options.get("causal", True), options.get("window"), options.get("q_offset")
    window = UNBOUNDED if window is None else window
    check_type("causal", causal, bool)
    check_window(window)
    q_offset = int64_of(q_offset) if isinstance(q_offset, Tensor) else q_offset
    key_ranges = plain(options.get("key_ranges"), causal)
    if cache.window is not None:
        window = narrowed(window, cache.window, cache.max_seqlen, seqlen_q)
    last_append = cache.last_append if q_offset is None else None
    if causal and q_offset is None and last_append is None:
        q_offset = _newest(cache, seqlen_q, window[0])  # the causal mask itself hides unused slots
    else:
        used, padding = _newest(cache), None
        if last_append is not None:
            padding = _padding(last_append, cache.lengths, seqlen_q)
            q_offset = cache.lengths - seqlen_q + padding
        if q_offset is None:
            q_offset = _newest(cache, seqlen_q, window[0])
        elif cache.window is not None:
            q_offset = in_slots(q_offset, cache.lengths, cache.starts, window[0], cache.max_seqlen)
        key_ranges = _in_use(key_ranges, used, padding, seqlen_q, cache.max_seqlen)
    mask = options.get("mask")
    own_keys = isinstance(mask, Tensor) and mask.shape[-1:] == (seqlen_q,) and seqlen_q > 1
    if mask is not None and own_keys and (cache.window is not None or seqlen_q != cache.max_seqlen):
        mask = over_slots(mask, q_offset, cache)
    return {"causal": causal, "q_offset": q_offset, "window": window, "key_ranges": key_ranges, "mask": mask}


def over_slots(mask: Tensor, q_offset: int | Tensor, cache: KVCache) -> Tensor:
    """A mask over the queries' own keys as one over the cache's slots; as it is if it fits neither."""
    check_type("q_offset", q_offset, int, torch.SymInt, Tensor)
    check_64_bits("q_offset", q_offset)
    lengths, slots = cache.lengths, cache.max_seqlen if cache.window is None else cache.k.shape[2]
    first = q_offset if isinstance(q_offset, Tensor) else torch.full_like(lengths, q_offset)
    own_batch = mask.dim() < 4 or (mask.dim() == 4 and mask.shape[0] in (1, len(lengths)))
    fits = own_batch and first.shape == lengths.shape and first.dtype == torch.int64
    return behind_cache(mask, first, slots) if fits else mask


def misfit(q: Tensor, cache: KVCache) -> Exception | None:
    """Returns an error that names the cache instead of k and v, or None if q fits the cache."""
    if q.dim() != 4:
        return None
    batch, num_heads_q, _, head_dim = q.shape
    k, batch_of_cache = cache.k, cache.lengths.shape[0]
    num_heads_kv = k.shape[1 if cache.block_table is None else 2]
    if batch != batch_of_cache:
        return ValueError(f"pyattn: q must have the cache's batch, got {batch} and {batch_of_cache}")
    if head_dim != k.shape[3]:
        return ValueError(f"pyattn: q must have the cache's head_dim, got {head_dim} and {k.shape[3]}")
    if num_heads_q % num_heads_kv if num_heads_kv else num_heads_q:
        return ValueError(
            f"pyattn: num_heads_q must be a multiple of the cache's num_heads_kv, got {num_heads_q} and {num_heads_kv}"
        )
    if q.device != k.device:
        return ValueError(f"pyattn: q must be on the cache's device, got {q.device} and {k.device}")
    if q.dtype != k.dtype and not torch._C._is_any_autocast_enabled():
        return TypeError(f"pyattn: q must have the cache's dtype, got {q.dtype} and {k.dtype}")
    return None


def _newest(cache: KVCache, seqlen_q: int = 0, left: int = 0) -> Tensor:
    """(B,): the slot of the first of the ``seqlen_q`` newest queries; it sees ``left`` keys before its own.

    With seqlen_q 0, the result is the end of the slots in use.
    """
    if cache.window is None:
        first: Tensor = ops.cache_newest(cache.lengths, None, seqlen_q, 0, cache.max_seqlen)
    else:
        first = ops.cache_newest(cache.lengths, cache.starts, seqlen_q, left, cache.k.shape[2])
    return first


def _padding(last_append: Tensor, lengths: Tensor, seqlen_q: int) -> Tensor:
    """(B,): how many of a sequence's last queries are padding of the last append.

    The number is 0 if that append had more rows than there are queries, or if the sequence's length has changed since.
    """
    new, before, after = last_append.unbind(0)
    return torch.where((new <= seqlen_q) & (after == lengths), new - (after - before), 0)


def _in_use(key_ranges: Tensor | None, used: Tensor, padding: Tensor | None, seqlen_q: int, max_seqlen: int) -> Tensor:
    """``key_ranges`` of B sequences, cut to the slots in use, [0, used), and empty for the last ``padding`` queries."""
    end = used.unsqueeze(1).expand(-1, seqlen_q)
    if padding is not None:
        rows = torch.arange(seqlen_q, device=used.device)
        end = torch.where(rows < (seqlen_q - padding).unsqueeze(1), end, 0)
    if key_ranges is None:
        return torch.stack([torch.zeros_like(end), end], -1)
    check_tensor("key_ranges", key_ranges)
    if not are_ranges(key_ranges, *end.shape) or key_ranges.dtype not in (torch.int32, torch.int64):
        return key_ranges  # attention refuses them
    if not key_ranges.is_cuda:  # on a GPU they are not read on the host: kernels clamp them
        check_ranges(key_ranges, max_seqlen)
    first, after_last = key_ranges.unbind(-1)
    end = torch.minimum(after_last, end if first.dim() == 2 else end.unsqueeze(-1))
    return torch.stack([torch.minimum(first, end), end], -1)


def weights_with_cache(q: Tensor, cache: KVCache, **options: Unpack[AttentionOptions]) -> Tensor:
    """The weights of :func:`pyattn.attention_with_cache`, indexed by position.

    The host reads the length of the longest sequence.

    Returns:
        (B, Hq, Sq, length of the longest sequence). Positions that a ring buffer no longer keeps have weight 0.
    """
    lengths, used = cache.lengths, cache.lengths - cache.starts
    positions, slots = (int(n.max()) if len(n) else 0 for n in (lengths, used))
    check_ring(cache.window, cache.max_seqlen, q.shape[2], options)
    weights = attention_weights(q, first_keys(cache, slots), **masks_in_first_slots(cache, slots, q.shape[2], options))
    if cache.window is None:
        return weights
    slot = torch.arange(positions, device=lengths.device) - cache.starts[:, None]
    kept = (slot >= 0) & (slot < slots)
    index = torch.where(kept, slot, 0)[:, None, None].expand(*weights.shape[:3], -1)
    return weights.gather(-1, index).masked_fill(~kept[:, None, None], 0.0)


def masks_in_first_slots(cache: KVCache, slots: int, seqlen_q: int, options: AttentionOptions) -> AttentionOptions:
    """The options for attention over the keys in the first ``slots`` slots, all that are in use."""
    options = options | masks_in_slots(cache, seqlen_q, options)
    if (key_ranges := options["key_ranges"]) is not None:
        options["key_ranges"] = key_ranges.clamp(max=slots)
    options["mask"], options["bias"] = (_first(options.get("mask"), slots), _first(options.get("bias"), slots))
    return options


def _first(pairs: Tensor | None, slots: int) -> Tensor | None:
    """Returns the columns of a mask or a bias that belong to the first ``slots`` slots."""
    return pairs if pairs is None or pairs.shape[-1] == 1 else pairs[..., :slots]


def first_keys(cache: KVCache, slots: int) -> Tensor:
    """(B, Hkv, slots, D): the keys in the first slots of every sequence, copied if they lie in pages."""
    if cache.block_table is None:
        return cache.k[:, :, :slots]
    pages = cache.block_table[:, : -(-slots // cache.k.shape[1])]
    return cache.k[pages].flatten(1, 2).transpose(1, 2)[:, :, :slots]
