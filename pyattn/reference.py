"""Attention in plain PyTorch: the specification that the native functions and modules are tested against.

Everything here materialises the (seqlen_q, seqlen_k) scores and works in any floating dtype; nothing imports the rest
of the package. First the functions, then the modules, written the way S. Raschka, "Build a Large Language Model (From
Scratch)", chapters 3 and 4, and the tutorials after it write them, every ``mask`` a buffer. What each module does and
takes is said once, at its namesake in :mod:`pyattn.nn`.
"""
# ruff: noqa: D101, D102

import math

import torch
from torch import Tensor, nn


def default_scale(head_dim: int) -> float:
    """``1 / sqrt(head_dim)``, and 1 where there is nothing to sum over."""
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


def visible(
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Which keys each query sees: bool, True = takes part, (seqlen_q, seqlen_k) or (B, 1, seqlen_q, seqlen_k).

    Query ``i`` stands at key position ``i + q_offset`` and sees key ``j`` when ``j <= i + q_offset``; the default
    offset ``seqlen_k - seqlen_q`` aligns the last query with the last key::

        seqlen_q 2, seqlen_k 4     q_offset = 2 (default)     q_offset = 0 (upper left)
                                   1 1 1 0                    1 0 0 0
                                   1 1 1 1                    1 1 0 0
    """
    if not causal:
        return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if q_offset is None:
        q_offset = seqlen_k - seqlen_q
    position = torch.arange(seqlen_q, device=device)[:, None]
    if isinstance(q_offset, Tensor):
        position = position + q_offset.to(device)[:, None, None, None]
    else:
        position = position + q_offset
    return torch.arange(seqlen_k, device=device) <= position


def _multiply_wide(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low words of the products of 32-bit words, in int64."""
    low, high = a % 2**16 * b, (a >> 16) * b
    high = high + (low >> 16)
    return high >> 16, high % 2**16 * 2**16 + low % 2**16


def philox(seed: int | Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al. 2011): four words, below 2^32 in int64, of a 64-bit key and four words."""
    key0, key1 = seed % 2**32, (seed >> 32) % 2**32
    x0, x1, x2, x3 = counter
    for _ in range(10):
        (high0, low0), (high2, low2) = _multiply_wide(x0, 0xD2511F53), _multiply_wide(x2, 0xCD9E8D57)
        x0, x1, x2, x3 = high2 ^ x1 ^ key0, low2, high0 ^ x3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) % 2**32, (key1 + 0xBB67AE85) % 2**32
    return x0, x1, x2, x3


def dropout_threshold(dropout_p: float) -> int:
    """What a 16-bit draw is compared with: a weight is kept if its draw is no smaller."""
    return min(round(65536 * dropout_p), 65535)


def dropout_mask(
    seed: int | Tensor, batch: int, num_heads_q: int, seqlen_q: int, seqlen_k: int, dropout_p: float
) -> Tensor:
    """Which weights a call of :func:`pyattn.attention` with this ``dropout_seed`` and ``dropout_p`` keeps.

    The draw of key ``j`` for query ``i`` of head ``h`` in sequence ``b`` is 16 bits of :func:`philox` under ``seed``
    at the counter ``(j // 8, i, low, high word of b * num_heads_q + h)``: of word ``(j % 8) // 2``, the low half for
    even ``j``. It is kept, and scaled by ``65536 / (65536 - t)``, if the draw is at least
    ``t = min(round(65536 dropout_p), 65535)``.

    Returns:
        bool (batch, num_heads_q, seqlen_q, seqlen_k), True = kept.
    """
    device = seed.device if isinstance(seed, Tensor) else None
    head = torch.arange(batch * num_heads_q, device=device).view(batch, num_heads_q, 1, 1)
    query = torch.arange(seqlen_q, device=device).view(seqlen_q, 1)
    group = torch.arange(-(-seqlen_k // 8), device=device)
    words = philox(seed, (group, query, head % 2**32, head >> 32))
    draws = torch.stack([half for word in words for half in (word % 2**16, word >> 16)], -1)
    return draws.flatten(-2)[..., :seqlen_k] >= dropout_threshold(dropout_p)


def draw_seed(device: torch.device | None = None) -> Tensor:
    """An int64 scalar from torch's generator of the device, which ``torch.manual_seed`` sets."""
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)


def _scores(q: Tensor, k: Tensor, seen: Tensor, finite: bool) -> Tensor:
    """``q k^T`` over the last dimension. Non-finite rows are selected away where unseen, for 0 * nan is nan."""
    if finite:
        return q @ k.mT
    pair = seen.unsqueeze(-1)
    return (torch.where(pair, q.unsqueeze(-2), 0) * torch.where(pair, k.unsqueeze(-3), 0)).sum(-1)


def _combine(weights: Tensor, v: Tensor, seen: Tensor, finite: bool) -> Tensor:
    """``weights v`` over the keys, unseen values selected away."""
    if finite:
        return weights @ v
    return (weights.unsqueeze(-1) * torch.where(seen.unsqueeze(-1), v.unsqueeze(-3), 0)).sum(-2)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    softmax_scale: float | None = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """``dropout(softmax(softmax_scale q k^T + mask)) v``, step by step.

    Args:
        q: (B, Hq, Sq, D).
        k: (B, Hkv, Sk, D); query head ``h`` reads KV head ``h // (Hq // Hkv)``.
        v: (B, Hkv, Sk, Dv).
        causal, q_offset: see :func:`visible`.
        softmax_scale: default ``1 / sqrt(D)``.
        mask: bool, True = takes part, broadcastable to (B, Hq, Sq, Sk); on top of ``causal``.
        dropout_p, dropout_seed: drops weights by :func:`dropout_mask`; the seed is drawn if None.
        return_lse: also return the natural log of the softmax denominator, (B, Hq, Sq), float32 or float64.
        return_weights: also return the weights that met ``v``, (B, Hq, Sq, Sk), after dropout.

    Returns:
        ``out`` (B, Hq, Sq, Dv), then lse and weights if asked for. A row that sees no key has out 0, lse -inf. What is
        not seen does not matter, even if it is NaN; compiled code can't look at values and takes them all as finite.
    """
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = default_scale(q.shape[-1]) if softmax_scale is None else softmax_scale
    seen = visible(q.shape[2], k.shape[2], causal=causal, q_offset=q_offset, device=q.device)
    if mask is not None:
        seen = seen & mask
    finite = torch.compiler.is_compiling() or q.is_meta or all(bool(t.isfinite().all()) for t in (q, k, v))

    scores = (_scores(q, k, seen, finite) * scale).masked_fill(~seen, -math.inf)
    empty = ~seen.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(~seen, 0.0)
    if dropout_p > 0.0:
        seed = draw_seed(q.device) if dropout_seed is None else dropout_seed
        batch, num_heads_q, seqlen_q, seqlen_k = weights.shape
        kept = dropout_mask(seed, batch, num_heads_q, seqlen_q, seqlen_k, dropout_p)
        weights = weights.masked_fill(~kept, 0.0) * (65536 / (65536 - dropout_threshold(dropout_p)))
    out = _combine(weights, v, seen, finite)

    results: tuple[Tensor, ...] = (out,)
    if return_lse:
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        lse = torch.logsumexp(wide.masked_fill(empty, 0.0), -1).masked_fill(empty.squeeze(-1), -math.inf)
        results += (lse,)
    if return_weights:
        results += (weights,)
    return results if len(results) > 1 else out


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    masked: Tensor | None = None,
    dropout: nn.Dropout | None = None,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``dropout(softmax(softmax_scale q k^T)) v`` and the weights; ``masked``: bool, True = does not take part."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if masked is not None:
        scores = scores.masked_fill(masked, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    if dropout is not None:
        weights = dropout(weights)
    return weights @ v, weights


def _future(context_length: int) -> Tensor:
    return torch.triu(torch.ones(context_length, context_length), diagonal=1)


class SimplifiedSelfAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _attend(x, x, x, softmax_scale=1.0)[0]


class SelfAttention_v1(nn.Module):
    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.W_query = nn.Parameter(torch.rand(d_in, d_out))
        self.W_key = nn.Parameter(torch.rand(d_in, d_out))
        self.W_value = nn.Parameter(torch.rand(d_in, d_out))

    def forward(self, x: Tensor) -> Tensor:
        return _attend(x @ self.W_query, x @ self.W_key, x @ self.W_value)[0]


class SelfAttention_v2(nn.Module):
    def __init__(self, d_in: int, d_out: int, qkv_bias: bool = False) -> None:
        super().__init__()
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)

    def forward(self, x: Tensor) -> Tensor:
        return _attend(self.W_query(x), self.W_key(x), self.W_value(x))[0]


SelfAttention = SelfAttention_v2


class CausalAttention(nn.Module):
    mask: Tensor

    def __init__(self, d_in: int, d_out: int, context_length: int, dropout: float, qkv_bias: bool = False) -> None:
        super().__init__()
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", _future(context_length))

    def forward(self, x: Tensor) -> Tensor:
        seqlen = x.shape[1]
        masked = self.mask.bool()[:seqlen, :seqlen]
        return _attend(self.W_query(x), self.W_key(x), self.W_value(x), masked=masked, dropout=self.dropout)[0]


class MultiHeadAttentionWrapper(nn.Module):
    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            CausalAttention(d_in, d_out, context_length, dropout, qkv_bias) for _ in range(num_heads)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], dim=-1)


