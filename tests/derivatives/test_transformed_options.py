"""Promise: transforms of torch.func compose, two deep, with tables of distances, intervals, lists, trees and sums."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.transforms import FEW, TRANSFORMS, Function, assert_two_deep, flat, pattern
from torch import Tensor

import pyattn
from pyattn import nn, reference, relative_bias
from pyattn.adapters.flex import flex_attention
from pyattn.masks import tree

# torch scripts its own forward-mode rules on first use; the category is FutureWarning since torch 2.15.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")

INTERVALS = torch.tensor([[[[0, 1], [2, 3]], [[0, 0], [1, 3]]]])
"""key_ranges of two queries and three keys."""

DENSE = (1, 2, 2, 2), (1, 1, 3, 2), (1, 1, 3, 1)


def dense(attend: Callable[..., Any]) -> Function:
    """Results of intervals and of T5's table; the largest score carries no gradient."""

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, embedding: Tensor) -> Any:
        table = relative_bias.t5(embedding, bidirectional=True, max_distance=3)
        options: dict[str, Any] = {"causal": False, "key_ranges": INTERVALS, "sinks": sinks, "relative_bias": table}
        out, lse, largest = attend(q, k, v, softcap=1.5, return_lse=True, return_max_score=True, **options)
        return out, lse, largest.detach()

    return call


