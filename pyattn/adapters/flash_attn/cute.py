"""FlashAttention 4's functions, flash_attn.cute: windows of None, and a learnable sink for each head."""

from typing import Any

from torch import Tensor

from pyattn.adapters.flash_attn.arguments import WrongValueError
from pyattn.adapters.flash_attn.hopper import dense, varlen
from pyattn.adapters.flash_attn.hopper.arguments import Descales, check_hints
from pyattn.options.checks import check_tensor, check_type

Window = tuple[int | None, int | None]
"""(left, right); None: all keys on that side."""


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`pyattn.attention` under FlashAttention 4's names, bottom-right as in versions 2 and 3.

    Args:
        q: (B, Sq, Hq, D), any strides.
        k, v: (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv), Hq a multiple of Hkv.
        qv: (B, Sq, Hq, Dv): the scores are ``softmax_scale * (<q, k> + <qv, v>)``. k and v are copied.
        window_size: (left, right), how many keys before and after its own position a query sees; None: all.
        learnable_sink: (Hq,), a score of each head that enters the sum of the softmax and has no value.
        softmax_scale, causal, softcap: as in version 3.
        num_splits, pack_gqa, deterministic, return_lse: have no effect on the results.
        gather_kv_indices, score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars, block_sparse_tensors,
            block_sparse_tensors_bwd: must be None; :mod:`pyattn.adapters.flex` computes score_mods and mask_mods.

    Returns:
        ``(out, lse)`` in any case, as there: out (B, Sq, Hq, Dv) and lse (B, Hq, Sq), float32, which includes the sink
        and is -inf for a query that sees no key and has no sink. Gradients reach q, k, v, qv and learnable_sink.

    Raises:
        ValueError, TypeError: as for :func:`pyattn.attention`.
        NotImplementedError: any of the arguments that must be None.

    >>> q, k, v = torch.randn(3, 2, 10, 4, 64).unbind()
    >>> flash_attn_func(q, k, v, causal=True, learnable_sink=torch.zeros(4))[0].shape
    torch.Size([2, 10, 4, 64])
    """
    _refuse(
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )
    check_hints(num_splits, pack_gqa, 0)
    check_type("return_lse", return_lse, bool)
    scores = softmax_scale, causal, _window(window_size), softcap, deterministic
    return dense.attend(q, k, v, qv, Descales(), 0, *scores, _sink(learnable_sink))


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`flash_attn_func` of packed sequences, or of a batch of which each sequence uses a part.

    Args:
        q, k, v: (total, H, D) with cu_seqlens_q and cu_seqlens_k (B + 1,) int32, or (B, S, H, D) without them.
        qv: (total_q, Hq, Dv) or (B, Sq, Hq, Dv).
        max_seqlen_q, max_seqlen_k: upper bounds on the lengths; with cu_seqlens, default: all tokens.
        seqused_q, seqused_k: (B,) int32, as in version 3.
        page_table: (B, pages of a sequence) int32, with seqused_k: k is (pages, page_size, Hkv, D), page_size at least
            16.
        min_seqlen_k, scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata: have no effect.
        softmax_scale, causal, window_size, learnable_sink, softcap: as for :func:`flash_attn_func`, like all others.

    Returns:
        ``(out, lse)``: (total_q, Hq, Dv) and (Hq, total_q); of a batch as for :func:`flash_attn_func`.
    """
    _refuse(
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
    )
    check_hints(num_splits, pack_gqa, 0)
    check_type("return_lse", return_lse, bool)
    for name, tensor in (("q", q), ("k", k)):
        check_tensor(name, tensor)
    bounds = (len(q) if max_seqlen_q is None else max_seqlen_q), (len(k) if max_seqlen_k is None else max_seqlen_k)
    lengths = cu_seqlens_q, cu_seqlens_k, *bounds, seqused_q, seqused_k
    scores = softmax_scale, causal, _window(window_size), softcap, deterministic
    return varlen.attend(q, k, v, qv, Descales(), 0, *lengths, *scores, _sink(learnable_sink), page_table)


def _window(window_size: Window) -> tuple[int, int]:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"pyattn: window_size must be a pair of ints or None (left, right), got {window_size}")
    # FlashAttention 4 takes (-1, -1) as no window, and drops both bounds where one of others is negative.
    if tuple(window_size) == (-1, -1):
        return -1, -1
    if any(bound is not None and bound < 0 for bound in window_size):
        raise NotImplementedError(
            f"pyattn: window_size must have None in place of a negative bound, got {tuple(window_size)}"
        )
    left, right = (-1 if bound is None else bound for bound in window_size)
    return left, right


def _sink(learnable_sink: Tensor | None) -> Tensor | None:
    if learnable_sink is not None:
        check_tensor("learnable_sink", learnable_sink)
        if learnable_sink.dim() != 1:
            raise WrongValueError(
                f"pyattn: learnable_sink must have shape (num_heads,), got {tuple(learnable_sink.shape)}"
            )
    return learnable_sink


def _refuse(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(
                f"pyattn: {name} must be None, got {type(value).__name__}; see pyattn.adapters.flex"
            )
