"""One token over a KV cache: ``pyattn bench --only cache``, append and attention alone, beside PyTorch's ways.

Every side takes q, k, v of one more token after ``before`` others, stores k and v, and returns the token's out. Each
side has its own storage before the clock starts: a cache, slices of tensors, or nothing if it recomputes attention over
all tokens. GB/s counts one read of the keys and values of all tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import pyattn
from pyattn import KVCache
from pyattn.cli.bench.sides.calls import Calls, Run, Sizes

SIZES = ((8, 8, 512, 128), (8, 8, 4096, 128), (8, 8, 16384, 128), (32, 8, 16384, 128))
"""Query heads, KV heads, tokens and head_dim. K and V of the longest, 134 MB in float32, exceed every cache."""

LONGEST_RECOMPUTED = 4096
"""Most tokens for which attention is recomputed; with 16,384 it takes seconds."""

BASE = "torch sdpa over slices"
READING = "torch.sum of K and V"
"""No attention: how fast torch reads the same memory."""

PAGE_SIZE = 16
"""The smallest possible page, which costs most."""


class SdpaCache:
    """A cache in plain torch: one sequence, with keys and values written in place to slices."""

    k: Tensor
    v: Tensor
    used: int

    def __init__(self, heads: int, size: int, head_dim: int, like: Tensor) -> None:
        self.k, self.v = torch.zeros(2, 1, heads, size, head_dim, dtype=like.dtype, device=like.device)
        self.used = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        """Attention of new tokens over all so far; after the prompt, one token at a time."""
        before, self.used = self.used, self.used + q.shape[2]
        self.k[:, :, before : self.used], self.v[:, :, before : self.used] = k, v
        keys, values = self.k[:, :, : self.used], self.v[:, :, : self.used]
        grouped = q.shape[1] != k.shape[1]
        return functional.scaled_dot_product_attention(q, keys, values, is_causal=before == 0, enable_gqa=grouped)


def bytes_read(sizes: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of the keys and values of all tokens."""
    _, num_heads_kv, tokens, head_dim = sizes
    return 2 * num_heads_kv * tokens * head_dim * dtype.itemsize


@torch.no_grad()
def sides(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> dict[str, Callable[[], object]]:
    """The calls by side, each giving out (1, heads, 1, head_dim) of the last token, the same for all; and READING."""
    heads, num_heads_kv, tokens, head_dim = sizes
    before = tokens - 1
    where: dict[str, Any] = {"dtype": dtype, "device": device}
    recomputed = tokens if tokens <= LONGEST_RECOMPUTED else 1
    q = torch.randn(1, heads, recomputed, head_dim, **where)
    k, v = torch.randn(2, 1, num_heads_kv, tokens, head_dim, **where).unbind()
    token = q[:, :, -1:], k[:, :, -1:], v[:, :, -1:]
    kept = k[:, :, :-1].contiguous(), v[:, :, :-1].contiguous()

    def ours(page_size: int | None = None) -> Callable[[], Tensor]:
        cache = KVCache(1, num_heads_kv, tokens, head_dim, **where, page_size=page_size)
        cache.append(*kept)

        def call() -> Tensor:
            cache.lengths.fill_(before)
            cache.append(*token[1:])
            return pyattn.attention_with_cache(token[0], cache)

        return call

    def sliced() -> Tensor:
        theirs.used = before
        return theirs.attend(*token, 0.0)

    theirs = SdpaCache(num_heads_kv, tokens, head_dim, k)
    theirs.k[:, :, :before], theirs.v[:, :, :before] = kept
    sdpa = partial(functional.scaled_dot_product_attention, enable_gqa=heads != num_heads_kv)

    def concatenated() -> Tensor:
        return sdpa(token[0], torch.cat([kept[0], token[1]], 2), torch.cat([kept[1], token[2]], 2))

    calls: dict[str, Callable[[], object]] = {
        BASE: sliced,
        "torch sdpa over torch.cat": concatenated,
        "pyattn over a cache": ours(),
    }
    if device == "cpu":
        calls[f"pyattn over pages of {PAGE_SIZE}"] = ours(PAGE_SIZE)
    if recomputed == tokens:
        calls["torch sdpa recomputing"] = lambda: sdpa(q, k, v, is_causal=True)[:, :, -1:]
        calls["pyattn recomputing"] = lambda: pyattn.attention(q, k, v)[:, :, -1:]
    return calls | {READING: lambda: (k.sum(), v.sum())}


def calls(run: Run, sizes: Sizes) -> Calls:
    """One token over a KV cache, at these sizes, as in :data:`SIZES`."""
    return Calls(sides(sizes, *run.place), done=bytes_read(sizes, run.place[0]))
