"""One token of a model that writes text: ``pyattn bench --only decode``, beside PyTorch's attention and recomputing.

Every side computes the logits behind ``context`` tokens, of which all but the last are read before the clock starts:
over a cache of theirs, or, recomputing, not at all.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pyattn.cache import KVCache
from pyattn.cli import generation
from pyattn.cli.compare import attend_sdpa
from pyattn.cli.gpt import GPT, Config, attend_pyattn
from pyattn.cli.kv_caches import PAGE_SIZE, SdpaCache

CONTEXTS = (256, 4096)
MODEL = Config(layers=4, heads=8, width=512)
"""13 million parameters, 50 MB in float32: beyond most second-level caches, as real models are."""

BASE = "torch sdpa over a cache"


@torch.no_grad()
def sides(context: int, dtype: torch.dtype, device: str) -> dict[str, Callable[[], Tensor]]:
    """By side, the logits (1, vocab) behind the same ``context`` tokens; BASE is what speed-ups are over."""
    config = replace(MODEL, context=context)
    model = GPT(config).to(device=device, dtype=dtype).eval()
    ids = torch.randint(config.vocab, (1, context), device=device)
    last, before = ids[:, -1:], context - 1

    ours = generation.caches_for(model, 1, context)
    paged = generation.caches_for(model, 1, context, PAGE_SIZE) if device == "cpu" else []
    theirs = [SdpaCache(config.heads, context, config.width // config.heads, model.token.weight) for _ in model.blocks]
    sdpa_attends = [cache.attend for cache in theirs]
    for caches in (ours, paged):
        if before and caches:
            model(ids[:, :-1], [partial(generation.attend_cached, cache) for cache in caches])
    if before:
        model(ids[:, :-1], sdpa_attends)

    @torch.no_grad()
    def cached(caches: list[KVCache]) -> Tensor:
        for cache in caches:
            cache.lengths.fill_(before)
        logits: Tensor = model(last, [partial(generation.attend_cached, cache) for cache in caches], before)
        return logits[:, -1]

    @torch.no_grad()
    def sdpa_cached() -> Tensor:
        for cache in theirs:
            cache.used = before
        logits: Tensor = model(last, sdpa_attends, before)
        return logits[:, -1]

    @torch.no_grad()
    def recomputing(attend: Callable[..., Tensor]) -> Tensor:
        logits: Tensor = model(ids, [attend] * config.layers)
        return logits[:, -1]

    return {
        BASE: sdpa_cached,
        "pyattn over a cache": partial(cached, ours),
        **({f"pyattn over pages of {PAGE_SIZE}": partial(cached, paged)} if paged else {}),
        "torch sdpa recomputing": partial(recomputing, attend_sdpa),
        "pyattn recomputing": partial(recomputing, attend_pyattn),
    }
