"""Promise: top_blocks returns the blocks whose means score highest, the own and the first one before them if asked."""

import math
from random import Random

import pytest
import torch
from support.assertions import Refusals, assert_threads_change_no_bit, check_examples, each_refusal, refused
from support.cases import assert_equal
from support.selection import Largest, grid, strided
from torch import Tensor

from pyattn import reference
from pyattn.selection import ranking, top_blocks

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def test_random_calls(request: pytest.FixtureRequest) -> None:
    """Blocks of a power of two: means and scores are exact, so ties are."""

    def check(random: Random) -> None:
        batch, group, heads = random.choice([0, 1, 2]), random.choice([1, 2, 4]), random.choice([1, 2])
        seqlen_q, seqlen_k, dim = random.choice([0, 1, 7, 40]), random.choice([1, 9, 64, 100]), random.choice([1, 8])
        block = random.choice([1, 2, 4, 16, 128])
        generator, dtype = torch.Generator().manual_seed(random.randrange(1000)), random.choice(DTYPES)
        q = grid((batch, group * heads, seqlen_q, dim), generator, dtype)
        tail = seqlen_k % block
        k = grid((batch, heads, seqlen_k, dim), generator, dtype)
        if tail & (tail - 1):  # the last block's mean would be rounded
            k = k[:, :, : seqlen_k - tail]
        n = random.choice([0, 1, 2, 3, 20])
        options: dict[str, object] = {name: random.random() < 0.6 for name in ("causal", "own", "first")}
        if random.random() < 0.4:
            options["q_offset"] = random.choice([-(2**63), -50, -3, 0, 5, 250, 2**63 - 1])
        found = top_blocks(strided(q, random), strided(k, random), block, n, **options)  # type: ignore[arg-type]
        assert found.dtype == torch.int32
        if not k.shape[2]:
            assert (found == -1).all()
            return
        if abs(options.get("q_offset", 0)) > 2**62:  # type: ignore[arg-type]
            options["q_offset"] = 10**6 if options["q_offset"] > 0 else -(10**6)  # type: ignore[operator]
        assert_equal(found, reference.selection.top_blocks(q.double(), k.double(), block, n, **options))  # type: ignore[arg-type]

    check_examples(request, 150, check)


def test_offset_of_each_sequence() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(3, 4, 6, 8), torch.randn(3, 2, 50, 8)
    offsets = torch.tensor([-2, 20, 60])
    found = top_blocks(q, k, 8, 3, q_offset=offsets)
    for b, offset in enumerate(offsets.tolist()):
        assert_equal(found[b : b + 1], top_blocks(q[b : b + 1], k[b : b + 1], 8, 3, q_offset=offset))
    assert (found[0, :, :2] == -1).all()
    assert (found[2, :, :, 0] == 0).all(), "no own block past the keys"


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_beside_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    q, k = torch.randn(2, 6, 50, 24).to(dtype), torch.randn(2, 2, 1003, 24).to(dtype)
    found = top_blocks(q, k, 10, 7, own=False, first=False).long()
    means = torch.stack([part.mean(2) for part in k.double().split(10, 2)], 2)
    scores = (q.double().unflatten(1, (2, 3)).sum(2)) @ means.mT
    hidden = torch.arange(101) * 10 > torch.arange(50)[:, None] + 953
    best = scores.masked_fill(hidden, -math.inf).sort(-1, descending=True).values[..., :7]
    error = 1e-13 if dtype == torch.float64 else 1e-5
    assert (scores.gather(-1, found) - best).abs().max() < error * scores.abs().max()


def test_the_own_block_then_the_first() -> None:
    """Whatever their scores, infinite and NaN ones of others included; n=1 is the own block."""
    k = torch.tensor([-5.0, 1.0, math.inf, math.nan, -9.0])[None, None, :, None]
    q = torch.ones(1, 1, 5, 1)
    assert top_blocks(q, k, 1, 4)[0, 0].tolist() == [
        [0, -1, -1, -1],
        [1, 0, -1, -1],
        [2, 0, 1, -1],
        [3, 0, 2, 1],
        [4, 0, 2, 1],
    ]
    assert top_blocks(q, k, 1, 1)[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4]
    assert top_blocks(q, k, 1, 5, own=False, first=False)[0, 0, 4].tolist() == [2, 1, 0, 4, 3]
    assert top_blocks(q, k, 1, 6, own=False, causal=False)[0, 0, 0].tolist() == [0, 2, 1, 4, 3, -1]


