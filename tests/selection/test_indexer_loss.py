"""Promise: indexer_loss is the divergence from attention's weights, with its gradients, in linear memory."""

import math
from collections.abc import Callable
from random import Random

import pytest
import torch
from support.assertions import (
    Refusals,
    assert_close,
    assert_threads_change_no_bit,
    check_examples,
    each_refusal,
    graph_of,
    refused,
)
from support.cases import assert_equal
from support.selection import Largest
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck

import pyattn
from pyattn import reference
from pyattn.selection import divergence, indexer_loss, top_keys


def inputs(
    *sizes: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Attention's q and k, and the indexer's leaves: batch, KV heads, group, Hi, seqlen_q, seqlen_k, D, Di."""
    batch, heads, group, indexer_heads, seqlen_q, seqlen_k, dim, indexer_dim = sizes
    make = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, heads * group, seqlen_q, dim),
        (batch, heads, seqlen_k, dim),
        (batch, indexer_heads, seqlen_q, indexer_dim),
        (batch, seqlen_k, indexer_dim),
        (batch, indexer_heads, seqlen_q),
    )
    q, k, *indexer = (torch.randn(shape, generator=make, dtype=torch.float64).to(dtype) for shape in shapes)
    index_q, index_k, weights = (t.requires_grad_() for t in indexer)
    return (q, k), (index_q, index_k, weights)


def both(
    loss: Callable[..., Tensor],
    attention: tuple[Tensor, ...],
    indexer: tuple[Tensor, ...],
    *lists: Tensor,
    **options: object,
) -> list[Tensor]:
    """The losses, and the gradients of a sum in which each has another factor."""
    found = loss(*attention, *indexer, *lists, **options)
    factors = torch.arange(1.0, 1 + found.numel()).view(found.shape)
    return [found.detach(), *grad((found * factors).sum(), indexer)]


def test_random_calls_beside_the_formula(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense and with lists, which repeat keys and name hidden ones, in blocks of few queries."""

    def check(random: Random) -> None:
        sizes = [random.choice(s) for s in ((1, 2), (1, 2), (1, 3), (1, 4), (1, 7, 20), (1, 9, 30), (1, 8), (1, 5))]
        attention, indexer = inputs(*sizes, seed=random.randrange(1000))
        options: dict[str, object] = {"causal": random.random() < 0.7}
        if random.random() < 0.5:
            options["q_offset"] = random.choice([-30, -3, 0, 5, torch.tensor([random.randint(-9, 30)] * sizes[0])])
        if random.random() < 0.3:
            options["softmax_scale"] = 0.3
        lists = []
        if random.random() < 0.7:
            shape = (sizes[0], 1, sizes[4], random.choice([0, 1, 5, 20]))
            lists = [torch.randint(-1, sizes[5], shape, dtype=random.choice([torch.int32, torch.int64]))]
        monkeypatch.setattr(divergence, "NUMBERS_AT_ONCE", random.choice([1, 300, 2**21]))
        found = both(indexer_loss, attention, indexer, *lists, **options)
        assert_close(found, both(reference.selection.indexer_loss, attention, indexer, *lists, **options), 1e-10)
        assert (found[0] > -1e-12).all()

    check_examples(request, 60, check)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sparse", [False, True])
def test_dtypes(dtype: torch.dtype, sparse: bool) -> None:
    """Sums in float32: as near as rounded inputs allow; gradients in the inputs' dtypes."""
    attention, indexer = inputs(2, 2, 2, 4, 40, 40, 16, 8, dtype=dtype)
    lists = [top_keys(*indexer, 8)] if sparse else []
    found = both(indexer_loss, attention, indexer, *lists)
    wide = tuple(t.double() for t in attention), tuple(t.detach().double().requires_grad_() for t in indexer)
    expected = both(reference.selection.indexer_loss, *wide, *lists)
    assert found[0].dtype == torch.float32
    assert [g.dtype for g in found[1:]] == [dtype] * 3
    for ours, exact in zip(found, expected, strict=True):
        rounding = 1e-5 if ours.dtype == torch.float32 else torch.finfo(dtype).eps
        assert (ours.double() - exact).abs().max() <= rounding * exact.abs().max()


def test_whole_list_is_dense() -> None:
    attention, indexer = inputs(2, 1, 4, 3, 12, 20, 8, 4)
    lists = torch.arange(20).expand(2, 1, 12, 20)
    assert_close(both(indexer_loss, attention, indexer, lists), both(indexer_loss, attention, indexer))


def test_equal_distributions_have_loss_0() -> None:
    """An indexer with attention's own scores, all of them positive."""
    torch.manual_seed(0)
    q, k = torch.rand(1, 1, 9, 4, dtype=torch.float64), torch.rand(1, 1, 9, 4, dtype=torch.float64)
    weights = torch.full((1, 1, 9), 0.5, dtype=torch.float64)
    for lists in ([], [torch.arange(9).expand(1, 1, 9, 9)]):
        assert indexer_loss(q, k, q, k[:, 0], weights, *lists).abs().max() < 1e-15


@pytest.mark.parametrize("sparse", [False, True])
def test_derivatives(sparse: bool) -> None:
    attention, indexer = inputs(1, 1, 2, 2, 4, 5, 3, 2)
    lists = [torch.tensor([[0, 1], [2, -1], [3, 0], [4, 4]])[None, None]] if sparse else []

    def loss(*indexer: Tensor) -> Tensor:
        return indexer_loss(*attention, *indexer, *lists)

    assert gradcheck(loss, indexer)
    assert gradgradcheck(loss, indexer)


@pytest.mark.parametrize("sparse", [False, True])
def test_transforms(sparse: bool) -> None:
    attention, indexer = inputs(2, 1, 2, 2, 9, 9, 3, 2)
    leaves = tuple(t.detach() for t in indexer)

    def loss(*indexer: Tensor) -> Tensor:
        return indexer_loss(*attention, *indexer, *([top_keys(*indexer, 4)] if sparse else [])).sum()

    expected = grad(loss(*indexer), indexer)
    assert_equal(torch.func.grad(loss, argnums=(0, 1, 2))(*leaves), expected)
    along = sum((g * t).sum() for g, t in zip(expected, leaves, strict=True))
    assert_close(torch.func.jvp(loss, leaves, leaves)[1], along)
    assert_equal(grad(graph_of(loss)(*indexer), indexer), expected)


def test_attention_has_no_gradient() -> None:
    attention, indexer = inputs(1, 1, 2, 2, 4, 5, 3, 2)
    q, k = (t.requires_grad_() for t in attention)
    indexer_loss(q, k, *indexer).sum().backward()
    assert q.grad is None
    assert k.grad is None
    assert not indexer_loss(q, k, *(t.detach() for t in indexer)).requires_grad


@pytest.mark.parametrize("sparse", [False, True])
def test_hidden_keys_have_no_effect(sparse: bool) -> None:
    """NaN and infinity in keys that no query sees change neither losses nor gradients."""
    (q, k), (index_q, index_k, weights) = inputs(1, 1, 2, 2, 8, 8, 4, 4)
    lists = [torch.tensor([0, 7, 2, -1]).expand(1, 1, 8, 4)] if sparse else []
    results = []
    for value in (1.0, math.nan, math.inf):
        keys, index_keys = k.clone(), index_k.detach().clone()
        keys[:, :, 6:] = index_keys[:, 6:] = value
        leaves = tuple(t.detach().requires_grad_() for t in (index_q, index_keys, weights))
        results.append(both(indexer_loss, (q, keys), leaves, *lists, q_offset=-2))
        assert all(t.isfinite().all() for t in results[-1])
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])

    def loss(*indexer: Tensor) -> Tensor:
        return indexer_loss(q, k, *indexer, *lists, q_offset=-2).sum()

    leaves = (index_q, index_keys.masked_fill(index_keys.isinf(), math.nan).requires_grad_(), weights)
    expected = grad(loss(*leaves), leaves)
    assert_close(torch.func.grad(loss, argnums=(0, 1, 2))(*(t.detach() for t in leaves)), expected)
    assert_close(grad(graph_of(loss)(*leaves), leaves), expected)
    found = indexer_loss(q, k, index_q, leaves[1], weights)
    assert found.isnan().tolist() == [[False] * 6 + [True] * 2], "NaN that a query sees is in its loss"


