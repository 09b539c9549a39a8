"""Promise: attention over a cache whose keys lie on several ranks is attention over one cache of all keys."""

from random import Random
from typing import Any

import pytest
import torch
from support.cases import assert_equal, run, seeded
from support.ranks import decoding
from support.ranks.pool import pool
from support.yardstick import Yardsticks, in_double

from pyattn import KVCache, attention, attention_with_cache, reference
from pyattn.cache.slots import masks_in_first_slots

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")


def drawn(
    draw: Random, batch: int, heads: int, seqlen_q: int, lengths: torch.Tensor, dtype: torch.dtype
) -> dict[str, Any]:
    """Each option in some of the cases."""
    total, options = lengths.sum(0), dict[str, Any]()
    most = int(total.max())
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
        options["alibi_slopes"] = torch.rand(heads).to(dtype)
        options["relative_bias"] = torch.randn(heads, 21).to(dtype)
    if draw.random() < 0.3:
        options["sinks"] = torch.randn(heads).to(dtype)
    if draw.random() < 0.3:
        options["softcap"] = 2.0
    if draw.random() < 0.5:  # columns of all keys, or of the queries' own
        options["mask"] = torch.rand(batch, 1, seqlen_q, draw.choice((most, seqlen_q))) < 0.7
    if draw.random() < 0.4:
        options["bias"] = torch.randn(batch, heads, seqlen_q, draw.choice((most, most, 1))).to(dtype)
    if draw.random() < 0.4:
        options |= {"dropout_p": 0.3, "dropout_seed": draw.getrandbits(60)}
    return options


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_as_one_cache(size: int) -> None:
    """Random lengths by rank and sequence, some 0; every second rank has pages. All ranks get the same bits.

    float64 beside one process, bfloat16 by the rule of yardstick.py.
    """
    draw = Random(size)
    for _ in range(16):
        seeded(draw.getrandbits(32))
        dtype, batch, heads_kv, group, seqlen_q = (
            draw.choice(choices) for choices in ((torch.float64, torch.bfloat16), (1, 3), (1, 2), (1, 3), (1, 4))
        )
        lengths = torch.tensor([[draw.choice((0, 1, 7, 20)) for _ in range(batch)] for _ in range(size)])
        lengths[-1] += seqlen_q
        total, most = lengths.sum(0), int(lengths.sum(0).max())
        rows = batch, heads_kv * group, seqlen_q
        q, dout = torch.randn(*rows, 8).to(dtype), torch.randn(*rows, 5).to(dtype)
        gradients = dout, torch.randn(rows, dtype=torch.promote_types(dtype, torch.float32))
        k, v = (torch.randn(batch, heads_kv, most, columns).to(dtype) for columns in (8, 5))
        options = drawn(draw, batch, heads_kv * group, seqlen_q, lengths, dtype)
        found, *others = pool().run(size, decoding.decoded, q, k, v, lengths, gradients, options)
        for other in others:
            assert_equal(other, found)
        one = options | {"q_offset": options.get("q_offset", total - seqlen_q)}
        cache = decoding.filled(k, v, total, None)
        for name in ("mask", "bias"):
            if name in one and one[name].shape[-1] == most:
                one[name] = torch.nn.functional.pad(one[name], (0, 3))
        expected = decoding.results(attention_with_cache, q, cache, gradients, one)
        if "bias" in options:
            expected[4] = expected[4][..., :most]
        if dtype == torch.float64:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=str(options))
            continue
        torch.testing.assert_close(found[2], expected[2])
        one = options | in_slots(cache, seqlen_q, one)
        doubles = [t.double() for t in (q, k, v)]
        exact = run(reference.attention, doubles, dout.double(), gradients[1], **in_double(one))
        del found[2]
        found[3:3] = exact[3:5]
        excesses = Yardsticks(exact, run, (q, k, v), *gradients, **one).excesses(tuple(found))
        assert max(excesses.values()) <= 1, (excesses, options)


