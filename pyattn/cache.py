"""Keys and values that stay between calls, for text that is generated a few tokens at a time."""

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from pyattn.arguments import (
    check_64_bits,
    check_integers,
    check_size,
    check_tensor,
    check_type,
    check_window,
    hide_catch_all,
    refuse,
)
from pyattn.functional import attention
from pyattn.options import UNBOUNDED
from pyattn.visible import check_ranges

__all__ = ["KVCache", "attention_with_cache"]

_append = torch.ops.pyattn.cache_append.default
_reorder = torch.ops.pyattn.cache_reorder.default
_slots = torch.ops.pyattn.cache_slots.default

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

RING_SLACK = 4
"""A ring has 1 / RING_SLACK more slots than positions it keeps. Where they end, the positions move to the front: each
appended token moves RING_SLACK others, once on average, while a query reads the whole window: under 1 % for windows of
1,024 and more, for a quarter more memory."""


class KVCache:
    """The keys and values of ``batch`` sequences so far, in memory that is allocated once.

    :meth:`append` writes in place, :func:`attention_with_cache` reads. Sequences may have different lengths::

        k (B, Hkv, slots, D)    sequence 0    k0 k1 k2 k3  .  .        lengths    [4, 2]
        v (B, Hkv, slots, Dv)   sequence 1    k0 k1  .  .  .  .

    With ``window=W`` the cache is a ring: a query sees itself and the W - 1 keys before it, text may go on without end,
    and memory does not grow. The last ``max_seqlen`` positions are kept, so that max_seqlen - W + 1 queries at a time
    find all that they see.

    Args:
        batch, num_heads_kv: sizes of k and v.
        max_seqlen: the most positions of a sequence; of a ring, those it keeps, at least W.
        head_dim, head_dim_v: columns of k and of v; default of the latter: head_dim.
        dtype: float64, float32, bfloat16 or float16; default: torch's.
        device: default: torch's.
        page_size: pages are not there yet; None.
        window: W of a ring; default: none.

    Attributes:
        k, v: the storage. Slots past a sequence's length never matter, whatever they hold.
        lengths: int64 (B,), the positions that were appended to each sequence.
        starts: int64 (B,), the position in slot 0: not 0 in a ring alone.

    Raises:
        ValueError: a size below 0, a window outside [1, max_seqlen].
        TypeError: another dtype, what is no int.
        NotImplementedError: page_size.

    >>> cache = KVCache(batch=2, num_heads_kv=4, max_seqlen=100, head_dim=64)
    >>> cache.append(*torch.randn(2, 2, 4, 10, 64))
    >>> cache.lengths
    tensor([10, 10])
    >>> attention_with_cache(torch.randn(2, 8, 1, 64), cache).shape
    torch.Size([2, 8, 1, 64])
    """

    def __init__(
        self,
        batch: int,
        num_heads_kv: int,
        max_seqlen: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        page_size: int | None = None,
        window: int | None = None,
    ) -> None:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        dtype = torch.get_default_dtype() if dtype is None else dtype
        sizes = {"batch": batch, "num_heads_kv": num_heads_kv, "max_seqlen": max_seqlen}
        for name, size in (sizes | {"head_dim": head_dim, "head_dim_v": head_dim_v}).items():
            check_size(name, size)
        if dtype not in DTYPES:
            raise TypeError(f"pyattn: dtype must be float64, float32, bfloat16 or float16, got {dtype}")
        if page_size is not None:
            raise NotImplementedError(f"pyattn: KVCache has no pages yet, leave page_size out, got {page_size}")
        slots = max_seqlen
        if window is not None:
            check_size("window", window, least=1)
            if window > max_seqlen:
                raise ValueError(f"pyattn: window must not exceed max_seqlen, got {window} and {max_seqlen}")
            slots += -(-max_seqlen // RING_SLACK)
        self.max_seqlen, self.window = max_seqlen, window
        with torch.inference_mode(False):  # so that a cache outlives the mode that it was made in
            self.k = torch.zeros(batch, num_heads_kv, slots, head_dim, dtype=dtype, device=device)
            self.v = torch.zeros(batch, num_heads_kv, slots, head_dim_v, dtype=dtype, device=device)
            self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
            self.starts = torch.zeros_like(self.lengths)

    def __repr__(self) -> str:
        shape = f"k {tuple(self.k.shape)}, v {tuple(self.v.shape)}, {self.k.dtype}"
        return f"KVCache({shape}, max_seqlen={self.max_seqlen}, window={self.window}, lengths={self.lengths.tolist()})"

    def append(self, k: Tensor, v: Tensor, lengths: Sequence[int] | Tensor | None = None) -> None:
        """Appends new positions in place; gradients do not flow through them.

        Args:
            k, v: (B, Hkv, new, D) and (B, Hkv, new, Dv), in the cache's dtype, any strides.
            lengths: the first lengths[b] of the new positions count for sequence b, ints or an int32 or int64 tensor
                (B,); default: all.

        Raises:
            ValueError: a sequence that would outgrow max_seqlen, unless the cache is a ring; other shapes; a length
                outside 0 to new. The cache is then as it was.
            TypeError: another dtype, what is no tensor.
        """
        check_tensor("k", k)
        check_tensor("v", v)
        new = None if lengths is None else check_integers("lengths", lengths, self.lengths.device)
        storage = self.k, self.v, self.lengths, self.starts
        _append(*storage, k.detach(), v.detach(), new, self.max_seqlen)

    def reset(self) -> None:
        """Forgets all sequences; the memory stays."""
        self.lengths.zero_()
        self.starts.zero_()

    def reorder(self, idx: Sequence[int] | Tensor) -> None:
        """Sequence b becomes what sequence idx[b] was, as beam search wants it; one may be taken several times.

        Args:
            idx: (B,), ints or an int32 or int64 tensor, each from 0 to B - 1.

        Raises:
            ValueError: another number of them, one that is not there. The cache is then as it was.
            TypeError: other types.
        """
        chosen = check_integers("idx", idx, self.lengths.device)
        _reorder(self.k, self.v, self.lengths, self.starts, chosen)


@overload
def attention_with_cache(
    q: Tensor,
    cache: KVCache,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
    key_ranges: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention_with_cache(
    q: Tensor,
    cache: KVCache,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
    key_ranges: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@hide_catch_all
def attention_with_cache(
    q: Tensor,
    cache: KVCache,
    *positional: object,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    window: tuple[int, int] = UNBOUNDED,
    key_ranges: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    **named: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`pyattn.attention` of queries over the keys in a cache, the queries' own appended before.

    Query ``i`` of sequence ``b`` stands at position ``cache.lengths[b] - Sq + i``: the last query is the newest key's.
    The result is that of the last rows of one call over all tokens. ::

        cache.lengths 3, Sq 1     1 1 1 . .          cache.lengths 4, Sq 2     1 1 1 0 .
                                                                               1 1 1 1 .
    Args:
        q: (B, Hq, Sq, D) in the cache's dtype: one token to decode, or a chunk of a prompt.
        cache: a :class:`KVCache`.
        q_offset: position of query 0, an int or (B,) int64. After an append with lengths of its own, pass what
            cache.lengths held before it (a clone); queries that do not count then see no more than the others.
        window, key_ranges: in positions, on top of the cache's own window.
        bias: as for :func:`pyattn.attention`, with max_seqlen keys.
        causal, softmax_scale, softcap, alibi_slopes, sinks, dropout_p, dropout_seed, return_lse: as there.

    Returns:
        As :func:`pyattn.attention`, differentiable in q, bias, alibi_slopes and sinks. An append or reorder between
        forward and backward makes backward raise.

    Raises:
        ValueError, TypeError: as :func:`pyattn.attention`; more than max_seqlen - W + 1 queries over a ring, or a
            q_offset where query 0 sees keys that the ring may have dropped.
        NotImplementedError: as there; key_ranges or bias over a ring, whose slots are not positions.
    """
    if positional or named:
        refuse(attention_with_cache, positional, named)
    check_tensor("q", q)
    check_type("cache", cache, KVCache)
    seqlen_q = q.shape[2] if q.dim() == 4 else 0  # attention refuses q of other dimensions
    newest = q_offset is None
    if q_offset is None:
        q_offset = cache.lengths - seqlen_q
    if cache.window is not None:
        if key_ranges is not None or bias is not None:
            wrong = "bias" if key_ranges is None else "key_ranges"
            raise NotImplementedError(f"pyattn: a cache with a window takes no {wrong}, got window={cache.window}")
        window, q_offset = _in_ring(cache, cache.window, window, q_offset, newest, seqlen_q)
    if not (causal and newest):
        key_ranges = _used(key_ranges, cache, seqlen_q)
    out, lse = attention(
        q,
        cache.k,
        cache.v,
        causal=causal,
        q_offset=q_offset,
        window=window,
        key_ranges=key_ranges,
        softmax_scale=softmax_scale,
        softcap=softcap,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        return_lse=True,
    )
    return (out, lse) if return_lse else out


def _in_ring(
    cache: KVCache, kept: int, window: tuple[int, int], q_offset: int | Tensor, newest: bool, seqlen_q: int
) -> tuple[tuple[int, int], Tensor]:
    """``window`` within that of the ring, which is ``kept`` keys wide, and ``q_offset`` in its slots."""
    if seqlen_q > cache.max_seqlen - kept + 1:
        raise ValueError(
            f"pyattn: over a cache with window={kept}, seqlen_q must not exceed max_seqlen - window + 1 = "
            f"{cache.max_seqlen - kept + 1}, got {seqlen_q}"
        )
    check_window(window)
    left, right = window
    left = kept - 1 if left < 0 else min(left, kept - 1)
    if newest:
        return (left, right), q_offset - cache.starts
    check_type("q_offset", q_offset, int, torch.SymInt, Tensor)
    check_64_bits("q_offset", q_offset)
    offsets = q_offset if isinstance(q_offset, Tensor) else torch.full_like(cache.lengths, q_offset)
    return (left, right), _slots(cache.lengths, cache.starts, offsets, left + 1, cache.max_seqlen)


def _used(key_ranges: Tensor | None, cache: KVCache, seqlen_q: int) -> Tensor:
    """The slots in use, [0, length), in these ranges; a causal mask of the newest queries hides the rest itself."""
    end = (cache.lengths - cache.starts)[:, None].expand(-1, seqlen_q)
    if key_ranges is None:
        return torch.stack([torch.zeros_like(end), end], -1)
    check_tensor("key_ranges", key_ranges)
    if key_ranges.shape not in ((1, seqlen_q, 2), (*end.shape, 2)):
        return key_ranges  # which attention refuses
    check_ranges(key_ranges, cache.max_seqlen)
    first, behind_last = key_ranges.unbind(-1)
    end = torch.minimum(behind_last, end)
    return torch.stack([torch.minimum(first, end), end], -1)