class MultiHeadAttention(nn.Module):
    mask: Tensor

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", _future(context_length))

    def forward(self, x: Tensor) -> Tensor:
        batch, seqlen, _ = x.shape
        q = self.W_query(x).view(batch, seqlen, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.W_key(x).view(batch, seqlen, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.W_value(x).view(batch, seqlen, self.num_heads, self.head_dim).transpose(1, 2)
        context, _ = _attend(q, k, v, masked=self.mask.bool()[:seqlen, :seqlen], dropout=self.dropout)
        out: Tensor = self.out_proj(context.transpose(1, 2).reshape(batch, seqlen, self.d_out))
        return out


class SingleHeadSelfAttention(nn.Module):
    def __init__(self, d_model: int, d_k: int, dropout: float = 0.0, trace_shapes: bool = False) -> None:
        super().__init__()
        self.q = nn.Linear(d_model, d_k, bias=False)
        self.k = nn.Linear(d_model, d_k, bias=False)
        self.v = nn.Linear(d_model, d_k, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.trace_shapes = trace_shapes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.trace_shapes:
            print(f"q {q.shape}  k {k.shape}  v {v.shape}")
        out, weights = _attend(q, k, v, masked=_future(x.shape[1]).to(x.device).bool(), dropout=self.dropout)
        if self.trace_shapes:
            print(f"weights {weights.shape}  out {out.shape}")
        return out, weights


class Attention(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.W_q = nn.Linear(embed_dim, embed_dim)
        self.W_k = nn.Linear(embed_dim, embed_dim)
        self.W_v = nn.Linear(embed_dim, embed_dim)
        self.W_o = nn.Linear(embed_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, seqlen, embed_dim = x.shape
        q = self.W_q(x).view(batch, seqlen, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.W_k(x).view(batch, seqlen, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.W_v(x).view(batch, seqlen, self.num_heads, self.head_dim).transpose(1, 2)
        if mask is not None and mask.dim() == 3:
            mask = mask.unsqueeze(1)
        context, _ = _attend(q, k, v, masked=mask, dropout=self.dropout)
        out: Tensor = self.W_o(context.transpose(1, 2).reshape(batch, seqlen, embed_dim))
        return out


class GroupedQueryAttention(nn.Module):
    def __init__(
        self,
        d_in: int,
        d_out: int,
        dropout: float,
        num_heads: int,
        num_kv_groups: int,
        dtype: torch.dtype | None = None,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__()
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.W_key = nn.Linear(d_in, num_kv_groups * self.head_dim, bias=qkv_bias, dtype=dtype)
        self.W_value = nn.Linear(d_in, num_kv_groups * self.head_dim, bias=qkv_bias, dtype=dtype)
        self.num_kv_groups = num_kv_groups
        self.group_size = num_heads // num_kv_groups
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias, dtype=dtype)
        self.out_proj = nn.Linear(d_out, d_out, bias=False, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, seqlen, _ = x.shape
        q = self.W_query(x).view(batch, seqlen, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.W_key(x).view(batch, seqlen, self.num_kv_groups, self.head_dim).transpose(1, 2)
        v = self.W_value(x).view(batch, seqlen, self.num_kv_groups, self.head_dim).transpose(1, 2)
        k = k.repeat_interleave(self.group_size, dim=1)
        v = v.repeat_interleave(self.group_size, dim=1)
        context, _ = _attend(q, k, v, masked=_future(seqlen).to(x.device).bool(), dropout=self.dropout)
        out: Tensor = self.out_proj(context.transpose(1, 2).reshape(batch, seqlen, self.d_out))
        return out
