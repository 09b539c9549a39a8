"""Promise: what would silently do nothing, or another thing than meant, raises, or takes effect."""

import copy
import gc
import io
import pickle
import pydoc
import re
from typing import Any

import pytest
import torch
from support.assertions import refused
from support.modules import (
    ARGUMENTS,
    CACHED,
    CONTEXT_LENGTH,
    D_IN,
    WITH_RANGES,
    assert_same,
    cache_for,
    class_of,
    doubles,
    made_cached,
    sequences,
)
from torch import Tensor

from pyattn import nn, reference

WRITES = {
    "zero_": lambda mask: mask.zero_(),
    "a view": lambda mask: mask[:3].view(-1).fill_(0),
    "a part": lambda mask: mask.split(3)[1].add_(1),
    "an element": lambda mask: mask.__setitem__((0, 0), 1),
    "*=": lambda mask: mask.__imul__(0),
    "data": lambda mask: mask.data.zero_(),
    "detached": lambda mask: mask.detach().copy_(torch.ones(CONTEXT_LENGTH, CONTEXT_LENGTH)),
    "out": lambda mask: torch.triu(mask, out=mask),
    "inplace": lambda mask: torch.nn.functional.dropout(mask, inplace=True),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("name", ["CausalAttention", "MultiHeadAttention", "MHAEinsum", "GatedMultiHeadAttention"])
def test_a_mask_that_is_read_is_not_written(name, write):
    module = class_of(name)(*ARGUMENTS[name])
    before = module.mask.clone()
    with pytest.raises(
        RuntimeError, match=r"^pyattn: mask must be assigned, not changed in place, because it is comput"
    ):
        write(module.mask)
    assert torch.equal(module.mask, before)
    write(before)
    module.mask = before
    assert torch.equal(module.mask, before)
    write(module.mask)


def test_a_mask_that_is_read_computes_as_any_tensor():
    module, _ = doubles("MultiHeadAttention")
    assert type(module.mask.bool()) is type(module.mask + 1) is type(copy.deepcopy(module.mask)) is Tensor
    assert type(module.state_dict()["mask"]) is type(pickle.loads(pickle.dumps(module.mask))) is Tensor
    torch.save(module.mask, file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file), module.mask)
    scores = torch.randn(CONTEXT_LENGTH, CONTEXT_LENGTH, dtype=torch.float64, requires_grad=True)
    (scores * module.mask).sum().backward()
    assert torch.equal(scores.grad, module.mask)
    module.mask = module.mask
    module.mask.zero_()
    assert not module.mask.any()


@pytest.mark.parametrize("name", CACHED)
def test_one_cache_for_two_layers(name):
    first, second = made_cached(name), made_cached(name)
    for parameter in second.parameters():
        torch.nn.init.normal_(parameter)
    x, cached = sequences(2, 3), cache_for(first)
    first(x, kv_cache=cached)
    with refused(ValueError, "kv_cache must be of one module alone, one for each layer of a model, got KVCache(k (2, "):
        second(x, kv_cache=cached)
    assert cached.lengths.tolist() == [3, 3]
    first(x, kv_cache=cached)
    cached.reset()
    assert_same(second(x, kv_cache=cached), second(x))
    cached.lengths.zero_()  # a reset as well
    assert_same(first(x, kv_cache=cached), first(x))


def test_copies_and_new_models_continue_a_cache():
    module = made_cached("MultiHeadAttention")
    x = sequences(2, 9)
    whole = module(x)
    for kind in ("copy of the module", "copy of the cache", "clone", "pickle", "both", "new model"):
        user, cached = module, cache_for(module)
        module(x[:, :5], kv_cache=cached)
        if kind == "copy of the module":
            user = copy.deepcopy(module)
        elif kind == "clone":
            cached = cached.clone()
        elif kind == "copy of the cache":
            cached = copy.deepcopy(cached)
        elif kind == "pickle":
            cached = pickle.loads(pickle.dumps(cached))
        elif kind == "both":
            user, cached = copy.deepcopy((module, cached))
        else:
            state, old = module.state_dict(), copy.deepcopy(module)
            cached.reset()
            old(x[:, :5], kv_cache=cached)
            del old
            gc.collect()
            user = class_of("MultiHeadAttention")(*ARGUMENTS["MultiHeadAttention"]).double()
            user.load_state_dict(state)
        assert_same(user(x[:, 5:], kv_cache=cached), whole[:, 5:])


HOOKED = ["MultiHeadAttention", "GroupedQueryAttention", "CausalAttention", "Attention", "MHAEinsum"]


@pytest.mark.parametrize("name", HOOKED)
def test_hooks_on_dropout_run(name):
    """They see the weights, and what they return takes effect, gradients included, as in the plain module."""
    native, plain = doubles(name)
    x, results = sequences(2, 9), []
    for module in (native, plain):
        leaf, seen = x.clone().requires_grad_(), []
        handles = [
            module.dropout.register_forward_hook(lambda _, given, out: out * 0.5),
            module.dropout.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0].detach())),
            module.dropout.register_full_backward_hook(lambda _, before, after, seen=seen: seen.append(after[0])),
        ]
        out = module(leaf)
        out.sin().sum().backward()
        assert len(seen) == 2
        results.append([out.detach(), leaf.grad, *(t.squeeze(1) for t in seen)])
        for handle in handles:
            handle.remove()
    for ours, exact in zip(*results, strict=True):
        assert_same(ours, exact.squeeze(1))
    assert_same(native(x), plain(x))


