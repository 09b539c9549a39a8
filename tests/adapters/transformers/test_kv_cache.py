"""Promise: a whole model generates from our KVCache, in its own dtype or in 8 bits."""

import inspect
from typing import Any

import pytest
import torch
from support.adapters import tiny
from support.assertions import refused
from transformers import DynamicCache

from pyattn import KVCache
from pyattn.adapters.transformers import kv_cache, register

MODELS = ("llama", "gpt2", "gemma2", "mistral")


def made(name: str, attention: str = "pyattn") -> torch.nn.Module:
    register()
    model = tiny.model(name, "CausalLM", 0.1)
    model.set_attn_implementation(attention)
    return model


def named(model: Any, cache: Any) -> dict[str, Any]:
    """The cache by the name that this version of transformers has for it."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("given", [{}, {"page_size": 16}])
@pytest.mark.parametrize("way", [{}, {"num_beams": 3}])
def test_the_text_of_transformers_own_cache(name, given, way):
    """A left-padded batch; greedily, and by beam search, which reorders the cache."""
    model = made(name)
    ids = torch.randint(3, 60, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0} | way
    expected = model.generate(ids, **settings)
    cache = kv_cache(64, **given)
    assert torch.equal(model.generate(ids, **settings, **named(model, cache)), expected)
    assert isinstance(cache.layers[0].cache, KVCache)
    assert cache.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", MODELS)
def test_logits_from_8_bits(name, kv_dtype):
    """Chunks and tokens, close to those of a cache in the model's dtype."""
    model, ids = made(name), torch.randint(3, 60, (2, 14))
    found = []
    with torch.no_grad():
        for cache in (kv_cache(32, kv_dtype=kv_dtype), kv_cache(32)):
            parts = [model(part, **named(model, cache)).logits for part in ids.split([6, 5, 1, 1, 1], 1)]
            found.append(torch.cat(parts, 1))
        assert cache.layers[0].cache.kv_dtype is None
        expected = model(ids).logits
    assert (found[1] - expected).norm() < 1e-4 * expected.norm()
    assert 0 < (found[0] - expected).norm() < (0.03 if kv_dtype == torch.int8 else 0.08) * expected.norm()


def test_what_it_refuses():
    model, other, ids = made("llama"), made("llama", "sdpa"), torch.randint(3, 60, (1, 5))
    with torch.no_grad(), refused(NotImplementedError, 'keys of this cache are read by attn_implementation="pyattn"'):
        other(ids, **named(other, kv_cache(16)))
    with refused(NotImplementedError, "kv_cache() keeps no gradients"):
        model(ids, **named(model, kv_cache(16)))
    with torch.no_grad(), refused(ValueError, "a sequence must not outgrow the cache's max_seqlen of 4"):
        model(ids, **named(model, kv_cache(4)))


@pytest.mark.parametrize("tokens", [0, -4, -9, -20, 6, 20])
def test_crops_as_transformers_own_cache_does(tokens):
    """A positive number is an error from transformers 5.24 on, and leaves the cache as it was."""
    found = []
    for cache in (kv_cache(16), DynamicCache()):
        rows = torch.randn(1, 2, 9, 8)
        cache.update(rows, rows, 0)
        try:
            cache.crop(tokens)
        except ValueError as error:
            found.append(str(error))
        found.append(cache.get_seq_length())
    assert found[: len(found) // 2] == found[len(found) // 2 :]


def test_cropped_and_reset():
    """As assisted generation does."""
    model, ids = made("llama"), torch.randint(3, 60, (1, 8))
    cache = kv_cache(16)
    with torch.no_grad():
        expected = model(ids).logits
        model(ids, **named(model, cache))
        cache.crop(-3)
        assert (model(ids[:, 5:], **named(model, cache)).logits - expected[:, 5:]).norm() < 1e-4 * expected.norm()
        cache.reset()
        assert (model(ids, **named(model, cache)).logits - expected).norm() < 1e-4 * expected.norm()
