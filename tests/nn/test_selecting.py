"""Promise: the book's attention with a lightning indexer computes what its plain class does, without all pairs."""

import copy
from typing import Any

import pytest
import torch
from support.cases import memory_needed
from torch import Tensor, nn

from pyattn.nn.book import LightningIndexer, MultiHeadAttentionWithDSA
from pyattn.reference import sparse
from pyattn.selection import indexer_loss

# With many heads, no two scores are 0: torch.topk does not say which of equal ones it takes.
SIZES: dict[str, Any] = {"d_in": 24, "d_out": 32, "dropout": 0.0, "num_heads": 4, "index_n_heads": 16}
SIZES |= {"index_head_dim": 8, "topk": 5}


def both(**changed: Any) -> tuple[MultiHeadAttentionWithDSA, sparse.MultiHeadAttentionWithDSA]:
    """The module and the plain class, made under the same seed, in float64."""
    modules = []
    for kind in (MultiHeadAttentionWithDSA, sparse.MultiHeadAttentionWithDSA):
        torch.manual_seed(123)
        modules.append(kind(**SIZES | changed).double())
    return modules[0], modules[1]


def tokens(length: int) -> Tensor:
    return torch.randn(2, length, 24, dtype=torch.float64)


def test_state_dicts_both_ways() -> None:
    ours, plain = both(qkv_bias=True)
    assert list(ours.state_dict()) == list(plain.state_dict())
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name])
    plain.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(plain.state_dict(), strict=True)


@pytest.mark.parametrize("topk", [1, 5, 40])
def test_out_and_gradients(topk: int) -> None:
    ours, plain = both(topk=topk)
    x = tokens(17)
    sides = []
    for module in (ours, plain):
        own = x.clone().requires_grad_()
        out = module(own)
        out.square().sum().backward()
        gradients = [p.grad for name, p in module.named_parameters() if "indexer" not in name]
        sides.append([out, own.grad, *gradients])
        assert all(p.grad is None for p in module.indexer.parameters())
    torch.testing.assert_close(*sides)


def test_tokens_one_by_one_over_its_cache() -> None:
    ours, plain = both()
    x = tokens(14)
    expected = plain(x)
    with torch.no_grad():
        parts = [ours(chunk, use_cache=True) for chunk in x.split([6, 1, 4, 1, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected)
    ours.reset_cache()
    torch.testing.assert_close(ours(x[:, :3], use_cache=True), plain(x[:, :3]))
    torch.testing.assert_close(ours(x), expected)  # a call without the cache forgets it
    torch.testing.assert_close(copy.deepcopy(ours)(x), expected)


@pytest.mark.parametrize("use_cache", [False, True])
def test_weights_and_hooks(use_cache: bool) -> None:
    """Both are of all keys; the weights of keys that are not selected are 0."""
    ours, plain = both()
    x, shapes = tokens(12), []
    with torch.no_grad():
        out, weights = ours(x, use_cache, need_weights=True)
        assert (weights[..., :12].count_nonzero(-1) == torch.arange(1, 13).clamp(max=5)).all()
        torch.testing.assert_close(out, plain(x))
        ours.reset_cache()
        ours.dropout.register_forward_hook(lambda module, inputs, result: shapes.append(result.shape[:3]))
        if not use_cache:
            torch.testing.assert_close(ours(x), plain(x))
            assert shapes == [(2, 4, 12)]


@pytest.mark.parametrize("topk", [2, 40])
def test_a_refused_call_leaves_both_caches(topk: int) -> None:
    ours, plain = both(topk=topk)
    x = tokens(12)
    with torch.no_grad():
        first = ours(x[:, :5], use_cache=True)
        hook = ours.dropout.register_forward_hook(lambda *_: None)
        with pytest.raises(NotImplementedError, match="hooks on dropout are not supported with kv_cache"):
            ours(x[:, 5:9], use_cache=True)
        hook.remove()
        torch.testing.assert_close(torch.cat([first, ours(x[:, 5:], use_cache=True)], 1), plain(x))


def test_the_indexer_alone() -> None:
    torch.manual_seed(0)
    indexer, plain = LightningIndexer(24, 16, 8).double(), sparse.LightningIndexer(24, 16, 8).double()
    plain.load_state_dict(indexer.state_dict(), strict=True)
    x, context = tokens(4), tokens(9)
    assert torch.equal(indexer(x, context, topk=5).sort(-1).values, plain(x, context, topk=5).sort(-1).values)
    causal = torch.zeros(4, 9).masked_fill(torch.ones(4, 9, dtype=torch.bool).triu(6), -torch.inf)
    found = indexer(x, context, topk=6, causal_mask=causal)
    assert torch.equal(found.sort(-1).values, plain(x, context, topk=6, causal_mask=causal).sort(-1).values)
    few = indexer(context, context, topk=4, causal_mask=torch.full((9, 9), -torch.inf).triu(1))
    assert (few[:, 0] == 0).all()
    none = indexer(context, x, topk=2, causal_mask=torch.full((9, 4), -torch.inf).triu(-4))
    assert (none[:, :5] == -1).all()
    assert (none[:, 5:] >= 0).all()
    with pytest.raises(NotImplementedError, match=r"causal_mask must be 0 up to each token's own key"):
        indexer(x, context, topk=5, causal_mask=torch.zeros(4, 9))


def test_its_loss_trains_the_indexer() -> None:
    ours, _ = both()
    x = tokens(20)
    q, k = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (ours.W_query, ours.W_key))
    losses, optimizer = [], torch.optim.Adam(ours.indexer.parameters(), lr=0.03)
    for _ in range(40):
        loss = indexer_loss(q, k, *ours.indexer.projections(x, x)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_memory_is_linear() -> None:
    module = MultiHeadAttentionWithDSA(32, 32, 0.0, 2, index_n_heads=2, index_head_dim=8, topk=16)
    x = torch.randn(1, 8192, 32)

    def step() -> None:
        module(x).sum().backward()

    step()
    assert memory_needed(step) < 8192**2 * 2


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MultiHeadAttentionWithDSA(**SIZES | {"topk": 0}), ValueError, "topk must be at least 1, got 0"),
        (lambda: LightningIndexer(8, 0, 4), ValueError, "index_n_heads must be at least 1, got 0"),
        (lambda: MultiHeadAttentionWithDSA(**SIZES)(torch.rand(2, 3, 24), use_cache=1), TypeError, "use_cache"),
        (lambda: MultiHeadAttentionWithDSA(**SIZES)(torch.rand(2, 3, 5)), ValueError, "24"),
        (
            lambda: MultiHeadAttentionWithDSA(**SIZES)(
                torch.nested.nested_tensor([torch.rand(3, 24)], layout=torch.jagged)
            ),
            NotImplementedError,
            "takes no jagged x",
        ),
    ],
)
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_it_is_printed_with_its_sizes() -> None:
    module: nn.Module = MultiHeadAttentionWithDSA(**SIZES)
    assert "num_heads=4, topk=5" in repr(module)
