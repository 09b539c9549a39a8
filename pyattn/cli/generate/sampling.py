"""Text generation token by token, over caches of the keys and values so far."""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pyattn import KVCache, attention_with_cache
from pyattn.cli.checks import check_memory
from pyattn.cli.gpt import GPT, Config, Layers, all_tokens
from pyattn.ops.row_invariance import row_invariant

CHUNK = 256
"""Tokens of a prompt to read at a time: enough to fill the kernels, with activations of a few MB."""

CACHE_DTYPES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
"""The values of --cache-dtype."""

Read = Callable[[Tensor], Tensor]
"""Reads the next tokens, int64 (B, S), and returns the logits (B, vocab) after the last token."""


def attend_cached(cache: KVCache, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, **options: Any) -> Tensor:
    """Attention over all tokens so far, including the new ones."""
    cache.append(k, v)
    out: Tensor = attention_with_cache(q, cache, dropout_p=dropout_p, **options)
    return out


def cache_size(config: Config, tokens: int) -> tuple[tuple[int, int] | None, int]:
    """Window and capacity of a cache for ``tokens``: a ring buffer if the window needs fewer positions than that.

    Invariant rows have no ring buffers.
    """
    left, _ = config.window
    size = left + CHUNK
    return (config.window, size) if left >= 0 and size < tokens and not row_invariant() else (None, tokens)


def caches_for(
    model: GPT, batch: int, tokens: int, page_size: int | None = None, kv_dtype: torch.dtype | None = None
) -> list[KVCache]:
    """One cache per block of ``model``, each with room for ``tokens``."""
    config, weight = model.config, model.token.weight
    window, size = cache_size(config, tokens)
    sizes = batch, config.heads, size, config.width // config.heads
    options: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device, "window": window}
    return [KVCache(*sizes, **options, page_size=page_size, kv_dtype=kv_dtype) for _ in model.blocks]


def check_caches(option: str, config: Config, prompt: int, count: int, device: str) -> None:
    """Raise InputError if the caches for a prompt and ``count`` more tokens exceed the memory of ``device``."""
    _, size = cache_size(config, prompt + room(config, prompt, count))
    check_memory(f"{option}: a KV cache of so many bytes of text", 8 * config.layers * config.width * size, device)


class Cached:
    """Reads each token once, over caches for up to ``tokens`` tokens.

    Attributes:
        done: how many tokens have been read.
    """

    def __init__(self, model: GPT, batch: int, tokens: int, kv_dtype: torch.dtype | None = None) -> None:
        self.model: GPT = model
        self.done: int = 0
        self._caches = caches_for(model, batch, tokens, kv_dtype=kv_dtype)
        self._attends = [partial(attend_cached, cache) for cache in self._caches]

    def __call__(self, ids: Tensor) -> Tensor:
        """Reads ``ids`` and returns the logits after the last token, as :data:`Read` does."""
        return self.logits(ids)[:, -1]

    def logits(self, ids: Tensor, layers: Layers = all_tokens) -> Tensor:
        """Reads ``ids`` (B, S), S > 0, and returns the logits (B, up to CHUNK, vocab) after the last CHUNK of them."""
        for logits in self.by_chunks(ids, layers):  # noqa: B007
            pass
        return logits

    def by_chunks(self, ids: Tensor, layers: Layers = all_tokens) -> Iterator[Tensor]:
        """Reads ``ids`` (B, S) and yields the logits (B, up to CHUNK, vocab) after each chunk's tokens."""
        for chunk in ids.split(CHUNK, 1):
            logits = self.model(chunk, self._attends, self.done, layers=layers)
            self.done += chunk.shape[1]
            yield logits

    def forget(self, done: int) -> None:
        """Takes back all but the first ``done`` tokens, fewer than CHUNK of them: a ring buffer has no older ones."""
        for cache in self._caches:
            cache.truncate(done)
        self.done = done


def recomputing(model: GPT) -> Read:
    """Reads all tokens again each time: the work that the cache saves, and the result it must equal."""
    so_far: list[Tensor] = []

    def read(ids: Tensor) -> Tensor:
        so_far.append(ids)
        return model(torch.cat(so_far, 1))[:, -1]

    return read


def room(config: Config, prompt: int, count: int) -> int:
    """How many of ``count`` tokens fit after a prompt: learned positions end at the context."""
    return count if config.alibi else max(0, min(count, config.context - prompt))


def choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    """The next token (B, 1): the likeliest at temperature 0, else drawn from the ``top_k`` likeliest ones.

    ``generator`` is on the CPU, so the same generator gives the same text on any device.
    """
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    likeliest = logits.float().topk(min(top_k, logits.shape[-1]))
    below = likeliest.values - likeliest.values[..., :1]  # a logit divided by a low temperature may be infinite
    weights = torch.softmax(below / temperature, -1).cpu()
    drawn = torch.multinomial(weights, 1, generator=generator).to(logits.device)
    return likeliest.indices.gather(1, drawn)


@torch.no_grad()
def continuation(
    read: Read, ids: Tensor, count: int, generator: torch.Generator, *, temperature: float, top_k: int
) -> Iterator[Tensor]:
    """Yields ``count`` tokens, each (B, 1), that follow ``ids`` (B, S)."""
    for _ in range(count):
        ids = choose(read(ids), temperature, top_k, generator)
        yield ids


def drawing(options: argparse.Namespace) -> dict[str, Any]:
    """How a command's options draw tokens: the last arguments of :func:`continuation`."""
    generator = torch.Generator().manual_seed(options.seed)
    return {"generator": generator, "temperature": options.temperature, "top_k": options.top_k}


def sampled(
    model: GPT, prompt: Tensor, count: int, options: argparse.Namespace, cached: bool = True
) -> Iterator[Tensor]:
    """:func:`continuation` of ``prompt`` with the seed, temperature and top_k of a command's options."""
    kv_dtype = CACHE_DTYPES.get(options.cache_dtype or "") if "cache_dtype" in options else None
    read = Cached(model, 1, prompt.shape[1] + count, kv_dtype) if cached else recomputing(model)
    return continuation(read, prompt, count, **drawing(options))


@torch.no_grad()
def loss(model: GPT, ids: Tensor, kv_dtype: torch.dtype | None = None) -> float:
    """The mean cross-entropy of each token of ``ids`` (1, S), S > 1, after those before it, read from a cache."""
    logits = torch.cat([*Cached(model, 1, ids.shape[1], kv_dtype).by_chunks(ids[:, :-1])], 1)
    return float(cross_entropy(logits[0].float(), ids[0, 1:]))
