"""The later attention classes of the book's chapter 5, again from their formulas, with caches: modules as in people.py.

Each takes x (B, T, 24) and (keys, values) of earlier positions, or None, and returns the output and the longer pair.
"""

import torch
from support.adapters.people import HEADS, SIZE, D, rotary
from torch import Tensor, nn
from torch.nn import functional

Cache = tuple[Tensor, Tensor] | None
GROUPS = 2


def joined(cache: Cache, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Earlier keys and values before those of this call."""
    if cache is None:
        return keys, values
    return torch.cat([cache[0], keys], dim=2), torch.cat([cache[1], values], dim=2)


def hidden(t: int, keys: int, window: int | None) -> Tensor:
    """True = hidden: keys after a query, and those out of its window."""
    distance = torch.arange(keys - t, keys)[:, None] - torch.arange(keys)
    return (distance < 0) if window is None else (distance < 0) | (distance >= window)


class TinyAya(nn.Module):
    """Cohere's: neighbouring columns are turned in layers with a window, and none in the others."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.W_query, self.out_proj = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.W_key, self.W_value = (nn.Linear(D, GROUPS * SIZE, bias=False) for _ in range(2))
        self.window = window

    def turned(self, x: Tensor, offset: int) -> Tensor:
        """Each pair of neighbouring columns by one angle."""
        angles = torch.arange(offset, offset + x.shape[2])[:, None] / 1e4 ** (torch.arange(0, SIZE, 2) / SIZE)
        angles = angles.to(x.dtype).repeat_interleave(2, dim=-1)
        other = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        return x * angles.cos() + other * angles.sin()

    def forward(self, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        b, t, _ = x.shape
        queries = self.W_query(x).view(b, t, HEADS, SIZE).transpose(1, 2)
        keys, values = (f(x).view(b, t, GROUPS, SIZE).transpose(1, 2) for f in (self.W_key, self.W_value))
        if self.window is not None:
            past = 0 if cache is None else cache[0].shape[2]
            queries, keys = self.turned(queries, past), self.turned(keys, past)
        cache = joined(cache, keys, values)
        keys, values = (y.repeat_interleave(HEADS // GROUPS, dim=1) for y in cache)
        scores = queries @ keys.transpose(2, 3) / SIZE**0.5
        scores = scores.masked_fill(hidden(t, keys.shape[2], self.window), -torch.inf)
        context = (torch.softmax(scores, dim=-1) @ values).transpose(1, 2).reshape(b, t, D)
        return self.out_proj(context), cache


class ZeroCentered(nn.Module):
    """RMSNorm whose weights are added to one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (SIZE,)) * (1.0 + self.weight)


class Qwen35(nn.Module):
    """Qwen3.5's full attention: a gate beside each query, norms of heads, the first columns turned alone."""

    TURNED = 4

    def __init__(self) -> None:
        super().__init__()
        self.W_query, self.out_proj = nn.Linear(D, 2 * D, bias=False), nn.Linear(D, D, bias=False)
        self.W_key, self.W_value = (nn.Linear(D, GROUPS * SIZE, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = ZeroCentered(), ZeroCentered()

    def turned(self, x: Tensor, offset: int) -> Tensor:
        return torch.cat([rotary(x[..., : self.TURNED], offset), x[..., self.TURNED :]], dim=-1)

    def forward(self, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        b, t, _ = x.shape
        queries, gate = torch.chunk(self.W_query(x).view(b, t, HEADS, 2 * SIZE), 2, dim=-1)
        keys, values = (f(x).view(b, t, GROUPS, SIZE).transpose(1, 2) for f in (self.W_key, self.W_value))
        past = 0 if cache is None else cache[0].shape[2]
        queries = self.turned(self.q_norm(queries).transpose(1, 2), past)
        cache = joined(cache, self.turned(self.k_norm(keys), past), values)
        keys, values = (
            y[:, :, None].expand(b, GROUPS, HEADS // GROUPS, *y.shape[2:]).reshape(b, HEADS, *y.shape[2:])
            for y in cache
        )
        scores = queries @ keys.transpose(2, 3)
        scores = scores.masked_fill(hidden(t, keys.shape[2], None), -torch.inf)
        weights = torch.softmax(scores * SIZE**-0.5, dim=-1, dtype=torch.float32).to(queries.dtype)
        context = (weights @ values).transpose(1, 2).reshape(b, t, D)
        return self.out_proj(context * torch.sigmoid(gate.reshape(b, t, D))), cache


class Gemma4(nn.Module):
    """Norms instead of a scale. Layers without a window have larger heads, and take keys before their norm as values.

    Args:
        window: how many keys a query sees, None for all.
        owner: whether the layer has keys and values, or gets an earlier layer's of its kind.
    """

    def __init__(self, window: int | None, *, owner: bool = True) -> None:
        super().__init__()
        self.window, self.owner, self.size = window, owner, SIZE if window is not None else 2 * SIZE
        self.W_query = nn.Linear(D, HEADS * self.size, bias=False)
        self.out_proj = nn.Linear(HEADS * self.size, D, bias=False)
        self.q_norm = nn.RMSNorm(self.size)
        if owner:
            self.k_norm, self.v_norm = nn.RMSNorm(self.size), nn.RMSNorm(self.size, elementwise_affine=False)
            self.W_key = nn.Linear(D, GROUPS * self.size, bias=False)
            self.W_value = None if window is None else nn.Linear(D, GROUPS * self.size, bias=False)

    def turned(self, x: Tensor, offset: int) -> Tensor:
        """All columns in layers with a window, a quarter of them in others: the angles of the rest are 0."""
        if self.window is not None:
            return rotary(x, offset)
        n = self.size // 2
        angles = torch.arange(offset, offset + x.shape[2])[:, None] / 1e6 ** (torch.arange(n) / n)
        angles = angles.masked_fill(torch.arange(n) >= n // 4, 0.0).repeat(1, 2).to(x.dtype)
        other = torch.cat([-x[..., n:], x[..., :n]], dim=-1)
        return x * angles.cos() + other * angles.sin()

    def forward(self, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """A layer that is no owner takes all keys and values, those of this call too, as its ``cache``."""
        b, t, _ = x.shape
        past = 0 if cache is None else cache[0].shape[2] - (0 if self.owner else t)
        queries = self.q_norm(self.W_query(x).view(b, t, HEADS, self.size)).transpose(1, 2)
        if self.owner:
            keys = self.W_key(x).view(b, t, GROUPS, self.size)
            values = keys if self.W_value is None else self.W_value(x).view(b, t, GROUPS, self.size)
            keys, values = self.k_norm(keys).transpose(1, 2), self.v_norm(values).transpose(1, 2)
            cache = joined(cache, self.turned(keys, past), values)
        assert cache is not None
        keys, values = (y.repeat_interleave(HEADS // GROUPS, dim=1) for y in cache)
        scores = self.turned(queries, past) @ keys.transpose(2, 3)
        scores = scores.masked_fill(hidden(t, keys.shape[2], self.window), -torch.inf)
        context = (torch.softmax(scores, dim=-1) @ values).transpose(1, 2).reshape(b, t, HEADS * self.size)
        return self.out_proj(context), cache


class Gemma4Layers(nn.Module):
    """Four layers: the last two have the keys and values of the first two."""

    def __init__(self) -> None:
        super().__init__()
        kinds = ((5, True), (None, True), (5, False), (None, False))
        self.layers = nn.ModuleList(Gemma4(window, owner=owner) for window, owner in kinds)

    def forward(self, x: Tensor) -> Tensor:
        pairs: list[Cache] = []
        for at, layer in enumerate(self.layers):
            out, pair = layer(x, None if at < 2 else pairs[at - 2])
            pairs.append(pair)
            x = x + out
        return x
