"""Promise: a module checks a tree of drafted tokens in one call: each node as at the end of its branch alone."""

import pytest
import torch
from support.assertions import Refusals, each_refusal, refused
from support.modules import CACHED, WITH_EXTRAS, arguments, assert_same, cache_for, made, made_cached, sequences
from torch import Tensor

from pyattn import masks, nn

PARENTS = torch.tensor([[-1, 0, 0, 1, 2, 2], [-1, -1, 1, 1, 3, 0]])
PATHS = [0, 2, 5], [1, 3, 4]
"""A branch of each tree, which the model accepts."""
LENGTHS = 5, 3


@pytest.mark.parametrize("kind", [{}, {"page_size": 16}, {"window": (13, 0)}], ids=["contiguous", "pages", "ring"])
@pytest.mark.parametrize("name", [name for name in CACHED if name in (*WITH_EXTRAS, "MultiHeadLatentAttention")])
def test_a_tree_equals_its_branches(name, kind):
    """With weights, after texts of different lengths; after keep, the next token sees its own branch alone."""
    module = made_cached(name, "rotary")
    cached, tree = cache_for(module, **kind), masks.tree(PARENTS)
    text, nodes, last = sequences(2, 5), sequences(2, 6), sequences(2, 1)
    positions = torch.tensor(LENGTHS)[:, None] + tree[:, 0].sum(-1) - 1
    given = {"mask": ~tree if isinstance(module, nn.Attention) else tree, "positions": positions.to(torch.int32)}
    with torch.no_grad():
        module(text, *arguments(module, 0, 5, 5), kv_cache=cached, lengths=LENGTHS)
        out, weights = module(nodes, kv_cache=cached, need_weights=True, **given)
        cached.keep([[n + node for node in path] for n, path in zip(LENGTHS, PATHS, strict=True)], LENGTHS)
        after = module(last, kv_cache=cached)
        for b, (path, n) in enumerate(zip(PATHS, LENGTHS, strict=True)):
            x = torch.cat([text[b, :n], nodes[b, path], last[b]])[None]
            alone, shown = module(x, *arguments(module, 0, n + 4, n + 4), need_weights=True)
            assert_same(torch.cat([out[b, path], after[b]]), alone[0, n:])
            seen = [*range(n), *(n + node for node in path)]
            assert_same(weights[b][:, path][..., seen], shown[0, :, n:-1, :-1])


def test_positions_are_those_of_the_tokens():
    """In any order, and by default counted from the cache."""
    module, x = made("GroupedQueryAttention", "rotary"), sequences(2, 5)
    order = torch.tensor([3, 0, 4, 1, 2])
    every = torch.ones(5, 5).bool()
    plain = nn.Attention(12, 3, rotary=10.0).double()
    assert_same(plain(x[:, order], ~every, positions=order[None]), plain(x, ~every)[:, order])
    assert torch.equal(module(x, positions=torch.arange(5).expand(2, 5)), module(x))
    assert_same(module(x, positions=torch.arange(5)[None] + 7), module(x))


X: Tensor = torch.randn(2, 5, 12)
COUNTED = torch.arange(5)[None]
BAD: Refusals = [
    ({"positions": [0, 1]}, TypeError, "positions must be Tensor, got [0, 1]"),
    ({"positions": COUNTED.double()}, TypeError, "positions must be int32 or int64, got torch.float64"),
    ({"positions": COUNTED[:, :4]}, ValueError, "positions must be (2 or 1, 5), got (1, 4)"),
    ({"positions": COUNTED.to("meta")}, ValueError, "positions must be on the device of x, got meta and cpu"),
    ({"rotary": None, "positions": COUNTED}, ValueError, "positions need a rotary embedding, got rotary=None"),
    (
        {"alibi": True, "positions": COUNTED},
        NotImplementedError,
        "positions are not supported with ALiBi, which counts",
    ),
]


@each_refusal(BAD)
def test_wrong_positions(changes, kind, message):
    given = {"rotary": 100.0, "alibi": False} | changes
    module = nn.MultiHeadAttention(12, 8, 19, 0.0, 2, rotary=given["rotary"], alibi=given["alibi"])
    with refused(kind, message):
        module(X, positions=given["positions"])