@pytest.mark.parametrize("sparse", [False, True])
def test_a_key_that_some_queries_see(sparse: bool) -> None:
    """NaN in the last key reaches the last query alone: neither the losses nor the gradients of those before it."""
    attention, indexer = inputs(1, 1, 2, 2, 8, 8, 4, 4)
    lists = [torch.arange(8).expand(1, 1, 8, 8)] if sparse else []
    losses, of_q, _, of_weights = both(indexer_loss, attention, indexer, *lists)
    with torch.no_grad():
        indexer[1][:, 7] = math.nan
    found = both(indexer_loss, attention, indexer, *lists)
    assert_close(
        (found[0][:, :7], found[1][:, :, :7], found[3][:, :, :7]), (losses[:, :7], of_q[:, :, :7], of_weights[:, :, :7])
    )
    assert found[0][:, 7:].isnan().all()


def test_nothing_of_a_block_is_saved() -> None:
    """Backward computes it again."""
    attention, indexer = inputs(1, 1, 2, 2, 512, 512, 4, 4, dtype=torch.float32)
    saved = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t.untyped_storage().nbytes())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        indexer_loss(*attention, *indexer)
    assert sum(saved) < 512 * 512


def test_queries_without_keys() -> None:
    attention, indexer = inputs(1, 1, 1, 2, 6, 3, 4, 4)
    losses, *gradients = both(indexer_loss, attention, indexer)
    assert (losses[:, :4] == 0).all()  # three see no key, one sees one
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[0][:, :, :4] == 0).all()


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_to_sum(batch: int, seqlen_q: int, seqlen_k: int) -> None:
    attention, indexer = inputs(batch, 1, 2, 2, seqlen_q, seqlen_k, 4, 4)
    lists = torch.full((batch, 1, seqlen_q, 2), -1)
    for given in ([], [lists]):
        losses, *gradients = both(indexer_loss, attention, indexer, *given)
        assert_equal(losses, torch.zeros(batch, seqlen_q, dtype=torch.float64))
        assert all((g == 0).all() for g in gradients)


