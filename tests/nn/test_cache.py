"""Promise: a module over a cache gives the results of all tokens at once."""

import re

import pytest
import torch
from support.assertions import Refusals, each_refusal, refused
from support.modules import (
    CONTEXT_LENGTH,
    D_IN,
    WITH_EXTRAS,
    assert_same,
    cache_for,
    doubles,
    made,
    made_cached,
    sequences,
)

from pyattn import KVCache, nn
from pyattn.nn import growing_cache, heads

each_module = pytest.mark.parametrize("name", WITH_EXTRAS)
STEPS = (5, 1, 1, 3, 1, 6, 1)
"""New tokens per call; 18 in all."""


def test_a_ring_outlasts_the_context():
    module = nn.GroupedQueryAttention(D_IN, 8, 0.0, 4, 2, window=(4, 0), alibi=True, rotary=100.0).double()
    x = sequences(2, 100)
    cached = cache_for(module, window=(4, 0))
    steps = [module(part, kv_cache=cached) for part in x.split(7, 1)]
    assert_same(torch.cat(steps, 1), module(x))


def test_sequences_of_their_own_lengths_have_their_own_positions():
    module = made("GroupedQueryAttention", "rotary")
    x = sequences(2, 9)
    cached = cache_for(module)
    module(x[:, :7], kv_cache=cached)
    cached.lengths[1] = 3
    step = module(torch.stack([x[0, 7:8], x[1, 3:4]]), kv_cache=cached)
    assert_same(step[0], module(x[:1, :8])[0, 7:])
    assert_same(step[1], module(x[1:, :4])[0, 3:])


@pytest.mark.parametrize("fewest", [1, 256])
def test_use_cache_equals_plain(monkeypatch, fewest):
    """The cache grows several times, is dropped on request and by a call without it, and takes other batches."""
    monkeypatch.setattr(growing_cache, "FEWEST", fewest)
    modules = doubles("GroupedQueryAttention")
    x = sequences(2, sum(STEPS))
    for use in (x, x[:1], x.repeat(2, 1, 1)):
        for part in use.split(STEPS, 1):
            ours, exact = (module(part, use_cache=True) for module in modules)
            assert_same(ours, exact)
        assert_same(modules[0](use[:, :2]), modules[1](use[:, :2]))
    for part in x.split(STEPS, 1):
        for module in modules:
            module.reset_cache()
        ours, exact = (module(part, True) for module in modules)
        assert_same(ours, exact)
        assert_same(ours, modules[1](part))
    assert list(modules[0].state_dict()) == list(modules[1].state_dict())


