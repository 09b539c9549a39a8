"""Attention as people write it, again from its formulas: what pyattn.adapters.scratch has to recognize unchanged.

Every module takes x (B, T, 24) and has 4 query heads of 6 columns, unless it says otherwise.
"""

import math

import torch
from torch import Tensor, einsum, nn
from torch.nn import functional

D, HEADS, SIZE, CONTEXT = 24, 4, 6, 64


class NanoGPT(nn.Module):
    """The slow path: one projection, a registered triangle of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.attn_dropout = nn.Dropout(0.0)
        self.register_buffer("bias", torch.tril(torch.ones(CONTEXT, CONTEXT)).view(1, 1, CONTEXT, CONTEXT))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.c_attn(x).split(D, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        att = self.attn_dropout(functional.softmax(att, dim=-1))
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(b, t, c))


class MinGPT(NanoGPT):
    """Three projections, keys first."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        k, q, v = (f(x).view(b, t, HEADS, -1).transpose(1, 2) for f in (self.key, self.query, self.value))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = functional.softmax(att.masked_fill(self.bias[:, :, :t, :t] == 0, -1e10), dim=-1)
        y = self.attn_dropout(att) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: nn.Module):
    """The Annotated Transformer's function."""
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = dropout(scores.softmax(dim=-1))
    return torch.matmul(p_attn, value), p_attn


class MultiHeadedAttention(nn.Module):
    """The Annotated Transformer's, which keeps its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.attn: Tensor | None = None
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(1, x.size(1), x.size(1)).tril().to(torch.uint8).unsqueeze(1)
        parts = [lin(x).view(x.size(0), -1, HEADS, SIZE).transpose(1, 2) for lin in self.linears[:3]]
        out, self.attn = attention(*parts, mask=mask, dropout=self.dropout)
        return self.linears[-1](out.transpose(1, 2).contiguous().view(x.size(0), -1, D))


def rotary(x: Tensor, offset: int = 0) -> Tensor:
    """The first half of the columns turned against the second."""
    t, d = x.shape[-2:]
    angles = torch.arange(offset, offset + t)[:, None] / 1e4 ** (torch.arange(0, d, 2) / d)
    angles = torch.cat([angles, angles], dim=1).to(x.dtype)
    turned = torch.cat((-x[..., d // 2 :], x[..., : d // 2]), dim=-1)
    return x * angles.cos() + turned * angles.sin()


class GroupedQueryAttention(nn.Module):
    """The book's chapter 5: two heads of keys, each repeated.

    Args:
        normed: "heads" for Qwen3's and Gemma 3's norms of each head, "columns" for Olmo 3's of all.
        window: Gemma 3's sliding window.
        scalar: Gemma 3's query_pre_attn_scalar.
    """

    def __init__(self, normed: str = "", window: int | None = None, scalar: float | None = None) -> None:
        super().__init__()
        self.W_query, self.out_proj = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.W_key, self.W_value = nn.Linear(D, 2 * SIZE, bias=False), nn.Linear(D, 2 * SIZE, bias=False)
        self.normed, self.window = normed, window
        self.scaling = (SIZE if scalar is None else scalar) ** -0.5
        widths = {"": None, "heads": (SIZE, SIZE), "columns": (D, 2 * SIZE)}[normed]
        self.q_norm, self.k_norm = (nn.Identity() if widths is None else nn.RMSNorm(widths[i]) for i in range(2))

    def mask(self, t: int, past: int) -> Tensor:
        """True = hidden."""
        ones = torch.ones(t, past + t, dtype=torch.bool)
        hidden = torch.triu(ones, diagonal=past + 1)
        return hidden if self.window is None else hidden | torch.tril(ones, diagonal=past - self.window)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor] | None = None):
        b, t, _ = x.shape
        queries, keys, values = self.W_query(x), self.W_key(x), self.W_value(x)
        if self.normed == "columns":
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries = queries.view(b, t, HEADS, SIZE).transpose(1, 2)
        keys, values = (y.view(b, t, 2, SIZE).transpose(1, 2) for y in (keys, values))
        if self.normed == "heads":
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        past = 0 if cache is None else cache[0].shape[2]
        queries, keys = rotary(queries, past), rotary(keys, past)
        if cache is not None:
            keys, values = torch.cat([cache[0], keys], dim=2), torch.cat([cache[1], values], dim=2)
        cache = keys, values
        keys, values = (y.repeat_interleave(HEADS // 2, dim=1) for y in cache)
        scores = (queries * self.scaling) @ keys.transpose(2, 3)
        scores = scores.masked_fill(self.mask(t, past), -torch.inf)
        return self.out_proj((torch.softmax(scores, dim=-1) @ values).transpose(1, 2).reshape(b, t, D)), cache


class MultiHeadAttention(nn.Module):
    """The book's chapter 4, with a cache in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.W_query, self.W_key, self.W_value = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.out_proj, self.dropout = nn.Linear(D, D), nn.Dropout(0.0)
        self.register_buffer("mask", torch.triu(torch.ones(CONTEXT, CONTEXT), diagonal=1), persistent=False)
        self.register_buffer("cache_k", None, persistent=False)
        self.register_buffer("cache_v", None, persistent=False)
        self.at = 0

    def forward(self, x: Tensor, use_cache: bool = False) -> Tensor:
        b, t, _ = x.shape
        keys, values, queries = (f(x).view(b, t, HEADS, SIZE) for f in (self.W_key, self.W_value, self.W_query))
        at = 0
        if use_cache:
            if self.cache_k is None:
                self.cache_k, self.cache_v = keys, values
            else:
                self.cache_k = torch.cat([self.cache_k, keys], dim=1)
                self.cache_v = torch.cat([self.cache_v, values], dim=1)
            keys, values, at = self.cache_k, self.cache_v, self.at
            self.at += t
        keys, queries, values = keys.transpose(1, 2), queries.transpose(1, 2), values.transpose(1, 2)
        attn_scores = queries @ keys.transpose(2, 3)
        attn_scores.masked_fill_(self.mask.bool()[at : at + t, : keys.shape[2]], -torch.inf)
        attn_weights = self.dropout(torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1))
        return self.out_proj((attn_weights @ values).transpose(1, 2).contiguous().view(b, t, D))