@pytest.mark.parametrize("sparse", [False, True])
def test_threads_change_no_bit(sparse: bool) -> None:
    """The gradient of index_k is a sum over queries and heads, which MKL divides among threads on some CPUs."""
    attention, indexer = inputs(2, 2, 2, 4, 200, 200, 32, 16, dtype=torch.float32)
    lists = [top_keys(*indexer, 32)] if sparse else []

    def call() -> tuple[torch.Tensor, ...]:
        losses, dq, dk, dweights = both(indexer_loss, attention, indexer, *lists)
        dks.append(dk)
        return losses, dq, dweights

    dks: list[torch.Tensor] = []
    assert_threads_change_no_bit(call)
    for dk in dks[1:]:
        torch.testing.assert_close(dk, dks[0], rtol=0, atol=2e-6 * dks[0].abs().max().item())


def test_memory_is_linear() -> None:
    """Forward and backward: nothing beyond a block, and with lists the lists."""
    attention, indexer = inputs(1, 1, 2, 2, 4096, 4096, 4, 4, dtype=torch.float32)
    for lists in ([], [top_keys(*indexer, 16)]):
        with Largest() as largest:
            indexer_loss(*attention, *indexer, *lists).sum().backward()
        assert largest.bytes <= 8 * divergence.NUMBERS_AT_ONCE < 4096 * 4096 * 4