def test_autocast_fills_a_cache_of_its_dtype():
    module = nn.GroupedQueryAttention(D_IN, 8, 0.0, 4, 2, rotary=100.0)
    x = torch.randn(2, 9, D_IN)
    cached = KVCache(2, 2, CONTEXT_LENGTH, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        whole = module(x)
        steps = [module(part, kv_cache=cached) for part in x.split(4, 1)]
        own = [module(part, use_cache=True) for part in x.split(4, 1)]
    assert torch.equal(torch.cat(steps, 1), whole)
    assert torch.equal(torch.cat(own, 1), whole)


@each_module
def test_training_drops_weights_over_a_cache(name):
    module = made(name)
    module.dropout.p = 1.0
    x = sequences(2, 3)
    cached = cache_for(module)
    dropped = module(x, kv_cache=cached)
    assert cached.lengths.tolist() == [3, 3]
    assert (dropped == dropped[:1, :1]).all()
    module.eval()
    kept = module(x, kv_cache=cached)
    assert not torch.equal(kept[0], kept[1])


BAD: Refusals = [
    ({"kv_cache": 3}, TypeError, "kv_cache must be KVCache, got 3"),
    (
        {"kv_cache": KVCache(2, 2, CONTEXT_LENGTH + 1, 4)},
        ValueError,
        "kv_cache.max_seqlen must not exceed context_length, got 20 and 19",
    ),
]


@each_refusal(BAD)
def test_wrong_calls(changes, kind, message):
    module = made("MultiHeadAttention")
    with refused(kind, message):
        module(sequences(2, 3), **{"kv_cache": cache_for(module)} | changes)


def test_an_assigned_mask():
    module = made("MultiHeadAttention")
    module.mask = torch.zeros(CONTEXT_LENGTH, CONTEXT_LENGTH, dtype=torch.float64)
    with refused(NotImplementedError, "an assigned mask is not supported with kv_cache, got one of shape (19, 19)"):
        module(sequences(2, 3), kv_cache=cache_for(module))


def test_use_cache_alone():
    module = made("GroupedQueryAttention")
    message = re.escape("pyattn: use_cache=True must come without kv_cache, got KVCache(k")
    with pytest.raises(ValueError, match=f"^{message}"):
        module(sequences(2, 3), use_cache=True, kv_cache=KVCache(2, 2, 9, 2))


@pytest.mark.parametrize("wrong", [1, 0, None, "yes", torch.tensor(True)], ids=str)
def test_use_cache_is_a_bool(wrong):
    with refused(TypeError, "use_cache must be bool, got "):
        made("GroupedQueryAttention")(sequences(2, 3), use_cache=wrong)


MISFITS: Refusals = [
    ({"batch": 3}, ValueError, "batch size must be that of the module's keys, got 3 and 2"),
    ({"num_heads_kv": 4}, ValueError, "number of KV heads must be that of the module's keys, got 4 and 2"),
    ({"head_dim": 8}, ValueError, "head_dim must be that of the module's keys, got 8 and 4"),
    ({"head_dim_v": 8}, ValueError, "head_dim_v must be that of the module's keys, got 8 and 4"),
    ({"dtype": torch.float32}, TypeError, "dtype must be that of the module's keys, got torch.float32 and torch.float"),
    ({"device": "meta"}, ValueError, "device must be that of the module's keys, got meta and cpu"),
]


@pytest.mark.parametrize("options", [{}, {"page_size": 16}, {"window": (4, 0)}])
@each_refusal(MISFITS)
@pytest.mark.parametrize("extra", ["", "rotary"])
def test_a_cache_that_does_not_fit(extra, changes, kind, message, options):
    """Our message comes first where torch would also raise, as with rotary positions."""
    module = made("MultiHeadAttention", extra)
    sizes = {"batch": 2, "num_heads_kv": 2, "max_seqlen": CONTEXT_LENGTH, "head_dim": 4, "dtype": torch.float64}
    with refused(kind, f"the cache's {message}"):
        module(sequences(2, 3), kv_cache=KVCache(**sizes | options | changes))


@pytest.mark.parametrize("new", [1, 300])
def test_the_modules_own_cache_is_of_one_batch(new):
    """Also when it would grow."""
    module = made("GroupedQueryAttention", "rotary")
    module(sequences(2, 3), use_cache=True)
    message = r"^pyattn: the cache's batch size must be that of the module's keys, got 2 and 1$"
    with pytest.raises(ValueError, match=message):
        module(sequences(1, new), use_cache=True)


def test_a_refused_call_keeps_the_modules_own_cache():
    module = nn.GroupedQueryAttention(8, 8, 0.0, 4, 2).eval()
    x = torch.randn(2, 6, 8)
    module(x[:, :4], use_cache=True)
    refused = ({"lengths": [4, 3]}, {"kv_cache": KVCache(3, 2, 9, 2)}, {"kv_cache": KVCache(2, 2, 9, 3)})
    for wrong in refused:
        with pytest.raises(ValueError, match=r"^pyattn: "):
            module(x[:, :4], **wrong)
    continued = module(x[:, 4:], use_cache=True)
    torch.testing.assert_close(continued, module(x)[:, 4:])


each_kind = pytest.mark.parametrize("kind", [{}, {"page_size": 16}, {"window": (3, 0)}])


@each_kind
@pytest.mark.parametrize("lengths", [None, [2, 1]])
def test_an_error_leaves_the_cache(monkeypatch, kind, lengths):
    """Also one that attention raises when the tokens have been appended; a ring buffer may then have moved its keys."""
    module = nn.GroupedQueryAttention(D_IN, 8, 0.0, 4, 2, window=(3, 0)).double()
    x, cached = sequences(2, 14), KVCache(2, 2, 6 if "window" in kind else 16, 2, dtype=torch.float64, **kind)
    steps = [module(part, kv_cache=cached) for part in x[:, :6].split(3, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(heads, "attention_with_cache", lambda *_, **__: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                module(x[:, 6:9], kv_cache=cached, lengths=lengths)
            assert cached.lengths.tolist() == [6, 6]
    steps += [module(part, kv_cache=cached) for part in x[:, 6:].split(2, 1)]
    assert_same(torch.cat(steps, 1), module(x))


@each_kind
def test_gradients_that_8_bits_refuse_leave_the_cache(kind):
    module = nn.GroupedQueryAttention(D_IN, 64, 0.0, 4, 2).requires_grad_(False)
    cached = KVCache(2, 2, 16, 16, kv_dtype=torch.int8, **kind)
    module.W_query.requires_grad_()
    with pytest.raises(NotImplementedError, match="has no gradients: read it under"):
        module(torch.randn(2, 3, D_IN), kv_cache=cached)
    assert cached.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("name", ["MultiHeadAttention", "MultiHeadLatentAttention", "book.MultiHeadLatentAttention"])
def test_a_bias_that_autocast_does_not_cast_is_refused_before_the_append(name):
    module = made_cached(name).float()
    cached = cache_for(module).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        with refused(TypeError, "bias must have dtype torch.bfloat16 or torch.float32, got torch.float64"):
            module(torch.randn(2, 3, D_IN), kv_cache=cached, bias=torch.zeros(CONTEXT_LENGTH).double())
        assert cached.lengths.tolist() == [0, 0]
        module(torch.randn(2, 3, D_IN), kv_cache=cached, bias=torch.zeros(CONTEXT_LENGTH).half())