def in_slots(cache: KVCache, seqlen_q: int, options: dict[str, Any]) -> dict[str, Any]:
    """The masks over the keys so far, as one process has them."""
    masks = masks_in_first_slots(cache, int(cache.lengths.max()), seqlen_q, options)
    return {name: value for name, value in masks.items() if value is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_token_by_token(dtype: torch.dtype) -> None:
    """A text that is continued gives every rank the same bits; its errors are at most twice those of one call."""
    seeded(0)
    q, k, v = torch.randn(3, 2, 4, 40, 16).to(dtype)
    exact, one = (attention(*(t.to(of) for t in (q, k, v)))[:, :, 33:].double() for of in (torch.float64, dtype))
    first, *others = (torch.cat(found, 2) for found in pool().run(3, decoding.continued, k, v, q, 33))
    assert all(torch.equal(first, other) for other in others)
    assert (first - exact).abs().max() <= 2 * (one - exact).abs().max()


@pytest.mark.parametrize("page_size", [None, 16])
def test_drafts(page_size: int | None) -> None:
    """Trees of drafted tokens, of which the last rank keeps what is accepted, with dropout whose seed rank 0 draws."""
    seeded(0)
    k, v, q = torch.randn(2, 2, 50, 8).double(), torch.randn(2, 2, 50, 8).double(), torch.randn(2, 4, 50, 8).double()
    (expected,) = pool().run(1, decoding.drafted, k, v, q, 21, page_size)
    for found in pool().run(3, decoding.drafted, k, v, q, 21, page_size):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [(0, 4, 2, 2, 8), (2, 0, 0, 2, 8), (2, 0, 2, 2, 8), (2, 4, 2, 0, 8), (2, 4, 2, 2, 0)])
def test_empty_dimensions(sizes: tuple[int, ...]) -> None:
    """Batch, query heads, KV heads, queries and columns."""
    batch, heads, heads_kv, seqlen_q, columns = sizes
    q, k = torch.randn(batch, heads, seqlen_q, columns).double(), torch.randn(batch, heads_kv, 9, columns).double()
    v, gradients = (
        torch.randn(batch, heads_kv, 9, 5).double(),
        (torch.randn(*q.shape[:3], 5).double(), q.new_ones(q.shape[:3])),
    )
    options = {"alibi_slopes": torch.rand(heads).double(), "sinks": torch.randn(heads).double(), "dropout_p": 0.3}
    options |= {"dropout_seed": 3, "key_ranges": torch.tensor([1, 8]).repeat(batch, seqlen_q, 1)}
    lengths = torch.full((3, batch), 3)
    expected = decoding.results(
        attention_with_cache, q, decoding.filled(k, v, lengths.sum(0), None), gradients, options
    )
    for found in pool().run(3, decoding.decoded, q, k, v, lengths, gradients, options):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("page_size", [None, 16])
def test_an_append_before_backward(page_size: int | None) -> None:
    """Raises on every rank, as in one process, unless the cache has pages."""
    errors = pool().run(3, decoding.appended_before_backward, page_size)
    expected = ["no error"] * 3
    if page_size is None:
        own = "one of the variables needed for gradient computation has been modified by an inplace operation"
        expected = [f"ValueError: pyattn: attention_with_cache failed on rank 2: {own}"] * 2 + [f"RuntimeError: {own}"]
    assert [error[: len(start)] for error, start in zip(errors, expected, strict=True)] == expected


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
            {r: {"dropout_p": 0.5, "dropout_seed": r} for r in range(3)},
            "ValueError: pyattn: dropout_seed must be the same on all ranks, got 0 on rank 0 and 1 on rank 1",
        ),
        (
            {0: {"q": ONE.clone().requires_grad_()}},
            "ValueError: pyattn: requires_grad of q, bias, alibi_slopes, sinks, relative_bias must be the same on",
        ),
        (
            {r: {"bias": torch.zeros(1, 1 + r % 2, 1, 8)} for r in range(3)},
            "ValueError: pyattn: shape of bias without its columns must be the same on all ranks, got [1, 1, 1] on",
        ),
        (
            {r: {"sinks": torch.zeros(3)} for r in range(3)},
            "ValueError: pyattn: sinks must have shape",
        ),
        (
            {r: {"q_offset": torch.tensor([1, 2])} for r in range(3)},
            "ValueError: pyattn: q_offset must be an int or have a number for each of 1 sequences, got shape (2,)",
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
    ids=[
        "option",
        "queries",
        "seed",
        "gradient",
        "bias",
        "sinks",
        "q_offset",
        "columns",
        "reversed",
        "beyond",
    ],
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
    ranges = {rank: {"key_ranges": torch.tensor([[[5, 2] if rank == 1 else [2, 5]]])} for rank in range(3)}
    for error in pool().run(3, decoding.refusal, ranges, None):
        assert "key_ranges must hold 0 <= begin <= end <= seqlen_k = 9, got [5, 2]" in error
    changes = {r: {"q": torch.zeros(1, 2, 2, 4), "mask": torch.ones(2, 2 if r == 1 else 8).bool()} for r in range(3)}
    for error in pool().run(3, decoding.refusal, changes, None):
        assert (
            "mask must have 8 columns, the cache's slots, or 2 on all ranks, the queries' own keys, got 2 on" in error
        )
    errors = pool().run(2, decoding.refusal, {}, (3, 0))
    assert all(error.startswith("NotImplementedError: pyattn: a ring buffer ") for error in errors)
