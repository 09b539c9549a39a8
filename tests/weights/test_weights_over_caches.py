"""Promise: attention_weights over a cache of any kind gives the weights of the same queries over all tokens."""

from typing import Any

import pytest
import torch
from support.assertions import Refusals, assert_close, each_refusal, refused
from torch import Tensor

from pyattn import KVCache, attention_weights, attention_with_cache

LEFT = 9
KINDS: dict[str, dict[str, Any]] = {
    "slots": {},
    "pages": {"page_size": 16},
    "ring": {"window": (LEFT, 0)},
    "shared values": {"shared_values": True, "head_dim_v": 5},
    "shared ring": {"shared_values": True, "head_dim_v": 5, "window": (LEFT, 0)},
    "shared pages": {"shared_values": True, "head_dim_v": 5, "page_size": 16},
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_reduction = pytest.mark.parametrize("reduce", [None, "queries", "heads", "entropy"])
TOKENS, NEW = 58, 3


def tokens(heads: int) -> Tensor:
    return torch.randn(2, heads, TOKENS, 8, dtype=torch.float64)


def filled(kind: str, k: Tensor, last: list[int] | None = None) -> KVCache:
    """A cache of k, whose other slots hold NaN; a ring buffer has moved its positions."""
    cached = KVCache(2, k.shape[1], 20 if "ring" in kind else 64, 8, dtype=k.dtype, **KINDS[kind])
    cached.k.fill_(torch.nan)
    *chunks, newest = k.split([10] * 5 + [5, NEW], 2)
    for chunk in (*chunks, newest):
        lengths = last if chunk is newest else None
        cached.append(*((chunk,) if cached.shared_values else (chunk, chunk)), lengths=lengths)
    return cached


def window(kind: str) -> dict[str, Any]:
    return {"window": (LEFT, 0)} if "ring" in kind else {}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scores": {"softcap": 2.0, "alibi_slopes": torch.rand(4).double(), "sinks": torch.rand(4).double()},
    "table": {"relative_bias": torch.rand(4, 31).double(), "softmax_scale": 0.7},
    "narrow": {"window": (5, 0)},
    "own mask": {"mask": torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1]]).bool()},
}


@each_kind
@each_reduction
@pytest.mark.parametrize("option", OPTIONS)
def test_equals_the_weights_over_all_tokens(kind: str, reduce: Any, option: str) -> None:
    q, k, given = tokens(4), tokens(2), OPTIONS[option]
    dense = window(kind) | given
    if option == "own mask":
        before = torch.ones(NEW, TOKENS - NEW, dtype=torch.bool)
        dense |= {"mask": torch.cat([before, given["mask"]], 1)}
    found = attention_weights(q[:, :, -NEW:], filled(kind, k), reduce=reduce, **given)
    assert_close(found, attention_weights(q[:, :, -NEW:], k, reduce=reduce, **dense), 1e-12)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "ring" not in kind])
@each_reduction
def test_options_that_count_keys(kind: str, reduce: Any) -> None:
    """They have max_seqlen keys, of which the dense call has those in use."""
    q, k = tokens(4)[:, :, -NEW:], tokens(2)
    given: dict[str, Any] = {"bias": torch.randn(4, NEW, 64).double(), "mask": torch.rand(2, 1, NEW, 64) < 0.8}
    dense = {name: t[..., :TOKENS] for name, t in given.items()}
    given["key_ranges"] = dense["key_ranges"] = torch.tensor([[[2, 50]]])
    found = attention_weights(q, filled(kind, k), reduce=reduce, **given)
    assert_close(found, attention_weights(q, k, reduce=reduce, **dense), 1e-12)
    lists = torch.randint(-1, TOKENS, (2, 1, NEW, 12))
    found = attention_weights(q, filled(kind, k), reduce=reduce, selected=lists)
    assert_close(found, attention_weights(q, k, reduce=reduce, selected=lists), 1e-12)


@each_kind
@each_reduction
def test_chosen_rows_heads_and_lse(kind: str, reduce: Any) -> None:
    q, cached, chosen = tokens(4)[:, :, -NEW:], filled(kind, tokens(2)), {"rows": [-1, 0], "heads": [2, 0]}
    _, lse = attention_with_cache(q, cached, return_lse=True)
    found = attention_weights(q, cached, reduce=reduce, **chosen)
    assert_close(found, attention_weights(q, cached, reduce=reduce, lse=lse, **chosen), 1e-12)
    whole = attention_weights(q, cached)[:, [2, 0]][:, :, [-1, 0]]
    sums = {None: whole, "queries": whole.sum(2), "heads": whole.sum(1), "entropy": -torch.xlogy(whole, whole).sum(-1)}
    assert_close(found, sums[reduce], 1e-12)


