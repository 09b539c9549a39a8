"""A cache keeps keys and values between calls, for text that is generated a few tokens at a time."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyattn import ops
from pyattn.cache.eight_bits import check_kv_dtype
from pyattn.cache.positions import indices_of, lengths_of
from pyattn.cache.storage import Storage, check_dtype, copied
from pyattn.derivatives.transforms import constant
from pyattn.options.checks import check_integers, check_names, check_tensor, device_of, has_values

__all__ = ["KVCache"]


class KVCache(Storage):
    """The keys and values of ``batch`` sequences so far, in memory that is allocated once.

    :meth:`append` writes in place; :func:`attention_with_cache` reads. Sequences may have different lengths::

        k (B, Hkv, slots, D)    sequence 0    k0 k1 k2 k3  .  .        lengths    [4, 2]
        v (B, Hkv, slots, Dv)   sequence 1    k0 k1  .  .  .  .

    With ``window=(left, 0)``, the cache is a ring buffer. A query sees itself and the ``left`` keys before it; text may
    continue forever, and memory does not grow. The cache keeps the last ``max_seqlen`` positions. If a call has at most
    max_seqlen - left queries, every key that they see is still there.

    With ``page_size=P``, positions are stored in pages of P, and a table lists the pages of each sequence::

        block_table  0 1    page 0   k0 k1 k2 k3  of both sequences     lengths 6, 5    (P = 4, for show)
                     0 3    page 1   k4 k5  .  .  of sequence 0
                            page 3   k4  .  .  .  of sequence 1

    A sequence gets pages as it grows, and a page is free if it holds no position of any sequence. Lengths and table are
    the whole state, so setting lengths to 0 is a reset. :meth:`reorder` copies only the table: sequences then share
    pages, and a sequence copies a shared last page before it writes to it. So beam search stores a common beginning
    once, copies at most one page per sequence and step, and reads a long beginning once for all sequences. There are
    B * ceil(max_seqlen / P) pages, so max_seqlen is the only limit. If a sequence shares no pages, its pages are
    adjacent and read as fast as contiguous memory. On a GPU, if gradients are required, and inside a torch.func
    transform, :func:`attention_with_cache` first copies all pages into one batch.

    With ``shared_values=True``, v is the first Dv columns of k, as in multi-head latent attention: stored once, read
    once by a query. :meth:`append` then takes k alone::

        k (B, Hkv, slots, D)    c c c c r r    D = 6, Dv = 4: c is a token's latent vector, r its rotary part
        v (B, Hkv, slots, Dv)   c c c c

    With ``kv_dtype=torch.int8`` or ``torch.float8_e4m3fn``, keys and values are stored in 8 bits, on the CPU and
    without gradients, with a scale in float32 for each row of a head: for 128 columns 0.52 of bfloat16's memory. Keys
    of int8 are rotated first by a Hadamard matrix, as queries are, so a few channels far larger than the others cost
    little; ``k`` then holds rotated keys::

        k, v             round(x / scale)                     k_scale, v_scale    like k and v with 1 column
        scale of a row   max |x| / 127, for float8 / 448      NaN for a row that is not finite

    If a channel of the keys is 25 times as large as the others, or four are 10 times, the relative error of out is at
    most 0.02 with int8 and 0.06 with float8; if four have a mean of 20, 0.03 and 0.11.

    On a GPU, the host reads no values. CUDA graphs can therefore capture :meth:`append` and
    :func:`attention_with_cache`, but wrong values raise no error: positions that do not fit are dropped, lengths stop
    at max_seqlen, indices are clamped, and a query over a ring buffer sees only those of its keys that are still kept.
    With PYATTN_CHECK=1 in the environment, the host reads values and raises the same errors as on the CPU. If a graph
    ends with an append with lengths, :func:`attention_with_cache` outside the graph cannot see it: capture both in one
    graph, or pass q_offset. On a GPU, each append to a ring buffer copies the positions that it keeps.

    Args:
        batch, num_heads_kv: sizes of k and v.
        max_seqlen: the most positions of a sequence. A ring buffer keeps this many; it must exceed ``left``.
        head_dim, head_dim_v: columns of k and of v; head_dim_v defaults to head_dim.
        dtype: float64, float32, bfloat16 or float16; default: torch's default dtype.
        device: default: torch's default device.
        page_size: positions per page, at least 16; default: no pages.
        window: (left, right) as for :func:`pyattn.attention`. It makes the cache a ring buffer and applies to every
            query without being passed again. ``right`` matters only with causal=False. Default: no window, as (-1, -1).
        shared_values: v is the first head_dim_v columns of k.
        kv_dtype: torch.int8 or torch.float8_e4m3fn stores keys and values in 8 bits; default: in ``dtype``, which is
            always that of queries and of what is appended.

    Attributes:
        k, v: the storage; with pages, (pages, page_size, Hkv, D) and (pages, page_size, Hkv, Dv). Slots after a
            sequence's last position never affect a result.
        lengths: int64 (B,), how many positions each sequence has, including those that a ring buffer has dropped.
        starts: int64 (B,), the position in slot 0; always 0 unless the cache is a ring buffer.
        block_table: int64 (B, pages of a sequence), or None without pages.
        window: (left, right) of a ring buffer, or None.
        dtype: that of queries and of what is appended.
        kv_dtype, k_scale, v_scale: of a cache of 8 bits, else None; float32, like k and v with one column.

    Raises:
        ValueError: a size below 0, more numbers than any memory holds, a window below -1 or with a left bound outside
            [0, max_seqlen), shared values with more columns than k, a device that this torch cannot use.
        TypeError: an unsupported dtype or kv_dtype, a size that is not an int, a device of another type, a window that
            is no pair.
        NotImplementedError: a ring buffer with pages; a kv_dtype with dtype float64 or on a GPU.

    >>> cache = KVCache(batch=2, num_heads_kv=4, max_seqlen=100, head_dim=64)
    >>> cache.append(*torch.randn(2, 2, 4, 10, 64))
    >>> cache.lengths
    tensor([10, 10])
    >>> pyattn.attention_with_cache(torch.randn(2, 8, 1, 64), cache).shape
    torch.Size([2, 8, 1, 64])
    """

    __module__ = "pyattn.cache"  # the public name: pickles contain it

    @check_names
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
        window: tuple[int, int] | None = None,
        shared_values: bool = False,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        sizes = batch, num_heads_kv, max_seqlen, head_dim, head_dim_v
        super().__init__(*sizes, dtype, device, page_size, window, shared_values, kv_dtype)

    def __repr__(self) -> str:
        shape = f"k {tuple(self.k.shape)}, v {tuple(self.v.shape)}, {self.dtype}"
        sizes = f"max_seqlen={self.max_seqlen}, page_size={self.page_size}, window={self.window}"
        sizes += ", shared_values=True" if self.shared_values else ""
        sizes += "" if self.kv_dtype is None else f", kv_dtype={self.kv_dtype}"
        lengths = self.lengths.tolist() if has_values(self.lengths) else f"of {len(self.lengths)} sequences"
        return f"KVCache({shape}, {sizes}, lengths={lengths})"

    @check_names
    def append(self, k: Tensor, v: Tensor | None = None, lengths: Sequence[int] | Tensor | None = None) -> None:
        """Appends new positions in place; gradients do not flow through them.

        Don't use append, or a module with a ``kv_cache``, in ``torch.utils.checkpoint``: recomputation appends again.

        Args:
            k, v: (B, Hkv, new, D) and (B, Hkv, new, Dv), in the cache's dtype, with any strides; without v if the cache
                has shared values.
            lengths: ints or an int32 or int64 tensor (B,): sequence b gets the first lengths[b] new positions; default:
                all. The others are padding, and their queries see no key in :func:`attention_with_cache`.

        Raises:
            ValueError: wrong shapes; a v for shared values; on the CPU, a length below 0 or above ``new`` and, unless
                the cache is a ring buffer, a sequence that would exceed max_seqlen. The cache is then unchanged.
            TypeError: a wrong dtype, an argument that is not a tensor.
            NotImplementedError: tensors that are not dense; batched tensors under ``torch.vmap``.
        """
        check_tensor("k", k)
        v = self.new_values(k, v)
        new = None if lengths is None else check_integers("lengths", lengths, self.lengths.device)
        before = None if new is None else self.lengths.clone()
        append = ops.cache_append if self.block_table is None else ops.cache_append_pages
        k_rows, v_rows = constant(k), constant(v)
        if self.kv_dtype is None:  # the loop below costs a token half a microsecond
            append(*self.written, *self.state, k_rows, v_rows, new, self.max_seqlen)
        else:
            for part, rows in zip(self.parts, self.quantized(k_rows, v_rows), strict=True):
                append(*part, *rows, new, self.max_seqlen)
        self._ragged = before is not None
        if before is not None:
            torch.stack([torch.full_like(before, k.shape[2]), before, self.lengths], out=self._last)

    def reset(self) -> None:
        """Empties all sequences; the memory stays allocated."""
        self.lengths.zero_()
        self.starts.zero_()
        self._ragged = False
        self.user: weakref.ref[Any] | None = None

    @check_names
    def truncate(self, lengths: int | Sequence[int] | Tensor) -> None:
        """Keeps the first positions of each sequence, for example to drop rejected drafts of speculative decoding.

        Args:
            lengths: ints or an int32 or int64 tensor (B,): sequence b keeps lengths[b] positions; or one int for all.

        Raises:
            ValueError: the wrong number of lengths; on the CPU, a length below 0 or above the sequence's, and in a ring
                buffer a length whose newest query would see dropped keys. The cache is then unchanged.
            TypeError: any other type.
        """
        kept = lengths_of(lengths, self.lengths)
        seen = None if self.window is None else self.window[0] + 1
        ops.cache_truncate(self.lengths, None if seen is None else self.starts, kept, seen or 0)

    @check_names
    def keep(
        self, indices: Sequence[Sequence[int] | Tensor] | Tensor, lengths: int | Sequence[int] | Tensor | None = None
    ) -> None:
        """Keeps some of the newest positions, for example the accepted branch of a drafted tree (:func:`masks.tree`).

        They follow the positions before them without a gap, and all others are dropped, as if only they had been
        appended: the same bits, in pages and in ring buffers. ::

            positions                    0  1  2  3  4  5      a tree of 3 to 5: node 3, its children 4 and 5
            keys                         k0 k1 k2 k3 k4 k5     lengths 6
            keep([[3, 5]])               k0 k1 k2 k3 k5  .     lengths 5
            keep([[4]], lengths=3)       k0 k1 k2 k4  .  .     lengths 4; without lengths, k3 would stay

        Args:
            indices: the positions to keep of each sequence, in increasing order: a list of lists of ints, or an int32
                or int64 tensor (B, n), -1 after the last one of a sequence with fewer.
            lengths: as for :meth:`truncate`: the positions below lengths[b] also stay, such as the text before the
                draft. Default: those before the sequence's first index, or all if it has no index.

        Raises:
            ValueError: wrong shapes; on the CPU, indices of a sequence that don't increase or that lie outside of
                lengths[b] to its last position, and in a ring buffer a first index whose query would see dropped keys.
                The cache is then unchanged. On a GPU, indices from the first invalid one on are left out.
            TypeError: any other type.
        """
        chosen = indices_of(indices, self.lengths)
        base = None if lengths is None else lengths_of(lengths, self.lengths)
        left = 0 if self.window is None else self.window[0]
        for part in self.parts:
            if self.block_table is None:
                ops.cache_keep(*part, chosen, base, left, self.max_seqlen)
            else:
                ops.cache_keep_pages(*part, chosen, base, self.max_seqlen)
        self._ragged = False

    def clone(self) -> "KVCache":
        """Returns a copy of the cache with separate storage, including pages or the ring buffer."""
        return copied(self, self.lengths.device, self.dtype)

    @check_names
    def to(
        self, device: torch.device | str | int | torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> "KVCache":
        """Returns a copy on this device and in this dtype, or the cache itself if it has both. Also ``to(dtype)``.

        Args:
            device: default: the cache's.
            dtype: of k and v: float64, float32, bfloat16 or float16; default: the cache's. With a kv_dtype, that of
                queries and of what is appended.

        Raises:
            TypeError: an unsupported dtype.
            ValueError: a device that this torch cannot use.
        """
        if isinstance(device, torch.dtype) and dtype is None:
            device, dtype = None, device
        dtype = self.dtype if dtype is None else dtype
        check_dtype(dtype)
        device = device_of(device) or self.lengths.device
        check_kv_dtype(self.kv_dtype, dtype, device)
        if device == self.lengths.device and dtype == self.dtype:
            return self
        return copied(self, device, dtype)

    @check_names
    def reorder(self, idx: Sequence[int] | Tensor) -> None:
        """Makes each sequence b a copy of sequence idx[b], as in beam search; an index may occur several times.

        Args:
            idx: (B,), ints or an int32 or int64 tensor, each from 0 to B - 1.

        Raises:
            ValueError: the wrong number of indices; on the CPU, an index out of range. The cache is then unchanged.
            TypeError: any other type.
        """
        chosen = check_integers("idx", idx, self.lengths.device)
        if self.block_table is None:
            for part in self.parts:
                ops.cache_reorder(*part, chosen)
        else:
            ops.cache_reorder_pages(self.lengths, self.block_table, chosen)
        if self._ragged:
            chosen = chosen.clamp(0, max(0, len(self.lengths) - 1))  # like the operator on a GPU
            torch.index_select(self._last.clone(), 1, chosen, out=self._last)


torch.serialization.add_safe_globals([KVCache])  # torch.load reads a cache without weights_only=False
