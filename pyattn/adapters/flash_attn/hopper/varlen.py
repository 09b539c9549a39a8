"""FlashAttention 3's flash_attn_varlen_func: packed sequences, each of which may use a part of its tokens."""

import torch
from torch import Tensor

from pyattn import attention_varlen
from pyattn.adapters.flash_attn.arguments import (
    Window,
    WrongValueError,
    check_dimensions,
    check_int32,
    equal_lengths,
    longest,
    named,
)
from pyattn.adapters.flash_attn.hopper.arguments import (
    FLOAT8,
    Descales,
    check_hints,
    check_lengths,
    chunk_of,
    prepared,
)
from pyattn.adapters.flash_attn.hopper.results import Results, check_caller
from pyattn.options import UNBOUNDED
from pyattn.options.checks import check_size, check_tensor, check_type


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Results:
    """:func:`pyattn.attention_varlen` under FlashAttention 3's names.

    Each sequence is masked as :func:`flash_attn_func` masks a batch, and does not see the others.

    Args:
        q: (total_q, Hq, D), any strides; without cu_seqlens_q, (B, Sq, Hq, D).
        k, v: (total_k, Hkv, D) and (total_k, Hkv, Dv); without cu_seqlens_k, (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k: (B + 1,), int32, where each sequence begins.
        max_seqlen_q, max_seqlen_k: upper bounds on the lengths of the sequences; needed with cu_seqlens.
        seqused_q: (B,) int32, how many of its queries each sequence uses: the last of these is at its last key, and the
            others have out 0 and lse -inf.
        seqused_k: (B,) int32, how many of its keys each sequence uses.
        qv: (total_q, Hq, Dv), or (B, Sq, Hq, Dv).
        q_descale, k_descale, v_descale: (B, Hkv), as for :func:`flash_attn_func`, like all other arguments.

    Returns:
        ``out`` (total_q, Hq, Dv), or ``(out, softmax_lse)`` with softmax_lse (Hq, total_q); for a batch, as
        :func:`flash_attn_func`.

    Raises:
        ValueError, TypeError, NotImplementedError: as for :func:`pyattn.attention_varlen` and :func:`flash_attn_func`;
            seqused_q beyond a sequence's queries.

    >>> q, k, v = torch.randn(3, 30, 4, 64).unbind()
    >>> cu_seqlens = torch.tensor([0, 10, 30], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 20, 20, causal=True).shape
    torch.Size([30, 4, 64])
    """
    if not return_attn_probs:
        check_caller("flash_attn_varlen_func")
    check_type("return_attn_probs", return_attn_probs, bool)
    check_hints(num_splits, pack_gqa, sm_margin)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
    scores = softmax_scale, causal, window_size, softcap, deterministic
    out, lse = attend(q, k, v, qv, Descales(q_descale, k_descale, v_descale), attention_chunk, *lengths, *scores)
    return (out, lse) if return_attn_probs else out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    descales: Descales,
    attention_chunk: int,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    deterministic: bool = False,
    sinks: Tensor | None = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out, softmax_lse)`` of :func:`flash_attn_varlen_func`, with a sink for each head and keys in pages if given.

    With a block_table (B, pages of a sequence), k is (pages, page_size, Hkv, D) and seqused_k is needed.
    """
    options = named(0.0, softmax_scale, causal, window_size, softcap, None, deterministic)
    check_size("attention_chunk", attention_chunk)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
    shape = q.shape[:2]
    if batched := cu_seqlens_q is None:
        check_dimensions("q without cu_seqlens_q", q, "batch, seqlen, num_heads, head_dim")
        cu_seqlens_q, max_seqlen_q = equal_lengths(shape[0], shape[1], q.device), shape[1]
        q, qv = q.flatten(0, 1), None if qv is None else qv.flatten(0, 1)
    else:
        check_int32("cu_seqlens_q", cu_seqlens_q)
        check_dimensions("cu_seqlens_q", cu_seqlens_q, "batch + 1")
    check_dimensions("q", q, "total_q, num_heads, head_dim")
    batch = len(cu_seqlens_q) - 1
    if block_table is not None:
        if cu_seqlens_k is not None or seqused_k is None:
            given = {"cu_seqlens_k": cu_seqlens_k is not None, "seqused_k": seqused_k is not None}
            raise WrongValueError(
                "pyattn: a page_table needs seqused_k and no cu_seqlens_k, got "
                + (" and ".join(name for name, is_given in given.items() if is_given) or "neither")
            )
        check_int32("page_table", block_table)
        check_dimensions("page_table", block_table, "batch, pages")
        room = block_table.shape[1] * k.shape[1]
        cu_seqlens_k, max_seqlen_k = equal_lengths(batch, room, q.device), room
    elif cu_seqlens_k is None:
        for name, tensor in (("k", k), ("v", v)):
            check_dimensions(f"{name} without cu_seqlens_k", tensor, "batch, seqlen, num_heads, head_dim")
        cu_seqlens_k, max_seqlen_k = equal_lengths(k.shape[0], k.shape[1], q.device), k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    else:
        check_int32("cu_seqlens_k", cu_seqlens_k)
    sizes = longest("max_seqlen_q", max_seqlen_q), longest("max_seqlen_k", max_seqlen_k)
    if seqused_k is not None:
        check_int32("seqused_k", seqused_k, (batch,))
    rows = None
    if seqused_q is not None or attention_chunk or q.dtype == FLOAT8:
        rows = torch.searchsorted(cu_seqlens_q[1:], torch.arange(len(q), device=q.device), right=True)
        rows = rows.clamp(max=max(0, batch - 1))  # tokens after the last sequence see no key, whatever is said of them
    inputs = prepared(q, k, v, qv, descales, batch, rows)
    if seqused_q is not None or attention_chunk:
        assert rows is not None
        keys = (cu_seqlens_k.diff() if seqused_k is None else seqused_k).long()
        room_q = cu_seqlens_q.diff().long()
        queries = room_q if seqused_q is None else check_lengths("seqused_q", seqused_q, room_q)
        options["q_offset"] = keys - queries
        index = torch.arange(len(q), device=q.device) - cu_seqlens_q[rows]
        ranges = chunk_of(index + options["q_offset"][rows], attention_chunk, keys[rows], sum(sizes))
        options["key_ranges"] = torch.where((index < queries[rows])[:, None], ranges, 0)
    options |= {"seqused_k": seqused_k, "block_table": block_table, "sinks": sinks}
    packing = cu_seqlens_q, cu_seqlens_k, *sizes
    out, lse = attention_varlen(inputs.q, inputs.k, inputs.v, *packing, return_lse=True, **options)
    out = inputs.result(out)
    return (out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1)) if batched else (out, lse)