class ViT(nn.Module):
    """A block of timm's kind: one projection, split by unbind, queries scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.norm = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.LayerNorm(D)
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, n, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        attn = self.attn_drop(((q * SIZE**-0.5) @ k.transpose(-2, -1)).softmax(dim=-1))
        return x + self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


class Window(nn.Module):
    """Swin's: a table of relative positions, and -100 between parts of a shifted window. x holds 2 windows of 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.softmax = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Softmax(dim=-1)
        self.relative_position_bias_table = nn.Parameter(torch.randn(49, HEADS))
        place = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        apart = place[:, :, None] - place[:, None, :] + 3
        self.register_buffer("relative_position_index", apart[0] * 7 + apart[1])

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        parts = torch.arange(2)[:, None] * (torch.arange(16) % 4 // 2)
        differ = (parts[:, None, :] - parts[:, :, None]).to(x.dtype)
        mask = differ.masked_fill(differ != 0, -100.0).masked_fill(differ == 0, 0.0)
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * SIZE**-0.5) @ k.transpose(-2, -1)
        table = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(n, n, -1)
        attn = attn + table.permute(2, 0, 1).contiguous().unsqueeze(0)
        attn = attn.view(b // 2, 2, HEADS, n, n) + mask.unsqueeze(1).unsqueeze(0)
        attn = self.softmax(attn.view(-1, HEADS, n, n))
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


class Triangle(nn.Module):
    """AlphaFold's: rows of pairs (B, T, T, 24), a bias of each pair, a mask of 1e9 (mask - 1), a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.pair, self.gate, self.out = nn.Linear(D, HEADS, bias=False), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        z = x.unsqueeze(1) + x.unsqueeze(2)
        mask = torch.ones(z.shape[:-1], dtype=z.dtype)
        mask[1, :, -3:] = 0
        mask_bias = (1e9 * (mask - 1))[..., :, None, None, :]
        triangle_bias = self.pair(z).permute(0, 3, 1, 2).unsqueeze(-4)
        q, k, v = (f(z).view(*z.shape[:-1], HEADS, -1).transpose(-2, -3) for f in (self.q, self.k, self.v))
        a = torch.matmul(q / math.sqrt(SIZE), k.transpose(-1, -2))
        a += mask_bias
        a += triangle_bias
        o = torch.matmul(functional.softmax(a, dim=-1), v).transpose(-2, -3)
        g = torch.sigmoid(self.gate(z)).view(*o.shape)
        return self.out((o * g).reshape(*z.shape[:-1], D))


class Einsum(nn.Module):
    """In the style of lucidrains: heads folded into the batch or not, masked by the largest negative number."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_kv, self.to_out = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (self.to_q(x), *self.to_kv(x).chunk(2, dim=-1))
        q, k, v = (t.reshape(b, n, HEADS, -1).permute(0, 2, 1, 3) for t in (q, k, v))
        dots = einsum("b h i d, b h j d -> b h i j", q * SIZE**-0.5, k)
        mask_value = -torch.finfo(dots.dtype).max
        visible = torch.arange(n) < torch.tensor([n, n - 5])[:, None]
        dots.masked_fill_(~visible[:, None, None, :], mask_value)
        i, j = dots.shape[-2:]
        dots = dots.masked_fill(torch.ones((i, j), dtype=torch.bool).triu(j - i + 1), mask_value)
        dots = dots - dots.amax(dim=-1, keepdim=True).detach()
        out = einsum("b h i j, b h j d -> b h i d", dots.softmax(dim=-1), v)
        return self.to_out(out.permute(0, 2, 1, 3).reshape(b, n, -1))


class Relative(nn.Module):
    """T5's: no scale, a learned bias of each distance that has the mask in it, added in place, softmax in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.relative_attention_bias = nn.Embedding(8, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, -1, HEADS, SIZE).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(3, 2))
        buckets = (torch.arange(t)[:, None] - torch.arange(t)).clamp(0, 7)
        position_bias = self.relative_attention_bias(buckets).permute(2, 0, 1).unsqueeze(0)
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
        scores += position_bias + torch.zeros(t, t, dtype=x.dtype).masked_fill(hidden, torch.finfo(x.dtype).min)
        weights = functional.dropout(functional.softmax(scores.float(), dim=-1).type_as(scores), 0.1, training=False)
        return self.o(torch.matmul(weights, v).transpose(1, 2).contiguous().view(b, -1, D))