@each_kind
def test_out_is_their_product(kind: str) -> None:
    """Also with dropout, after a ragged append whose padding sees no key."""
    k, seed = tokens(2), torch.tensor(5)
    cached, q = filled(kind, k, [3, 1]), tokens(4)[:, :, -NEW:]
    weights = attention_weights(q, cached, dropout_p=0.3, dropout_seed=seed)
    values = k.repeat_interleave(2, 1)[..., : cached.v.shape[-1]]
    assert cached.lengths.tolist() == [58, 56]
    assert_close(weights @ values, attention_with_cache(q, cached, dropout_p=0.3, dropout_seed=seed), 1e-12)
    assert not weights[1, :, 1:].any()
    assert not weights[1, :, :, 56:].any()


@each_kind
def test_gradients(kind: str) -> None:
    """They reach q and learned options, as over all tokens."""
    q, k, sinks = tokens(4)[:, :, -NEW:].clone().requires_grad_(), tokens(2), torch.zeros(4).double().requires_grad_()
    results = []
    for keys, more in ((filled(kind, k), {}), (k, window(kind))):
        received = attention_weights(q, keys, reduce="queries", sinks=sinks, **more)
        results.append(torch.autograd.grad(received.sin().sum(), (q, sinks)))
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, 1e-11)


@each_kind
def test_empty(kind: str) -> None:
    sizes = 20 if "ring" in kind else 64
    empty, q = KVCache(2, 2, sizes, 8, dtype=torch.float64, **KINDS[kind]), tokens(4)[:, :, :2]
    assert attention_weights(q, empty).shape == (2, 4, 2, 0)
    assert attention_weights(q, empty, reduce="queries").shape == (2, 4, 0)
    assert not attention_weights(q, empty, reduce="entropy").any()
    none = KVCache(0, 2, sizes, 8, dtype=torch.float64, **KINDS[kind])
    assert attention_weights(q[:0], none, reduce="heads").shape == (0, 2, 0)


Q = torch.zeros(1, 2, 1, 8)
BAD: Refusals = [
    ({"q": Q[0]}, ValueError, "over a cache, q must have 4 dimensions (batch, num_heads, seqlen, head_dim), got "),
    ({"q": Q[None]}, ValueError, "over a cache, q must have 4 dimensions (batch, num_heads, seqlen, head_dim), got "),
    ({"q": None}, TypeError, "q must be Tensor, got None"),
    ({"q": Q.double()}, TypeError, "q must have the cache's dtype, got torch.float64 and torch.float32"),
    ({"q": Q.expand(2, 2, 1, 8)}, ValueError, "q must have the cache's batch, got 2 and 1"),
    ({"q": Q[..., :4]}, ValueError, "q must have the cache's head_dim, got 4 and 8"),
    (
        {"q": torch.nested.as_nested_tensor([Q[0]], layout=torch.jagged)},
        NotImplementedError,
        "q must be a dense tensor",
    ),
    ({"reduce": "sum"}, ValueError, 'reduce must be "queries", "heads", "entropy" or None, got \'sum\''),
    ({"rows": [1]}, ValueError, "each of rows must be between -1 and 0, got 1"),
    ({"lse": torch.zeros(1, 2, 3)}, ValueError, "lse must have shape (1, 2, 1), got (1, 2, 3)"),
    ({"is_causal": True}, TypeError, "attention_weights has no argument is_causal"),
]


@each_refusal(BAD)
def test_wrong_calls(changes: Any, kind: type[Exception], message: str) -> None:
    cached = KVCache(1, 1, 20, 8)
    cached.append(*torch.zeros(2, 1, 1, 4, 8))
    with refused(kind, message):
        attention_weights(**{"q": Q, "k": cached} | changes)


def test_a_ring_refuses_options_that_count_keys() -> None:
    with refused(NotImplementedError, "a cache with a window takes no selected, got window=(9, 0)"):
        attention_weights(Q, KVCache(1, 1, 20, 8, window=(9, 0)), selected=torch.zeros(1, 1, 1, 2).long())


@each_kind
@pytest.mark.parametrize("wrong", [{"mask": "x"}, {"bias": [1.0]}, {"key_ranges": [[0, 1]]}, {"sinks": 1.0}], ids=str)
def test_wrong_types(kind: str, wrong: dict[str, Any]) -> None:
    """The errors of attention over the same cache."""
    name, value = next(iter(wrong.items()))
    if "ring" in kind and name in ("bias", "key_ranges"):
        return
    cached = filled(kind, tokens(2))
    for call in (attention_weights, attention_with_cache):
        with refused(TypeError, f"{name} must be Tensor, got {value!r}"):
            call(tokens(4)[:, :, :NEW], cached, **wrong)
