"""Promise: attention over a cache whose keys lie on several ranks is attention over one cache of all keys."""

from random import Random
from typing import Any

import pytest
import torch
from distributed import decoding
from distributed.pool import pool
from helpers import seeded

from pyattn import attention, attention_with_cache

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")


def drawn(draw: Random, batch: int, heads: int, seqlen_q: int, lengths: torch.Tensor) -> dict[str, Any]:
    """Each option in some of the cases."""
    total, options = lengths.sum(0), dict[str, Any]()
    if draw.random() < 0.3:
        options["causal"] = False
    if draw.random() < 0.4:
        options["window"] = draw.choice((0, 4, 20)), draw.choice((-1, 0, 2))
    if draw.random() < 0.3:
        options["q_offset"] = draw.choice((0, 9, total // 2))
    if draw.random() < 0.3:
        ends = (torch.rand(batch, seqlen_q, 4) * (total + 1)[:, None, None]).long().sort(-1).values
        options["key_ranges"] = draw.choice((ends[..., :2], ends.unflatten(-1, (2, 2))))
    if draw.random() < 0.3:
        options["alibi_slopes"] = torch.rand(heads).double()
        options["relative_bias"] = torch.randn(heads, 21).double()
    if draw.random() < 0.3:
        options["sinks"] = torch.randn(heads).double()
    if draw.random() < 0.3:
        options["softcap"] = 2.0
    if draw.random() < 0.3:
        options["mask"] = torch.rand(batch, 1, seqlen_q, int(total.max())) < 0.7
    if draw.random() < 0.3:
        options["bias"] = torch.randn(batch, heads, seqlen_q, int(total.max())).double()
    return options


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_as_one_cache(size: int) -> None:
    """Random lengths by rank and sequence, some 0; every second rank has pages."""
    draw = Random(size)
    for _ in range(10):
        seeded(draw.getrandbits(32))
        batch, heads_kv, group, seqlen_q = (
            draw.choice((1, 3)),
            draw.choice((1, 2)),
            draw.choice((1, 3)),
            draw.choice((1, 4)),
        )
        lengths = torch.tensor([[draw.choice((0, 1, 7, 20)) for _ in range(batch)] for _ in range(size)])
        lengths[-1] += seqlen_q
        total, most = lengths.sum(0), int(lengths.sum(0).max())
        q = torch.randn(batch, heads_kv * group, seqlen_q, 8).double()
        k, v = torch.randn(batch, heads_kv, most, 8).double(), torch.randn(batch, heads_kv, most, 5).double()
        options = drawn(draw, batch, heads_kv * group, seqlen_q, lengths)
        one = {
            name: torch.nn.functional.pad(t, (0, 3)) if name in ("mask", "bias") else t for name, t in options.items()
        }
        one.setdefault("q_offset", total - seqlen_q)
        expected = attention_with_cache(q, decoding.filled(k, v, total, None), return_lse=True, **one)
        for found in pool().run(size, decoding.decoded, q, k, v, lengths, options):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=str(options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_token_by_token(dtype: torch.dtype) -> None:
    """A text that is continued gives every rank the same bits; its errors are at most twice those of one call."""
    seeded(0)
    q, k, v = torch.randn(3, 2, 4, 40, 16).to(dtype)
    exact, one = (attention(*(t.to(of) for t in (q, k, v)))[:, :, 33:].double() for of in (torch.float64, dtype))
    first, *others = (torch.cat(found, 2) for found in pool().run(3, decoding.continued, k, v, q, 33))
    assert all(torch.equal(first, other) for other in others)
    assert (first - exact).abs().max() <= 2 * (one - exact).abs().max()


ONE = torch.zeros(1, 2, 1, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {1: {"softcap": 2.0}},
            "ValueError: pyattn: softcap must be the same on all ranks, got 0.0 on rank 0 and 2.0 on",
        ),
        ({0: {"q": torch.zeros(1, 2, 2, 4)}}, "ValueError: pyattn: shape of q must be the same on all ranks, got "),
        (
            {r: {"dropout_p": 0.5} for r in range(3)},
            "NotImplementedError: pyattn: dropout over caches on several ranks is not",
        ),
        (
            {r: {"sinks": torch.zeros(2, requires_grad=True)} for r in range(3)},
            "NotImplementedError: pyattn: attention_with_",
        ),
        (
            {r: {"q": ONE[..., :3]} for r in range(3)},
            "ValueError: pyattn: q must have the cache's head_dim, got 3 and 4",
        ),
        (
            {r: {"key_ranges": torch.tensor([[[5, 2]]])} for r in range(3)},
            "ValueError: pyattn: key_ranges must hold 0 <= begin",
        ),
        (
            {r: {"key_ranges": torch.tensor([[[0, 10]]])} for r in range(3)},
            "ValueError: pyattn: key_ranges must hold 0 <= begin <= end <= seqlen_k = 9, got [0, 10]",
        ),
    ],
    ids=["option", "queries", "dropout", "gradient", "columns", "reversed", "beyond"],
)
def test_refusals(changes: dict[int, dict[str, Any]], message: str) -> None:
    errors = pool().run(3, decoding.refusal, changes, None)
    assert all(error.startswith(message) for error in errors), errors


def test_an_error_of_one_rank_reaches_all() -> None:
    """Also one that shows only when the rank computes; a ring buffer, which all have, names itself."""
    masks = {rank: {"mask": torch.ones(1, 1, 1, 5 if rank == 1 else 8).bool()} for rank in range(3)}
    errors = pool().run(3, decoding.refusal, masks, None)
    assert errors[1].startswith("ValueError: pyattn: mask ")
    assert (
        errors[0]
        == errors[2]
        == "ValueError: pyattn: attention_with_cache failed on rank 1: " + errors[1].partition("pyattn: ")[2]
    )
    errors = pool().run(2, decoding.refusal, {}, (3, 0))
    assert all(error.startswith("NotImplementedError: pyattn: a ring buffer ") for error in errors)