@pytest.mark.parametrize("name", HOOKED)
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_with_hooks_later_tokens_that_are_nan_change_no_row(name, p):
    module, x = doubles(name)[0], sequences(2, 9)
    module.dropout.p = p
    module.dropout.register_forward_hook(lambda *_: None)
    mask = {"mask": torch.ones(9, 9).bool().triu(1)} if name == "Attention" else {}
    rows = []
    for last in (0.0, torch.nan):
        x[:, 8] = last
        torch.manual_seed(0)
        out = module(x, **mask)
        rows.append(out[:, :8])
        assert out[:, 8].isnan().all() == (last != 0.0)
    assert_same(rows[0], rows[1])


def test_where_hooks_on_dropout_cannot_run():
    module = made_cached("GroupedQueryAttention")
    module.dropout.register_forward_hook(lambda *_: None)
    x, jagged = sequences(2, 3), torch.nested.nested_tensor_from_jagged(sequences(1, 5)[0], torch.tensor([0, 2, 5]))
    for options in ({"kv_cache": cache_for(module)}, {"use_cache": True}):
        with refused(NotImplementedError, "hooks on dropout are not supported with kv_cache, got Dropout(p=0.0"):
            module(x, **options)
    with refused(NotImplementedError, "hooks on dropout are not supported with a jagged x, got Dropout(p=0.0"):
        module(jagged)


@pytest.mark.parametrize("name", [name for name in WITH_RANGES if name not in ("Attention", "CausalAttention")])
def test_masks_that_may_mean_either(name):
    """A mask (batch, keys) would pass as (seqlen, keys), and (batch, seqlen, keys) as (heads, seqlen, keys)."""
    module = class_of(name)(*(WITH_RANGES[name] or ARGUMENTS[name])).double()
    heads = len(module.heads) if hasattr(module, "heads") else getattr(module, "num_heads", 3)
    x = sequences(5, 5)
    either = "mask must be (1, 1, seqlen, keys) or (batch, 1, 1, keys) where batch and seqlen are both 5, got"
    with refused(ValueError, either):
        module(x, mask=torch.ones(5, 5).bool())
    module(x, mask=torch.ones(1, 1, 5, 5).bool()), module(x[:4], mask=torch.ones(5, 5).bool())
    if heads > 1:
        x = sequences(heads, 7)
        message = "mask must be (1, num_heads, seqlen, keys) or (batch, 1, seqlen, keys) where batch and num_heads are "
        with refused(ValueError, message):
            module(x, mask=torch.ones(heads, 7, 7).bool())
        module(x, mask=torch.ones(heads, 1, 7, 7).bool()), module(x, bias=torch.zeros(heads, 7, 7))


def test_a_checkpoint_of_another_context():
    """The message says what to delete; without strict, the causal mask of another context counts as nothing."""
    short, long = nn.MultiHeadAttention(8, 8, 6, 0.0, 2), reference.MultiHeadAttention(8, 8, 9, 0.0, 2)
    for key, model, state in (
        ("mask", short, long.state_dict()),
        ("0.mask", torch.nn.Sequential(short), torch.nn.Sequential(long).state_dict()),
    ):
        hint = f"{key} must have shape (6, 6), got (9, 9); a causal mask may be deleted: del state_dict[{key!r}]"
        with pytest.raises(RuntimeError, match=re.escape(hint)):
            model.load_state_dict(state)
        assert model.load_state_dict(state, strict=False).unexpected_keys == [key]
        assert torch.equal(short.W_query.weight, long.W_query.weight)
        with pytest.raises(RuntimeError, match=re.escape(f"{key} must have shape (6, 6), got (9, 9)")):
            model.load_state_dict(state | {key: torch.zeros(9, 9)}, strict=False)
        del state[key]
        model.load_state_dict(state)


def test_a_fresh_state_loads_into_the_books_cached_classes():
    """One registers its mask with persistent=False, the other has none."""

    class Cached(reference.MultiHeadAttention):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.register_buffer("mask", self.mask, persistent=False)

    sizes = (8, 8, 6, 0.0, 2)
    for made in (
        nn.MultiHeadAttention(*sizes, persistent_mask=False),
        nn.MultiHeadAttention(*sizes, max_seq_len=6),
        nn.MultiHeadAttention(*sizes, window_size=3),
    ):
        Cached(*sizes).load_state_dict(made.state_dict(), strict=True)
        made.load_state_dict(Cached(*sizes).state_dict(), strict=True)
        made.load_state_dict(reference.MultiHeadAttention(*sizes).state_dict(), strict=True)


def test_help_of_the_package_is_a_page():
    """The text of the package, its functions and its data; the classes have their own help."""
    for package in (nn, nn.book):
        text = pydoc.render_doc(package, renderer=pydoc.plaintext)
        assert len(text.splitlines()) < 400
        assert package.__doc__.splitlines()[0].rstrip(".") in text
    assert "create_gpt2_small_attention(dropout" in pydoc.render_doc(nn, renderer=pydoc.plaintext)
    assert "kv_cache" in pydoc.render_doc(nn.MultiHeadAttention.forward, renderer=pydoc.plaintext)
    names: dict[str, Any] = {}
    exec("from pyattn.nn import *", names)
    assert names["MultiHeadAttention"] is nn.MultiHeadAttention


def test_the_arguments_are_listed_once():
    own = "d_in, d_out, dropout, num_heads, qkv_bias, sliding_window_size"
    message = f"MultiHeadAttentionWithSWA has no argument zzzz (its arguments are {own}), got 1; no argument yyyy, "
    with refused(TypeError, message):
        nn.book.MultiHeadAttentionWithSWA(D_IN, 8, 0.0, 2, zzzz=1, yyyy=2)
    with pytest.raises(TypeError, match=r"window_size by position and the rest by name, got 1 more, the first 3$"):
        nn.MultiHeadAttention(D_IN, 8, 9, 0.0, 2, False, None, None, 3)
