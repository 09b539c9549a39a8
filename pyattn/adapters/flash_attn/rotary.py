"""flash_attn.layers.rotary: rotary embeddings from given cosines and sines.

``x`` is (B, S, H, D), or (total, H, D) with cu_seqlens; cos and sin are (positions, R / 2) with R at most D. They
rotate the first R columns of x: column t with t + R / 2 or, interleaved, 2t with 2t + 1.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyattn.adapters.flash_attn.arguments import WrongValueError, check_dimensions
from pyattn.nn.rotary import turn
from pyattn.options.checks import check_integers, check_size, has_values

__all__ = [
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
]


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """``x`` rotated by its positions, or back with ``conjugate``; computed in float32 and rounded once.

    Args:
        x, cos, sin: see above.
        seqlen_offsets: an int or (B,) int32 or int64, the position of each sequence's first token.
        cu_seqlens: (B + 1,), int32 or int64, where each sequence of a packed x
            begins. Tokens after the last sequence stay as they are.
        max_seqlen: an upper bound on the lengths of the sequences; required with cu_seqlens.
        interleaved: which columns rotate together.
        inplace: whether to write the result to x and return x.

    Raises:
        ValueError: sizes that don't fit together, a position that cos and sin don't have.
        TypeError: types other than those listed.
    """
    cos, sin = _rows(x, cos, sin, (seqlen_offsets, cu_seqlens, max_seqlen))
    sin = -sin if conjugate else sin
    if not inplace:
        return turn(x, cos, sin, interleaved)
    turning = x[..., : 2 * cos.shape[-1]]
    turning.copy_(turn(turning, cos, sin, interleaved))
    return x


def turn_at(places: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """``x`` (B, S, H, D) rotated by the positions ``places`` (B, S) of its tokens."""
    return turn(x, cos[places, None], sin[places, None], interleaved)


Tokens = tuple[int | Tensor, Tensor | None, int | None]
"""seqlen_offsets, cu_seqlens and max_seqlen of :func:`apply_rotary`."""


def _rows(x: Tensor, cos: Tensor, sin: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """cos and sin at the positions of x's tokens, with a dimension for the heads."""
    offsets, cu_seqlens, max_seqlen = tokens
    leading = "batch, seqlen" if cu_seqlens is None else "total"
    check_dimensions("x", x, f"{leading}, num_heads, head_dim")
    check_dimensions("cos", cos, "positions, rotary_dim / 2")
    if sin.shape != cos.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise WrongValueError(
            f"pyattn: cos and sin must have the same shape and at most head_dim / 2 = {x.shape[-1] // 2} columns, "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    places: Tensor | slice
    if cu_seqlens is not None:
        cu_seqlens = check_integers("cu_seqlens", cu_seqlens)
        check_size("max_seqlen", max_seqlen)
        assert max_seqlen is not None
        offsets = _checked_offsets(offsets, len(cu_seqlens) - 1, max_seqlen, len(cos))
        _check_starts(cu_seqlens, len(x), max_seqlen)
        places = _packed_places(x, cu_seqlens, offsets)
        cos, sin = pad(cos, (0, 0, 0, 1), value=1.0), pad(sin, (0, 0, 0, 1))  # row -1 turns by nothing
    else:
        batch, seqlen = x.shape[:2]
        offsets = _checked_offsets(offsets, batch, seqlen, len(cos))
        if isinstance(offsets, Tensor):
            places = offsets[:, None] + torch.arange(seqlen, device=x.device)
        else:
            places = slice(offsets, offsets + seqlen)
    return cos[places, None], sin[places, None]


def _checked_offsets(offsets: int | Tensor, batch: int, longest: int, positions: int) -> int | Tensor:
    """The offsets of ``batch`` sequences of up to ``longest`` tokens, all below ``positions``."""
    if isinstance(offsets, Tensor):
        offsets = check_integers("seqlen_offsets", offsets)
        if len(offsets) != batch:
            raise WrongValueError(f"pyattn: seqlen_offsets must have shape ({batch},), got ({len(offsets)},)")
        if not (has_values(offsets) and batch):
            return offsets
        first, end = int(offsets.min()), int(offsets.max()) + longest
    else:
        check_size("seqlen_offsets", offsets)
        first, end = offsets, offsets + longest
    if first < 0 or end > positions:
        raise WrongValueError(
            f"pyattn: cos and sin must have all positions of x, [{first}, {end}), got {positions} positions"
        )
    return offsets


def _check_starts(cu_seqlens: Tensor, total: int, max_seqlen: int) -> None:
    if not has_values(cu_seqlens):
        return
    lengths = cu_seqlens.diff()
    if cu_seqlens[:1].any() or (lengths < 0).any() or cu_seqlens[-1] > total or (lengths > max_seqlen).any():
        raise WrongValueError(
            f"pyattn: cu_seqlens must rise from 0 to at most {total} tokens, by at most max_seqlen={max_seqlen}, "
            f"got {cu_seqlens.tolist()}"
        )


def _packed_places(x: Tensor, cu_seqlens: Tensor, offsets: int | Tensor) -> Tensor:
    """The position of each token of a packed x; -1 after the last sequence."""
    token = torch.arange(len(x), device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:], token, right=True)
    if isinstance(offsets, Tensor):
        offsets = pad(offsets, (0, 1))[sequence]
    places = token - cu_seqlens[sequence] + offsets
    return torch.where(sequence == len(cu_seqlens) - 1, -1, places)


