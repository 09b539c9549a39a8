"""Attention over packed sequences, which have any lengths and lie one after another, without padding."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from pyattn import ops
from pyattn.cache import paged_attention
from pyattn.cache.pages import gathered
from pyattn.derivatives import autograd
from pyattn.derivatives.packed_tangents import PACKED, one_by_one
from pyattn.options.attention_options import AttentionOptions
from pyattn.options.autocast import cast
from pyattn.options.call import Call
from pyattn.options.checks import check_size, check_tensor, refuse_positional
from pyattn.options.parse import parse, takes_options
from pyattn.options.schema import PLACES, Options, Packing
from pyattn.options.tensor_types import check_outside, taken
from pyattn.weights.max_score import of_sequences, with_largest_scores

__all__ = ["attention_varlen"]


@takes_options
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *positional: object,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    return_max_score: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, ...]:
    """:func:`pyattn.attention` over sequences of different lengths, packed one after another.

    Sequence ``b`` has the queries ``cu_seqlens_q[b] <= i < cu_seqlens_q[b + 1]``, and cu_seqlens_k delimits its keys in
    the same way. The result of each sequence equals that of a separate call. There is no padding.

    1 = takes part::

        cu_seqlens_q = cu_seqlens_k = [0, 2, 5]     cu_seqlens_q [0, 1, 3], cu_seqlens_k [0, 2, 5]
                           1 0 . . .                                        1 1 . . .
                           1 1 . . .                                        . . 1 1 0
                           . . 1 0 0                                        . . 1 1 1
                           . . 1 1 0
                           . . 1 1 1

    Args:
        q: (total_q, Hq, D), with dtype and strides as for :func:`pyattn.attention`.
        k: (total_k, Hkv, D).
        v: (total_k, Hkv, Dv).
        cu_seqlens_q: (B + 1,), int32 or int64: where each sequence begins, and finally where the last one ends. It
            starts at 0, never decreases and ends at most at total_q. Sequences may be empty.
        cu_seqlens_k: the same for the keys.
        max_seqlen_q, max_seqlen_k: upper bounds on the sequences' lengths. They may exceed the longest sequence: they
            change neither the results nor the memory, nor the time on a CPU. A GPU launches blocks for sequences of
            this length.
        block_table: (B, pages of a sequence), int32 or int64. With it, k is (pages, page_size, Hkv, D) and v (pages,
            page_size, Hkv, Dv); page_size is at least 16. Key ``j`` of sequence ``b`` is in row ``j % page_size`` of
            page ``block_table[b, j // page_size]``. cu_seqlens_k says how many keys each sequence has; table entries
            after those keys are ignored. Sequences may share pages; the gradient of a shared page is summed in k's
            dtype. The pages of all sequences are first copied into one tensor in four cases: on a GPU, if gradients
            are required, inside a torch.func transform, or with selected keys.
        seqused_k: (B,), int32 or int64: how many of its keys each sequence uses; its other keys count as absent.
        return_lse: also return lse.
        return_max_score: also return max_score, after lse.
        options: as for :func:`pyattn.attention`, with these differences. q_offset: the key position of each sequence's
            first query; default: the last query is at the last key of its sequence. key_ranges: (total_q, 2) or
            (total_q, n, 2); keys are counted within the query's sequence. selected: (1 or Hkv or Hq, total_q, n), the
            same; sequences are then computed one after another, and the host reads their lengths. mask, bias: not
            implemented. With the same seed, dropout drops the same weights in sequence ``b`` as in sequence ``b`` of a
            batch.

    Returns:
        ``out`` (total_q, Hq, Dv) in q's dtype, or ``(out, lse)``, where lse is (Hq, total_q) in float32, or float64 for
        float64 inputs. Both are differentiable in q, k, v, alibi_slopes, sinks and relative_bias. With
        ``return_max_score``, also max_score (B, Hq) of each sequence, as for :func:`pyattn.attention`. Queries after
        the last sequence have out 0 and lse -inf. These queries, keys after the last sequence and unused keys get
        gradient 0.

    Raises:
        ValueError, TypeError, NotImplementedError: as for :func:`pyattn.attention`; cu_seqlens that do not start at 0,
            decrease, end after the last token or differ in length; a max_seqlen below the longest sequence; a seqused_k
            that is negative or above a sequence's length; a block_table with too few pages or with pages that do not
            exist; mask and bias. On a GPU, the host does not read the values of cu_seqlens, seqused_k and block_table
            unless PYATTN_CHECK=1 is in the environment. Instead, the results of a sequence with invalid values are NaN,
            and if cu_seqlens are invalid, all results are NaN.

    Extra memory is linear in the number of tokens. The result has the same bits for any number of threads.

    >>> q, k, v = torch.randn(3, 100, 8, 64)
    >>> cu_seqlens = torch.tensor([0, 10, 10, 64, 100])
    >>> attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 54, 54).shape
    torch.Size([100, 8, 64])
    """
    if positional:
        refuse_positional(attention_varlen, positional)
    check_outside("attention_varlen")
    check_tensor("q", q)
    if type(q) is not Tensor:
        begins = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        pages: dict[str, Any] = {"block_table": block_table, "seqused_k": seqused_k}
        returned = {"return_lse": return_lse, "return_max_score": return_max_score}
        result = taken("attention_varlen", q, k, v, *begins, **returned, **pages, **options)
        if result is not None:
            return result
    known = parse(attention_varlen, options, q.device)
    tensors = {"k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    tensors |= {name: t for name, t in (("seqused_k", seqused_k), ("block_table", block_table)) if t is not None}
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    check_size("max_seqlen_q", max_seqlen_q)
    check_size("max_seqlen_k", max_seqlen_k)
    if torch._C._is_any_autocast_enabled():
        q, k, v = cast(q), cast(k), cast(v)
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    attend = partial(_attend, q, k, v, block_table, packing)
    if return_max_score:
        out, lse, largest = with_largest_scores(attend, known, cu_seqlens_q)
        most = of_sequences(largest, cu_seqlens_q)
        return (out, lse, most) if return_lse else (out, most)
    out, lse, _, _ = attend(known)
    return (out, lse) if return_lse else out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None, packing: Packing, known: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """The operator's results. With keys in pages, ``cu_seqlens_k`` only counts each sequence's keys.

    ``known`` holds the values of :class:`Options`, possibly without defaults at its end.
    """
    if block_table is None and len(known) <= PLACES["selected"]:  # making options takes 1 us
        return autograd.attend(PACKED, q, k, v, (*packing, *known))
    options = Options(*known)
    if block_table is None:
        if options.selected is not None:
            return one_by_one(Call(q, k, v, options, packing))
        return autograd.attend(PACKED, q, k, v, (*packing, *known))
    if options.selected is None and not paged_attention.needs_copy(q, k, v, options):
        return ops.attention_varlen_paged_forward(q, k, v, block_table, *packing, *options)
    lengths = packing.cu_seqlens_k, packing.max_seqlen_k, packing.seqused_k
    k, v, used = gathered(k, v, block_table, *lengths)
    room = k.shape[1]
    starts = room * torch.arange(k.shape[0] + 1, device=k.device)
    apart = packing._replace(cu_seqlens_k=starts, max_seqlen_k=room, seqused_k=used)
    return _attend(q, k.flatten(0, 1), v.flatten(0, 1), None, apart, options)
