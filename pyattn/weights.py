"""Attention weights of chosen rows and heads, which the native kernels never store."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from pyattn import ops
from pyattn.arguments import check_between, check_integers, check_tensor, refuse_positional
from pyattn.autocast import cast, without
from pyattn.derivatives.block import Scores
from pyattn.derivatives.grouped import products
from pyattn.dropout import dropout_factor
from pyattn.key_ranges import check_ranges
from pyattn.ops.schema import Options
from pyattn.options import AttentionOptions
from pyattn.parse import parse, takes_options

__all__ = ["attention_weights"]


@takes_options
def attention_weights(
    q: Tensor,
    k: Tensor,
    *positional: object,
    lse: Tensor | None = None,
    heads: Sequence[int] | Tensor | None = None,
    rows: Sequence[int] | Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """The weights of :func:`pyattn.attention` for chosen heads and rows.

    Query ``i`` of head ``h`` has these weights for the keys ``j`` that it sees, and weight 0 for all other keys::

        weights_ij = dropout(exp(score_ij) / (sum_j exp(score_ij) + exp(sinks_h)))        out_i = sum_j weights_ij v_j

    Time and memory are linear in the number of weights returned. If you pass the options of an :func:`pyattn.attention`
    call, including its ``dropout_seed``, ``attention_weights(...) @ v`` equals the out of that call up to rounding.

    Args:
        q, k: as for :func:`pyattn.attention`.
        lse: (B, Hq, Sq), returned by :func:`pyattn.attention` for the same arguments; it already includes sinks. The
            weights are then exp(score - lse). Passing lse saves a pass over the scores, but the weights
            carry its rounding error. Gradients also flow through lse. Default: this function computes each row's
            maximum and sum itself.
        heads: query heads, as ints or an int32 or int64 tensor; negative ones count from the end. Default: all.
        rows: queries, in the same form. Default: all.
        options: as for :func:`pyattn.attention`. Their shapes are those for all heads and rows.

    Returns:
        The weights (B, len(heads), len(rows), Sk) in q's dtype. For 16-bit types they are computed in float32 and
        rounded once. They are differentiable any number of times. A query that sees no key has only weights of 0.

    Raises:
        ValueError, TypeError, NotImplementedError: as for :func:`pyattn.attention`; a head or row that does not exist.

    >>> q, k, v = torch.randn(3, 1, 8, 5, 64)
    >>> attention_weights(q, k, heads=[0], rows=[1, -1])[0, 0].count_nonzero(-1)
    tensor([2, 5])
    """
    if positional:
        refuse_positional(attention_weights, positional)
    check_tensor("q", q)
    check_tensor("k", k)
    known = Options(*parse(attention_weights, options, q.device))
    q, k = cast(q), cast(k)
    _check(q, k, lse, known)
    head = _chosen("heads", heads, q.shape[1], q.device)
    row = _chosen("rows", rows, q.shape[2], q.device)
    with without(q.device):
        return _weights(q, k, lse, heads is None, head, row, known).to(q.dtype)


def _check(q: Tensor, k: Tensor, lse: Tensor | None, options: Options) -> None:
    """Checks q, k and all options by running the operator on meta tensors, on which it computes nothing."""
    if torch.compiler.is_compiling():
        return
    named = zip(Options._fields, options, strict=True)
    meta = [_shape_of(name, t, q.device) if isinstance(t, Tensor) else t for name, t in named]
    q_, k_ = _shape_of("q", q, q.device), _shape_of("k", k, q.device)
    _, rows, *_ = ops.attention_forward(q_, k_, k_[..., :0], *meta)
    if options.key_ranges is not None and options.key_ranges.is_cpu:
        check_ranges(options.key_ranges, k.shape[2])
    if lse is not None:
        check_tensor("lse", lse)
        if lse.shape != rows.shape:
            raise ValueError(f"pyattn: lse must have shape {tuple(rows.shape)}, got {tuple(lse.shape)}")


def _shape_of(name: str, t: Tensor, device: torch.device) -> Tensor:
    """Checks the device and layout of ``t``; returns a meta tensor without the tangent that ``to("meta")`` keeps."""
    if t.layout != torch.strided:
        raise NotImplementedError(f"pyattn: {name} must be a dense tensor, got layout {t.layout}")
    if t.device != device:
        name = name.replace("offsets", "offset")  # the operators' name for a q_offset of each sequence
        raise ValueError(f"pyattn: {name} must be on q's device, got {t.device} and {device}")
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


def _chosen(name: str, chosen: Sequence[int] | Tensor | None, size: int, device: torch.device) -> Tensor:
    """Returns ``chosen`` as indices from 0 to size - 1; None chooses all of them."""
    if chosen is None:
        return torch.arange(size, device=device)
    indices = check_integers(name, chosen, device).to(device)
    check_between(name, indices, -size, size - 1)
    return torch.where(indices < 0, indices + size, indices)


def _weights(
    q: Tensor, k: Tensor, lse: Tensor | None, all_heads: bool, head: Tensor, row: Tensor, options: Options
) -> Tensor:
    """The weights (B, heads, rows, Sk) in float32 or float64."""
    wide = torch.promote_types(q.dtype, torch.float32)
    batch, num_heads, seqlen_q, head_dim = q.shape
    if not all_heads:
        q, k = q.index_select(1, head), k.index_select(1, head // (num_heads // max(1, k.shape[1])))
    learned = options.alibi_slopes, options.sinks
    slopes, sinks = (None if t is None else t.to(wide).index_select(-1, head) for t in learned)
    relative = options.relative_bias
    if relative is not None:
        relative = relative.to(wide)
        relative = relative if relative.shape[-2] == 1 else relative.index_select(-2, head)
    scores = _products(q.index_select(2, row).to(wide), k.to(wide))
    pairs = Scores(scores, options._replace(alibi_slopes=slopes, relative_bias=relative), head, row, seqlen_q, head_dim)
    empty = ~pairs.seen.any(-1, keepdim=True)
    if lse is not None:
        total = lse.index_select(1, head).index_select(2, row).unsqueeze(-1)
        weights = torch.exp(pairs.scores - total.to(wide).masked_fill(empty, 0.0))
    else:
        columns = pairs.scores.masked_fill(empty, 0.0)
        if sinks is not None:
            columns = torch.cat([columns, sinks[:, None, None].expand(*columns.shape[:3], 1)], -1)
        weights = torch.softmax(columns, -1)[..., : k.shape[2]]
    weights = pairs.hide(weights)
    if options.dropout_p:
        weights = weights.masked_fill(~pairs.kept(batch, num_heads), 0.0) * dropout_factor(options.dropout_p)
    return weights


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Returns ``q k^T`` (B, heads, rows, Sk); its gradients treat non-finite inputs as 0.

    A masked pair has gradient 0, and 0 * NaN would be NaN. Non-finite products are added as a constant.
    """
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if tracing or not torch.is_grad_enabled():  # torch checks a trace without gradients
        return products(q, k)
    with torch.no_grad():
        exact = products(q, k)
    finite = products(*(torch.where(t.isfinite(), t, 0.0) for t in (q, k)))
    return finite + exact.masked_fill(exact.isfinite(), 0.0)