Parts = list[tuple[int | slice, Tensor, Tensor]]
"""Indices into dimension 2 of a tensor, each with the cosines and sines that rotate that part."""

WHOLE = slice(None)


class _TurnedInPlace(torch.autograd.Function):
    """Rotates parts of its first argument in place and returns it.

    As in flash-attn, leaves and views of leaves may be rotated too; only the result then carries the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Parts, tokens: Tokens, interleaved: bool) -> Tensor:
        offsets, cu_seqlens, max_seqlen = tokens
        at = None if isinstance(offsets, Tensor) else offsets
        if ctx.needs_input_grad[0]:
            waves = [wave for _, *both in parts for wave in both]
            read = offsets if isinstance(offsets, Tensor) else None, cu_seqlens, *waves
            # autograd saves no tensor that was made in inference mode
            ctx.save_for_backward(*(t.clone() if t is not None and t.is_inference() else t for t in read))
        ctx.plain = [index for index, *_ in parts], at, max_seqlen, interleaved
        _turn_parts(x, parts, tokens, interleaved)
        whole = x if x._base is None else x._base
        if not (whole.is_leaf and whole.requires_grad):  # autograd would refuse it
            ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        offsets, cu_seqlens, *waves = ctx.saved_tensors
        indices, at, max_seqlen, interleaved = ctx.plain
        back = [(index, cos, -sin) for index, cos, sin in zip(indices, waves[::2], waves[1::2], strict=True)]
        dx = dx.clone()
        _turn_parts(dx, back, (at if offsets is None else offsets, cu_seqlens, max_seqlen), interleaved)
        return dx, None, None, None


def _turn_parts(x: Tensor, parts: Parts, tokens: Tokens, interleaved: bool) -> None:
    for index, cos, sin in parts:
        apply_rotary(x[:, :, index], cos, sin, *tokens, interleaved, inplace=True)


def _turn_in_place(x: Tensor, parts: Parts, tokens: Tokens, interleaved: bool) -> Tensor:
    if torch.compiler.is_compiling():  # aot_autograd gets wrong gradients from a Function that changes a graph's input
        _turn_parts(x, [(index, cos.detach(), sin.detach()) for index, cos, sin in parts], tokens, interleaved)
        return x
    result: Tensor = _TurnedInPlace.apply(x, parts, tokens, interleaved)  # type: ignore[no-untyped-call]
    return result


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """``x`` (B, S, H, D) rotated by cos and sin of its tokens, (S, R / 2) or (B, S, R / 2)."""
    return turn(x, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """:func:`apply_rotary`, differentiable in x and, unless in place, in cos and sin too.

    >>> x, angle = torch.ones(1, 2, 1, 4), torch.tensor([[0.0], [torch.pi / 2]])
    >>> apply_rotary_emb(x, angle.cos(), angle.sin()).round().squeeze().tolist()
    [[1.0, 1.0, 1.0, 1.0], [-1.0, 1.0, 1.0, 1.0]]
    """
    if not inplace:
        return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved)
    return _turn_in_place(x, [(WHOLE, cos, sin)], (seqlen_offsets, cu_seqlens, max_seqlen), interleaved)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates q and k of qkv in place, and returns it.

    qkv is (B, S, 3, H, D), or (B, S, num_heads_q + 2 num_heads_k, D), which needs ``num_heads_q``. cos_k and sin_k
    replace cos and sin for k.
    """
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    if num_heads_q is None:
        check_dimensions("qkv", qkv, "batch, seqlen, 3, num_heads, head_dim")
        parts: Parts = [(0, cos, sin), (1, cos_k, sin_k)]
    else:
        check_dimensions("qkv", qkv, "batch, seqlen, num_heads_q + 2 * num_heads_k, head_dim")
        heads = qkv.shape[2] - num_heads_q
        if num_heads_q < 0 or heads < 0 or heads % 2:
            raise WrongValueError(
                f"pyattn: qkv must have num_heads_q={num_heads_q} + 2 * num_heads_k heads, got {qkv.shape[2]}"
            )
        of_k = slice(num_heads_q, num_heads_q + heads // 2)
        parts = [(slice(num_heads_q), cos, sin), (of_k, cos_k, sin_k)]
    return _turn_in_place(qkv, parts, (seqlen_offsets, None, None), interleaved)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotates k of kv (B, S, 2, H, D) in place, and returns kv."""
    check_dimensions("kv", kv, "batch, seqlen, 2, num_heads, head_dim")
    return _turn_in_place(kv, [(0, cos, sin)], (seqlen_offsets, None, None), interleaved)
