"""Decoding one token: ``pyattn bench --only decode``, beside PyTorch's attention and recomputation.

Every side computes the logits after ``context`` tokens. Before the clock starts, the sides with a cache have read all
tokens but the last; those that recompute read all of them again.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyattn.cli.bench.sides.calls import Calls, Run
from pyattn.cli.bench.sides.kv_caches import PAGE_SIZE, SdpaCache
from pyattn.cli.generate import sampling
from pyattn.cli.gpt import GPT, Attend, Config, attend_pyattn, attend_sdpa

CONTEXTS = (256, 4096)
MODEL = Config(layers=4, heads=8, width=512)
"""13 million parameters, 50 MB in float32: more than most second-level caches hold, as in real models."""

BASE = "torch sdpa over a cache"


@torch.no_grad()
def sides(context: int, dtype: torch.dtype, device: str) -> dict[str, Callable[[], Tensor]]:
    """The calls by side: each gives the logits (1, vocab) after the same ``context`` tokens; BASE is the baseline."""
    config = replace(MODEL, context=context)
    model = GPT(config).to(device=device, dtype=dtype).eval()
    ids = torch.randint(config.vocab, (1, context), device=device)
    last, before = ids[:, -1:], context - 1

    def over(caches: Sequence[Any], attend: Attend, rewind: Callable[[Any], object]) -> Callable[[], Tensor]:
        attends = [partial(attend, cache) for cache in caches]
        if before:
            model(ids[:, :-1], attends)

        @torch.no_grad()
        def cached() -> Tensor:
            for cache in caches:
                rewind(cache)
            return model(last, attends, before)[:, -1]

        return cached

    @torch.no_grad()
    def recomputing(attend: Attend) -> Tensor:
        return model(ids, [attend] * config.layers)[:, -1]

    def ours(page_size: int | None = None) -> Callable[[], Tensor]:
        caches = sampling.caches_for(model, 1, context, page_size)
        return over(caches, sampling.attend_cached, lambda cache: cache.lengths.fill_(before))

    theirs = [SdpaCache(config.heads, context, config.width // config.heads, model.token.weight) for _ in model.blocks]
    return {
        BASE: over(theirs, SdpaCache.attend, lambda cache: setattr(cache, "used", before)),
        "pyattn over a cache": ours(),
        **({f"pyattn over pages of {PAGE_SIZE}": ours(PAGE_SIZE)} if device == "cpu" else {}),
        "torch sdpa recomputing": partial(recomputing, attend_sdpa),
        "pyattn recomputing": partial(recomputing, attend_pyattn),
    }


def calls(run: Run, contexts: tuple[int]) -> Calls:
    """Decoding one token of a model at the given context."""
    return Calls(sides(contexts[0], *run.place), done=1)