def test_autocast() -> None:
    """The loss of the tensors in autocast's dtype, with sums in float32."""
    attention, indexer = inputs(1, 1, 2, 2, 20, 20, 8, 8, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = both(indexer_loss, attention, indexer)
    q, k, index_q, index_k = (t.detach().bfloat16() for t in (*attention, *indexer[:2]))
    assert_equal(found[0], indexer_loss(q, k, index_q, index_k, indexer[2].detach()))


def test_training_lowers_it() -> None:
    attention, indexer = inputs(1, 1, 2, 4, 64, 64, 8, 8, dtype=torch.float32)
    optimizer = torch.optim.Adam(indexer, lr=0.05)
    losses = []
    for _ in range(60):
        loss = indexer_loss(*attention, *indexer).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 5


REFUSALS: Refusals = [
    ({"q": torch.zeros(2, 3, 5, 4)}, ValueError, "num_heads_q must be a multiple of num_heads_kv, got 3 and 2"),
    (
        {"index_q": torch.zeros(2, 3, 8)},
        ValueError,
        "index_q must be (batch, indexer_heads, seqlen_q, indexer_dim), got",
    ),
    ({"index_k": torch.zeros(2, 6, 7)}, ValueError, "index_k must have index_q's batch and indexer_dim, got (2, 6, 7)"),
    (
        {"index_k": torch.zeros(2, 7, 8)},
        ValueError,
        "index_q and index_k must have the batch, seqlen_q and seqlen_k of",
    ),
    ({"index_weights": torch.zeros(2, 3, 1)}, ValueError, "index_weights must have shape (2, 3, 5), got (2, 3, 1)"),
    (
        {"index_weights": torch.zeros(2, 3, 5).half()},
        TypeError,
        "index_weights must have dtype float32, got torch.float16",
    ),
    ({"selected": [0]}, TypeError, "selected must be Tensor, got [0]"),
    ({"selected": torch.zeros(2, 1, 5, 3)}, TypeError, "selected must have dtype int32 or int64, got torch.float32"),
    (
        {"selected": torch.zeros(2, 2, 5, 3).long()},
        ValueError,
        "selected must have shape (2, 1, 5, n), got (2, 2, 5, 3)",
    ),
    (
        {"selected": torch.zeros(2, 5, 3).long()},
        ValueError,
        "selected must be (batch, 1, seqlen_q, n), got shape (2, 5, 3)",
    ),
    ({"selected": torch.full((2, 1, 5, 3), 6)}, ValueError, "selected must be between -1 and 5, got 6 at (0, 0, 0, 0)"),
    (
        {"selected": torch.full((2, 1, 5, 3), -2)},
        ValueError,
        "selected must be between -1 and 5, got -2 at (0, 0, 0, 0)",
    ),
    ({"softmax_scale": "1"}, TypeError, "softmax_scale must be int or float or NoneType, got '1'"),
    ({"softmax_scale": math.nan}, ValueError, "softmax_scale must be finite, got nan"),
    ({"causal": None}, TypeError, "causal must be bool, got None"),
    ({"q_offset": torch.zeros(3).long()}, ValueError, "q_offset must have shape (2,), got (3,)"),
]


@each_refusal(REFUSALS)
def test_refused(changes: dict[str, object], kind: type[Exception], message: str) -> None:
    arguments: dict[str, object] = {
        "q": torch.zeros(2, 4, 5, 4),
        "k": torch.zeros(2, 2, 6, 4),
        "index_q": torch.zeros(2, 3, 5, 8),
        "index_k": torch.zeros(2, 6, 8),
        "index_weights": torch.zeros(2, 3, 5),
    }
    with refused(kind, message):
        pyattn.selection.indexer_loss(**arguments | changes)  # type: ignore[arg-type]


def test_a_change_in_place_before_backward_raises() -> None:
    q, k = torch.randn(2, 1, 2, 6, 8)
    index_q, index_k, weights = torch.randn(1, 2, 6, 4), torch.randn(1, 6, 4), torch.randn(1, 2, 6)
    loss = indexer_loss(q, k, index_q, index_k, weights.requires_grad_())
    index_q.zero_()
    with pytest.raises(RuntimeError, match=r"^pyattn: .* modified by an inplace operation"):
        loss.sum().backward()
