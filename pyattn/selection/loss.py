"""The loss that trains a lightning indexer: how far its scores are from attention's own weights."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyattn.options.autocast import without
from pyattn.options.checks import check_names, check_scale, check_type, has_values
from pyattn.selection.arguments import check_dense, check_device, checked_heads, checked_indexer, offsets_of
from pyattn.selection.divergence import Attention, Indexer, divergences


@check_names
def indexer_loss(
    q: Tensor,
    k: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    selected: Tensor | None = None,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """Each query's divergence of the indexer's distribution over keys from that of attention.

    ::

        p_ij = 1 / Hq sum_h softmax_j(softmax_scale <q_hi, k_j>)                      attention's heads, normalised
        score_ij = sum_h index_weights_hi relu(<index_q_hi, index_k_j>)               the indexer's
        loss_i = sum_j p_ij log(p_ij / softmax_j(score_ij))                           KL(p || softmax(score))

    Both softmaxes run over the same keys: the visible ones (DeepSeek-V3.2's dense warm-up), or those of the query's
    list ``selected`` that are visible (its sparse stage). Only the indexer has gradients; q and k are taken as
    constants, so this loss and a model's own loss train different parameters. ``indexer_loss(...).mean()`` is the
    loss of a step; the paper's sums over queries.

    Work is done in blocks of queries, and backward computes each block again: memory is O(Sq n) with a list, and
    linear in the lengths without.

    Args:
        q: (B, Hq, Sq, D), attention's queries, float16, bfloat16, float32 or float64.
        k: (B, Hkv, Sk, D) in q's dtype; query head ``h`` reads KV head ``h // (Hq // Hkv)``.
        index_q: (B, Hi, Sq, Di), in any of these dtypes.
        index_k: (B, Sk, Di) in index_q's dtype.
        index_weights: (B, Hi, Sq) in index_q's dtype or, beside 16-bit index_q, float32.
        selected: int32 or int64 (B, 1, Sq, n), keys as :func:`top_keys` returns them: -1 is none, a repeated key
            counts once, a key that ``causal`` hides has no effect. Default: all visible keys.
        causal: query ``i`` sees the keys ``j <= i + q_offset``. Default: True.
        q_offset: the key position of query 0, an int or an int32 or int64 tensor (B,). Default: ``Sk - Sq``.
        softmax_scale: attention's. Default: ``1 / sqrt(D)``.

    Returns:
        (B, Sq) in float32, or float64 for float64 of the indexer; differentiable in index_q, index_k and
        index_weights any number of times. 0 where a query sees no key. Keys that a query does not see have no effect,
        even if they hold NaN.

    Raises:
        ValueError: wrong shapes or devices, a key outside -1 to Sk - 1.
        TypeError: wrong types or dtypes.
        NotImplementedError: nested or sparse tensors.

    Source: DeepSeek-AI 2025, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", equations 3 and 4.

    >>> q, k = torch.randn(2, 1, 8, 100, 64)
    >>> index_q, index_k, weights = torch.randn(1, 4, 100, 32), torch.randn(1, 100, 32), torch.rand(1, 4, 100)
    >>> selected = pyattn.selection.top_keys(index_q, index_k, weights, n=16)
    >>> indexer_loss(q, k, index_q.requires_grad_(), index_k, weights, selected).mean().backward()
    >>> index_q.grad.isfinite().all()
    tensor(True)
    """
    q, k = checked_heads(q, k)
    index_q, index_k, index_weights = checked_indexer(index_q, index_k, index_weights, "index_")
    check_device("index_q", index_q, "q", q)
    if index_k.shape[:2] != (k.shape[0], k.shape[2]) or index_q.shape[2] != q.shape[2]:
        raise ValueError(
            "pyattn: index_q and index_k must have the batch, seqlen_q and seqlen_k of q and k, got "
            f"{tuple(index_q.shape)}, {tuple(index_k.shape)}, {tuple(q.shape)} and {tuple(k.shape)}"
        )
    check_type("causal", causal, bool)
    check_scale("softmax_scale", softmax_scale)
    if softmax_scale is not None and not math.isfinite(softmax_scale):
        raise ValueError(f"pyattn: softmax_scale must be finite, got {softmax_scale}")
    scale = 1 / math.sqrt(max(1, q.shape[3])) if softmax_scale is None else softmax_scale
    if selected is not None:
        _check_selected(selected, q, k.shape[2])
    offsets = offsets_of(q_offset, q.shape[2], [k.shape[2]] * len(q))
    wide = torch.promote_types(index_q.dtype, torch.float32)
    losses = []
    with without(q.device):
        for b, offset in enumerate(offsets):
            indexer = Indexer(index_q[b].to(wide), pad(index_k[b].to(wide), (0, 0, 0, 1)), index_weights[b].to(wide))
            attention = Attention(q[b].detach(), k[b].detach(), scale)
            lists = None if selected is None else selected[b, 0]
            losses.append(divergences(attention, indexer, lists, causal, offset))
    if not losses:
        return (index_q.sum((1, 3)) + index_k.sum((1, 2))[:, None] + index_weights.sum(1)).to(wide)
    return torch.stack(losses)


def _check_selected(selected: Tensor, q: Tensor, seqlen_k: int) -> None:
    check_dense("selected", selected, "(batch, 1, seqlen_q, n)", [torch.int32, torch.int64])
    check_device("selected", selected, "q", q)
    if selected.shape[:3] != (q.shape[0], 1, q.shape[2]):
        raise ValueError(
            f"pyattn: selected must have shape ({q.shape[0]}, 1, {q.shape[2]}, n), got {tuple(selected.shape)}"
        )
    if not has_values(selected):
        return
    wrong = (selected < -1) | (selected >= seqlen_k)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(f"pyattn: selected must be between -1 and {seqlen_k - 1}, got {int(selected[at])} at {at}")