def packed(attend: Callable[..., Any]) -> Function:
    """A sequence of two queries and three keys, after an empty one."""

    def call(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Any:
        lengths = torch.tensor([0, 0, 2]), torch.tensor([0, 0, 3]), 2, 3
        options: dict[str, Any] = {"key_ranges": INTERVALS[0], "relative_bias": relative_bias.alibi(slopes, 2)}
        return attend(q, k, v, *lengths, causal=False, return_lse=True, **options)

    return call


def lists(x: Tensor, entries: int) -> Tensor:
    """Lists from a tensor that every transform takes, so vmap maps them too: entries from -1 to ``entries`` - 1."""
    return (1000 * x.detach().abs()).long() % (entries + 1) - 1


def selected(attend: Callable[..., Any], block: int = 1) -> Function:
    """Results of lists of keys, with every learned option."""

    def call(q: Tensor, k: Tensor, v: Tensor, x: Tensor, bias: Tensor, slopes: Tensor, sinks: Tensor) -> Any:
        options: dict[str, Any] = {"selected": lists(x, -(-3 // block)), "selected_block": block, "bias": bias}
        table = torch.stack([slopes, sinks, slopes.cos()], -1)
        options |= {"alibi_slopes": slopes, "sinks": sinks, "relative_bias": table, "dropout_p": 0.2, "dropout_seed": 3}
        return attend(q, k, v, causal=False, return_lse=True, **options)

    return call


def selected_of_packed(attend: Callable[..., Any]) -> Function:
    def call(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Any:
        lengths = torch.tensor([0, 0, 2]), torch.tensor([0, 0, 3]), 2, 3
        return attend(q, k, v, *lengths, causal=False, return_lse=True, selected=lists(x, 3))

    return call


def selected_weights(q: Tensor, k: Tensor, x: Tensor) -> Any:
    options: dict[str, Any] = {"causal": False, "selected": lists(x, 3)}
    return [pyattn.attention_weights(q, k, reduce=kind, **options) for kind in ("heads", "queries", "entropy")]


def selected_weights_by_formula(q: Tensor, k: Tensor, x: Tensor) -> Any:
    keys = lists(x, 3)
    *_, weights = reference.attention(q, k, k[..., :0], causal=False, selected=keys, return_weights=True)
    own = (keys >= 0) & ((keys.unsqueeze(-1) == keys.unsqueeze(-2)).tril(-1).any(-1).logical_not())
    in_order = torch.where(own, weights.gather(-1, keys.clamp(min=0).expand(1, 2, 2, 2)), 0.0)
    return in_order.sum(1), weights.sum(2), -(weights * torch.where(weights > 0, weights, 1.0).log()).sum(-1)


def queries(q: Tensor, k: Tensor, sinks: Tensor) -> Any:
    return pyattn.attention_weights(q, k, sinks=sinks, reduce="queries")


def entropy(q: Tensor, k: Tensor, sinks: Tensor) -> Any:
    return pyattn.attention_weights(q, k, sinks=sinks, reduce="entropy")


def _weights(q: Tensor, k: Tensor, sinks: Tensor) -> Tensor:
    *_, weights = reference.attention(q, k, k[..., :0], sinks=sinks, return_weights=True)
    assert isinstance(weights, Tensor)
    return weights


def queries_by_formula(q: Tensor, k: Tensor, sinks: Tensor) -> Any:
    return _weights(q, k, sinks).sum(-2)


def entropy_by_formula(q: Tensor, k: Tensor, sinks: Tensor) -> Any:
    p = _weights(q, k, sinks)
    rest = 1 - p.sum(-1)
    return -(p * torch.where(p > 0, p, 1.0).log()).sum(-1) - rest * rest.log()


def latent(home: Any) -> Function:
    """The module as a function of its input and its first two weights."""
    torch.manual_seed(0)
    module = home.MultiHeadLatentAttention(4, 2, 3, 3, 2, 2, 2).double().requires_grad_(requires_grad=False)
    names = [name for name, _ in module.named_parameters()][:2]

    def call(x: Tensor, *weights: Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,))

    return call


def over_cache(**sizes: Any) -> tuple[Function, Function]:
    """A tree of three drafted tokens after one of text."""
    cache = pyattn.KVCache(1, 1, 8, 2, head_dim_v=1, dtype=torch.float64, **sizes)
    k, v, drafted = pattern((1, 1, 4, 2)), pattern((1, 1, 4, 1)), tree([-1, 0, 0])
    cache.append(k, v)
    seen = torch.nn.functional.pad(drafted, (1, 0), value=True)

    def ours(q: Tensor, sinks: Tensor) -> Any:
        return pyattn.attention_with_cache(q, cache, mask=drafted, sinks=sinks, return_lse=True)

    def truth(q: Tensor, sinks: Tensor) -> Any:
        return reference.attention(q, k, v, causal=False, mask=seen, sinks=sinks, return_lse=True)

    return ours, truth


CALLS: dict[str, tuple[tuple[Function, Function], tuple[tuple[int, ...], ...]]] = {
    "attention": ((dense(pyattn.attention), dense(reference.attention)), (*DENSE, (2,), (4, 2))),
    "attention_varlen": (
        (packed(pyattn.attention_varlen), packed(reference.attention_varlen)),
        ((2, 2, 2), (3, 1, 2), (3, 1, 1), (2,)),
    ),
    "selected": (
        (selected(pyattn.attention), selected(reference.attention)),
        (*DENSE, (1, 1, 2, 2), (1, 1, 2, 3), (2,), (2,)),
    ),
    "selected of heads": (
        (selected(pyattn.attention, 2), selected(reference.attention, 2)),
        (*DENSE, (1, 2, 2, 2), (2, 1, 3), (2,), (2,)),
    ),
    "selected of packed": (
        (selected_of_packed(pyattn.attention_varlen), selected_of_packed(reference.attention_varlen)),
        ((2, 2, 2), (3, 1, 2), (3, 1, 1), (1, 2, 2)),
    ),
    "selected weights": ((selected_weights, selected_weights_by_formula), (*DENSE[:2], (1, 1, 2, 2))),
    "queries": ((queries, queries_by_formula), (*DENSE[:2], (2,))),
    "entropy": ((entropy, entropy_by_formula), (*DENSE[:2], (2,))),
    "latent": ((latent(nn), latent(reference)), ((1, 3, 4), (3, 4), (3,))),
    "tree": (over_cache(), ((1, 2, 3, 2), (2,))),
    "tree in pages": (over_cache(page_size=16), ((1, 2, 3, 2), (2,))),
}
"""The function to transform, the one that it must equal, and the shapes of its inputs."""

WEIGHTS = "queries", "entropy", "selected weights"
"""Functions with derivatives of any order."""


@pytest.mark.parametrize("outer", [*FEW, "hessian"])
@pytest.mark.parametrize("name", CALLS)
def test_two_deep(name: str, outer: str) -> None:
    (ours, truth), shapes = CALLS[name]
    assert_two_deep(ours, truth, shapes, outer, (*FEW, "jacfwd", "jacrev"), any_order=name in WEIGHTS)


@pytest.mark.parametrize("inner", FEW)
@pytest.mark.parametrize("outer", FEW)
def test_what_is_refused(outer: str, inner: str) -> None:
    """One sentence for any two transforms of a score_mod of the user's own, and of what jagged tensors attend to."""
    offsets = torch.tensor([0, 1, 3])
    jagged = torch.nested.nested_tensor_from_jagged(pattern((3, 2, 2)), offsets).transpose(1, 2)

    def of_own_score(q: Tensor) -> Any:
        return flex_attention(q, q, q, lambda score, *_: score.square())

    def of_jagged(q: Tensor) -> Any:
        return pyattn.attention(jagged, jagged, jagged, sinks=q[0, :, 0, 0])

    calls = {"a score_mod of your own must run outside": of_own_score, "nested tensors are not supported": of_jagged}
    for rule, call in calls.items():
        both = TRANSFORMS[outer][1](flat(TRANSFORMS[inner][1](flat(call))))
        with pytest.raises(NotImplementedError, match=f"^pyattn: {rule}"):
            both(torch.randn(1, 2, 3, 4, dtype=torch.float64))
