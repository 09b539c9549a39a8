"""Promise: top_keys returns the keys with the indexer's largest scores, in its order, in linear memory."""

import math
from random import Random

import pytest
import torch
from support.assertions import Refusals, assert_threads_change_no_bit, check_examples, each_refusal, graph_of, refused
from support.cases import assert_equal
from support.selection import Largest, grid, strided
from torch import Tensor
from torch.func import jacrev, jvp, vmap

from pyattn import KVCache, reference
from pyattn.selection import keys, ranking, top_keys

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def inputs(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and weights of batch, heads, seqlen_q, seqlen_k and dim; on a grid, whose scores tie exactly."""
    batch, heads, seqlen_q, seqlen_k, dim = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, seqlen_q, dim), (batch, seqlen_k, dim), (batch, heads, seqlen_q)
    q, k, weights = (grid(shape, generator, dtype) for shape in shapes)
    return q, k, weights


def expected(q: Tensor, k: Tensor, weights: Tensor, n: int, **options: object) -> Tensor:
    return reference.selection.top_keys(q.double(), k.double(), weights.double(), n, **options)  # type: ignore[arg-type]


def test_random_calls(request: pytest.FixtureRequest) -> None:
    """All shapes, dtypes, strides, offsets and lengths, with many ties: numbers on a grid have exact scores."""

    def check(random: Random) -> None:
        sizes = [random.choice(s) for s in ((0, 1, 2, 3), (1, 1, 2, 5, 16), (0, 1, 7, 40), (0, 1, 9, 300), (0, 1, 8))]
        dtype = random.choice(DTYPES)
        q, k, weights = inputs(*sizes, seed=random.randrange(1000), dtype=dtype)
        n = random.choice([0, 1, 3, 16, sizes[3], sizes[3] + 2])
        options: dict[str, object] = {"causal": random.random() < 0.7}
        if random.random() < 0.5:
            offsets = [random.choice([-(2**63), -50, -3, 0, 5, 250, 2**63 - 1]) for _ in range(sizes[0])]
            options["q_offset"] = torch.tensor(offsets, dtype=torch.int64) if random.random() < 0.5 else 4
        if random.random() < 0.5:
            options["k_lengths"] = torch.tensor([random.randint(0, sizes[3]) for _ in range(sizes[0])]).long()
        wide = weights.float() if dtype.itemsize == 2 and random.random() < 0.5 else weights
        found = top_keys(strided(q, random), strided(k, random), strided(wide, random), n, **options)  # type: ignore[arg-type]
        assert found.dtype == torch.int32
        assert_equal(found, expected(q, k, weights, n, **options))

    check_examples(request, 150, check)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_beside_float64(dtype: torch.dtype) -> None:
    """Normal numbers: what is returned scores at least as high, up to rounding, as the true n-th key."""
    torch.manual_seed(1)
    q, k, weights = torch.randn(2, 8, 50, 24), torch.randn(2, 600, 24), torch.randn(2, 8, 50)
    q, k, weights = q.to(dtype), k.to(dtype), weights.to(dtype)
    found = top_keys(q, k, weights, 40).long()[:, 0]
    scores = reference.selection.index_scores(q.double(), k.double(), weights.double())
    hidden = ~reference.visible(50, 600)
    best = scores.masked_fill(hidden, -math.inf).sort(-1, descending=True).values[..., :40]
    error = 1e-13 if dtype == torch.float64 else 1e-5
    assert (scores.gather(-1, found) - best).abs().max() < error * scores.abs().max()
    assert not hidden.expand(scores.shape).gather(-1, found).any()
    assert (found.sort(-1).values.diff(dim=-1) > 0).all()


def test_16_bits_are_summed_in_float32() -> None:
    """257 is no bfloat16: sums in 16 bits would tie."""
    q, k = torch.ones(1, 1, 1, 257, dtype=torch.bfloat16), torch.ones(1, 2, 257, dtype=torch.bfloat16)
    k[0, 0, -1] = 0
    weights = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    assert top_keys(q, k, weights, 1).item() == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert top_keys(q.float(), k.float(), weights.float(), 1).item() == 1


def test_ties_go_to_the_lower_key() -> None:
    """Also between 0.0 and -0.0, and across the blocks of keys."""
    q, k = torch.ones(1, 1, 1, 1), -torch.ones(1, 1000, 1)
    for weight in (1.0, -1.0):
        assert top_keys(q, k, torch.full((1, 1, 1), weight), 999)[0, 0, 0].tolist() == list(range(999))
    k = torch.arange(1000.0).remainder(2)[None, :, None]
    assert top_keys(q, k, torch.ones(1, 1, 1), 501)[0, 0, 0].tolist() == [*range(1, 1000, 2), 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_that_are_not_finite(dtype: torch.dtype) -> None:
    """NaN counts as -inf; after the last visible key it has no effect."""
    q, weights = torch.ones(1, 1, 1, 1, dtype=dtype), torch.ones(1, 1, 1, dtype=dtype)
    k = torch.tensor([math.nan, 1.0, math.inf, -1.0, math.nan, 2.0], dtype=dtype)[None, :, None]
    assert top_keys(q, k, weights, 6)[0, 0, 0].tolist() == [2, 5, 1, 3, 0, 4]
    assert top_keys(q, k, -weights, 7)[0, 0, 0].tolist() == [3, 1, 5, 0, 2, 4, -1]
    assert top_keys(q, k, weights, 3, q_offset=1)[0, 0, 0].tolist() == [1, 0, -1]
    assert top_keys(q, k, weights, 2, k_lengths=[4])[0, 0, 0].tolist() == [2, 1]
    assert top_keys(q * math.nan, k, weights, 7)[0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, -1]


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 3000, 64), (1, 7, 1, 700, 33), (2, 3, 301, 520, 100), (1, 64, 40, 800, 17)]
)
def test_threads_and_blocks_change_no_bit(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of the same bits, and therefore the same keys."""
    batch, heads, seqlen_q, seqlen_k, dim = sizes
    torch.manual_seed(2)
    q, k = torch.randn(batch, heads, seqlen_q, dim), torch.randn(batch, seqlen_k, dim)
    weights = torch.randn(batch, heads, seqlen_q)

    def call() -> tuple[Tensor, ...]:
        scores = keys.index_scores(q[0], k[0], weights[0], seqlen_k)
        return scores[:, :seqlen_k], top_keys(q, k, weights, 100), top_keys(q.bfloat16(), k.bfloat16(), weights, 100)

    assert_threads_change_no_bit(call)
    whole = call()
    for rows in (16, 48):  # not other KEYS_AT_ONCE: on some CPUs MKL sums products of fewer keys in another order
        monkeypatch.setattr(ranking, "ROWS_AT_ONCE", rows)
        assert_equal(call(), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_memory_is_linear(dtype: torch.dtype) -> None:
    """The largest tensor is the result, or a block of scores in int64."""
    q, k, weights = (torch.zeros(shape, dtype=dtype) for shape in ((1, 2, 8192, 4), (1, 8192, 4), (1, 2, 8192)))
    with Largest() as largest:
        top_keys(q, k, weights, 8)
    assert largest.bytes <= 8 * ranking.SCORES_AT_ONCE < 8192 * 8192


def test_cache_of_an_indexer() -> None:
    """Step by step over a cache, ragged, as over all keys at once."""
    q, k, weights = inputs(2, 4, 60, 60, 8)
    whole = top_keys(q, k, weights, 12)
    cache = KVCache(2, 1, 64, 8, head_dim_v=8, shared_values=True)
    cache.append(k[:, None, :50])
    assert_equal(
        top_keys(q[:, :, :50], cache.k[:, 0], weights[:, :, :50], 12, k_lengths=cache.lengths), whole[:, :, :50]
    )
    for i in range(50, 60):
        cache.append(k[:, None, i : i + 1])
        step = slice(i, i + 1)
        found = top_keys(q[:, :, step], cache.k[:, 0], weights[:, :, step], 12, k_lengths=cache.lengths)
        assert_equal(found, whole[:, :, step])


def test_no_gradient() -> None:
    q, k, weights = (t.requires_grad_() for t in inputs(1, 2, 5, 5, 4))
    assert not top_keys(q, k, weights, 2).requires_grad
    with torch.inference_mode():
        assert_equal(top_keys(q, k, weights, 2), expected(q.detach(), k.detach(), weights.detach(), 2))


def test_transforms() -> None:
    """Selection inside a function that is differentiated or compiled; vmap is refused."""
    q, k, weights = inputs(2, 2, 9, 9, 4)
    chosen = top_keys(q, k, weights, 3)

    def function(q: Tensor) -> Tensor:
        return top_keys(q, k, weights, 3) * q.square().sum()

    assert_equal(jacrev(function)(q), chosen[..., None, None, None, None] * 2 * q)
    assert_equal(jvp(function, (q,), (q,)), (chosen * q.square().sum(), chosen * 2 * q.square().sum()))
    assert_equal(graph_of(lambda q: top_keys(q, k, weights, 3))(q), chosen)
    with refused(
        NotImplementedError, "q must hold the batch as its first dimension, got a tensor that torch.func.vmap"
    ):
        vmap(lambda q: top_keys(q[None], k[:1], weights[:1], 3))(q)


REFUSALS: Refusals = [
    ({"q": None}, TypeError, "q must be Tensor, got None"),
    (
        {"q": torch.zeros(2, 3, 5)},
        ValueError,
        "q must be (batch, indexer_heads, seqlen_q, indexer_dim), got shape (2, 3",
    ),
    ({"k": torch.zeros(2, 1, 6, 8)}, ValueError, "k must be (batch, seqlen_k, indexer_dim), got shape (2, 1, 6, 8)"),
    ({"k": torch.zeros(2, 6, 7)}, ValueError, "k must have q's batch and indexer_dim, got (2, 6, 7) and (2, 3, 5, 8)"),
    ({"k": torch.zeros(1, 6, 8)}, ValueError, "k must have q's batch and indexer_dim, got (1, 6, 8) and (2, 3, 5, 8)"),
    ({"weights": torch.zeros(2, 3, 1)}, ValueError, "weights must have shape (2, 3, 5), got (2, 3, 1)"),
    ({"weights": torch.zeros(2, 3, 5, 1)}, ValueError, "weights must be (batch, indexer_heads, seqlen_q), got shape"),
    (
        {"q": torch.zeros(2, 3, 5, 8).long()},
        TypeError,
        "q must have dtype float16 or bfloat16 or float32 or float64, got",
    ),
    ({"k": torch.zeros(2, 6, 8).half()}, TypeError, "k must have dtype float32, got torch.float16"),
    ({"weights": torch.zeros(2, 3, 5).double()}, TypeError, "weights must have dtype float32, got torch.float64"),
    ({"k": torch.zeros(2, 6, 8, device="meta")}, ValueError, "k must be on q's device, got meta and cpu"),
    ({"weights": torch.zeros(2, 3, 5, device="meta")}, ValueError, "weights must be on q's device, got meta and cpu"),
    ({"k": torch.zeros(2, 6, 8).to_sparse()}, NotImplementedError, "k must be a dense tensor, got layout"),
    ({"n": -1}, ValueError, "n must be at least 0, got -1"),
    ({"n": 2.0}, TypeError, "n must be int, got 2.0"),
    ({"n": 2**62}, ValueError, "batch * seqlen_q * n must be below"),
    ({"causal": 1}, TypeError, "causal must be bool, got 1"),
    ({"q_offset": 1.0}, TypeError, "q_offset must be int or Tensor, got 1.0"),
    ({"q_offset": 2**63}, ValueError, "q_offset must fit in 64 bits"),
    ({"q_offset": torch.zeros(3).long()}, ValueError, "q_offset must have shape (2,), got (3,)"),
    ({"q_offset": torch.zeros(2)}, TypeError, "q_offset must be int32 or int64, got torch.float32"),
    ({"k_lengths": torch.zeros(3).long()}, ValueError, "k_lengths must have shape (2,), got (3,)"),
    ({"k_lengths": [0, 7]}, ValueError, "each of k_lengths must be between 0 and 6, got 7 at 1"),
    ({"offset": 1}, TypeError, "top_keys has no argument offset (did you mean q_offset?)"),
]


@each_refusal(REFUSALS)
def test_refused(changes: dict[str, object], kind: type[Exception], message: str) -> None:
    arguments = {"q": torch.zeros(2, 3, 5, 8), "k": torch.zeros(2, 6, 8), "weights": torch.zeros(2, 3, 5), "n": 2}
    with refused(kind, message):
        top_keys(**arguments | changes)  # type: ignore[arg-type]