def test_mean_of_the_last_block() -> None:
    """It has two keys, and the mean is not that of three."""
    k = torch.tensor([2.0, 2.0, 2.0, 2.5, 2.5])[None, None, :, None]
    assert top_blocks(torch.ones(1, 1, 1, 1), k, 3, 2, own=False, first=False).flatten().tolist() == [1, 0]


def test_threads_change_no_bit() -> None:
    torch.manual_seed(2)
    for heads, seqlen_q, seqlen_k, dim in ((1, 1, 5000, 64), (2, 7, 777, 33), (3, 300, 3000, 100)):
        q, k = torch.randn(1, 2 * heads, seqlen_q, dim), torch.randn(1, heads, seqlen_k, dim)
        assert_threads_change_no_bit(
            lambda q=q, k=k: [top_blocks(q, k, 10, 20), top_blocks(q.half(), k.half(), 64, 20)]
        )  # type: ignore[misc]


def test_memory_is_linear() -> None:
    q, k = torch.zeros(1, 2, 8192, 4), torch.zeros(1, 1, 8192, 4)
    with Largest() as largest:
        top_blocks(q, k, 2, 8)
    assert largest.bytes <= 8 * ranking.SCORES_AT_ONCE


def test_no_heads_no_gradient() -> None:
    assert top_blocks(torch.zeros(2, 0, 3, 4), torch.zeros(2, 0, 5, 4), 2, 3).shape == (2, 0, 3, 3)
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    assert not top_blocks(q, q, 2, 2).requires_grad


REFUSALS: Refusals = [
    ({"k": 3}, TypeError, "k must be Tensor, got 3"),
    (
        {"q": torch.zeros(4, 5, 8)},
        ValueError,
        "q must be (batch, num_heads_q, seqlen_q, head_dim), got shape (4, 5, 8)",
    ),
    ({"k": torch.zeros(2, 3, 9, 8)}, ValueError, "num_heads_q must be a multiple of num_heads_kv, got 4 and 3"),
    ({"k": torch.zeros(2, 0, 9, 8)}, ValueError, "num_heads_q must be a multiple of num_heads_kv, got 4 and 0"),
    (
        {"k": torch.zeros(2, 2, 9, 7)},
        ValueError,
        "k must have q's batch and head_dim, got (2, 2, 9, 7) and (2, 4, 5, 8)",
    ),
    ({"k": torch.zeros(2, 2, 9, 8).double()}, TypeError, "k must have dtype float32, got torch.float64"),
    ({"q": torch.zeros(2, 4, 5, 8).cfloat()}, TypeError, "q must have dtype float16 or bfloat16 or float32 or float64"),
    ({"k": torch.zeros(2, 2, 9, 8, device="meta")}, ValueError, "k must be on q's device, got meta and cpu"),
    ({"block": 0}, ValueError, "block must be at least 1, got 0"),
    ({"block": True}, TypeError, "block must be int, got True"),
    ({"n": -1}, ValueError, "n must be at least 0, got -1"),
    ({"own": None}, TypeError, "own must be bool, got None"),
    ({"first": 1}, TypeError, "first must be bool, got 1"),
    ({"q_offset": torch.zeros(2, 1).long()}, ValueError, "q_offset must have 1 dimension, got shape (2, 1)"),
]


@each_refusal(REFUSALS)
def test_refused(changes: dict[str, object], kind: type[Exception], message: str) -> None:
    arguments: dict[str, object] = {"q": torch.zeros(2, 4, 5, 8), "k": torch.zeros(2, 2, 9, 8), "block": 2, "n": 2}
    with refused(kind, message):
        top_blocks(**arguments | changes)  # type: ignore[arg-type]


def grouped(k: Tensor) -> Tensor:
    return k.repeat_interleave(2, 1)


def test_heads_of_a_group_add_up() -> None:
    """Two query heads of a KV head select as one head with their sum."""
    torch.manual_seed(3)
    q, k = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 40, 8)
    summed = q.unflatten(1, (2, 2)).sum(2)
    assert_equal(top_blocks(q, k, 4, 5), top_blocks(summed, k, 4, 5))
    assert_equal(
        top_blocks(q, grouped(k), 4, 5),
        torch.cat([top_blocks(q[:, h : h + 1], grouped(k)[:, h : h + 1], 4, 5) for h in range(4)], 1),
    )
