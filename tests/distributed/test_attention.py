"""Promise: attention on parts of a sequence is attention on the whole, with every option, forward and backward."""

import math
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from attention.test_random import drawn_case
from support.assertions import check_examples
from support.cases import DTYPES, Case, run, seeded
from support.ranks import ranks
from support.ranks.pool import pool
from support.yardstick import Yardsticks, in_double, rounded_shares

from pyattn import attention, attention_varlen, reference

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")

LAYOUTS = ("zigzag", "contiguous", "chunk")


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *product(["ring_attention", "ulysses_attention"], [2, 3, 4, 8]),
        ("usp_attention 2x4", 8),
        ("usp_attention 4x2", 8),
    ],
)
def test_accuracy(name: str, size: int, request: pytest.FixtureRequest) -> None:
    """Random cases of all options, judged by the rule of yardstick.py; ``--examples`` draws as many new ones."""
    reports = list[Any]()

    def check(draw: Random) -> None:
        draw.seed(f"{name} {size} {draw.random()}")
        case, dtype, layout, seed = drawn_case(draw), draw.choice(DTYPES), draw.choice(LAYOUTS), draw.getrandbits(32)
        seeded(seed)
        qkv, dout, dlse = case.drawn(dtype)
        dlse = draw.choice([None, dlse])
        options = case.given(dtype)
        (ours, shares), *others = pool().run(size, ranks.dense, name, layout, qkv, dout, dlse, options)
        for other, _ in others:
            torch.testing.assert_close(other, ours, rtol=0, atol=0, equal_nan=True)
        doubles = tuple(x.double() for x in qkv)
        exact = run(reference.attention, doubles, dout.double(), dlse, **in_double(options))
        excesses = Yardsticks(exact, run, qkv, dout, dlse, **options).excesses(tuple(ours), shares)
        reports.extend((by, f"{of} {dtype} {layout} {case} seed {seed}") for of, by in excesses.items() if by > 1)

    check_examples(request, 8, check)
    assert not reports


@pytest.mark.parametrize("size", [2, 3, 8])
def test_packed(size: int) -> None:
    """Sequences that are cut anywhere, in float64, beside one process's call with the same seed."""
    draw = Random(size)
    for _ in range(8):
        seeded(draw.getrandbits(32))
        group, num_heads_kv = draw.choice((1, 3)), draw.choice((1, 2))
        lengths_q = draw.choices((0, 1, 3, 9, 20), k=draw.choice((1, 2, 5)))
        lengths_k = draw.choice((lengths_q, draw.choices((0, 1, 5, 13), k=len(lengths_q))))
        sizes = tuple(torch.tensor([0, *lengths]).cumsum(0) for lengths in (lengths_q, lengths_k))
        totals = [int(size[-1]) + draw.choice((0, 0, 2)) for size in sizes]
        num_heads = group * num_heads_kv
        shapes = (totals[0], num_heads, 8), (totals[1], num_heads_kv, 8), (totals[1], num_heads_kv, 4)
        qkv = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        dout, dlse = torch.randn(totals[0], num_heads, 4).double(), torch.randn(num_heads, totals[0]).double()
        options = packed_options(draw, num_heads, lengths_q, lengths_k, totals[0])
        layout = draw.choice((*LAYOUTS, *["zigzag_varlen"] * 3))
        ours, *_ = pool().run(size, ranks.packed, layout, qkv, dout, dlse, sizes, options)
        learned = [name for name in ranks.LEARNED if name in options]
        leaves = [t.requires_grad_() for t in (*qkv, *(options[name] for name in learned))]
        results = attention_varlen(*qkv, *sizes, max(lengths_q), max(lengths_k), **{**options, "return_lse": True})
        truth = [*results, *torch.autograd.grad(results, leaves, (dout, dlse))]
        for name, found, expected in zip(("out", "lse", "dq", "dk", "dv", *learned), ours, truth, strict=True):
            torch.testing.assert_close(
                found, expected.detach(), rtol=1e-11, atol=1e-11, msg=f"{name} {layout} {options}"
            )


@pytest.mark.parametrize(
    ("name", "size"),
    [("ring_attention", 3), ("ulysses_attention", 3), ("usp_attention 2x4", 8), ("ring_attention_varlen", 3)],
)
def test_max_score(name: str, size: int) -> None:
    """One process's, on every rank: also NaN, and -inf of heads and sequences in which no key is visible.

    The sinks are above all scores.
    """
    seeded(0)
    packed = name == "ring_attention_varlen"
    qkv = [torch.randn((14, heads, 8) if packed else (2, heads, 14, 8)).double() for heads in (4, 2, 2)]
    begins = [torch.tensor([0, 0, 4, 11, 13]), torch.tensor([0, 2, 2, 9, 12])] if packed else []
    if packed:
        qkv[0][12, 3] = math.nan
    else:
        qkv[0][1, 3, 9] = math.nan
    options = {"sinks": torch.full((4,), 9.0).double(), "causal": False, "window": (5, 0), "q_offset": -1}
    one, most = (attention_varlen, [11, 11]) if packed else (attention, [])
    expected = one(*qkv, *begins, *most, **options, return_lse=True, return_max_score=True)
    assert (int(expected[2].isnan().sum()), bool(expected[2].isneginf().any())) == (1, packed)
    for layout in LAYOUTS:
        for found in pool().run(size, ranks.max_scores, name, layout, qkv, begins, options["sinks"]):
            torch.testing.assert_close(found, list(expected), rtol=1e-12, atol=1e-12, equal_nan=True)


def packed_options(
    draw: Random, num_heads: int, lengths_q: list[int], lengths_k: list[int], total: int
) -> dict[str, Any]:
    """Each option in a third of the cases."""
    options: dict[str, Any] = {"causal": draw.random() < 0.7}
    if draw.random() < 0.4:
        options["window"] = draw.choice((-1, 0, 5, 20)), draw.choice((-1, 0, 3))
    if draw.random() < 0.4:
        options["q_offset"] = draw.choice((0, -3, 5, torch.randint(-3, 9, (len(lengths_q),))))
    if draw.random() < 0.3:
        options["softcap"] = 2.0
    if draw.random() < 0.4:
        count = draw.choice((1, 3))
        pieces = [torch.randint(k + 1, (q, 2 * count)) for q, k in zip(lengths_q, lengths_k, strict=True)]
        ends = torch.cat([*pieces, torch.zeros(total - sum(lengths_q), 2 * count).long()]).sort(-1).values
        options["key_ranges"] = ends if count == 1 else ends.unflatten(-1, (count, 2))
    if draw.random() < 0.4:
        options["alibi_slopes"] = torch.rand(draw.choice([(num_heads,), (len(lengths_q), num_heads)])).double()
    if draw.random() < 0.4:
        shape = draw.choice([(num_heads, 9), (1, 41), (len(lengths_q), num_heads, 15)])
        options["relative_bias"] = torch.randn(shape).double()
    if draw.random() < 0.4:
        options["sinks"] = torch.randn(num_heads).double()
    if draw.random() < 0.4:
        options |= {"dropout_p": 0.3, "dropout_seed": draw.getrandbits(60)}
    return options


@pytest.mark.parametrize("name", ["ring_attention", "ulysses_attention", "ring_attention_varlen"])
@pytest.mark.parametrize(
    "sizes",
    [
        (0, 4, 2, 9, 8),
        (2, 0, 0, 9, 8),
        (2, 0, 2, 9, 8),
        (2, 4, 2, 9, 0),
        (1, 4, 2, 0, 8),
        (1, 4, 2, 1, 8),
        (2, 4, 2, 9, 8),
    ],
    ids=str,
)
def test_strides_and_empty_dimensions(name: str, sizes: tuple[int, ...]) -> None:
    """Batch, query heads, KV heads, positions and columns of the whole; the mask is one for all sequences and heads."""
    seeded(0)
    batch, heads, heads_kv, length, columns = sizes
    packed = name == "ring_attention_varlen"
    qkv = [torch.randn(batch, h, length, d).double() for h, d in ((heads, columns), (heads_kv, columns), (heads_kv, 5))]
    options: dict[str, Any] = {"key_ranges": torch.randint(length + 1, (batch, length, 2)).sort(-1).values}
    options |= {"dropout_p": 0.3, "dropout_seed": 1}
    begins, most = [], []
    if packed:
        begins, most = [torch.tensor([0, length // 3, length][: 3 if batch else 1])] * 2, [length, length]
        qkv = [t.transpose(1, 2).flatten(0, 1)[:length].new_ones(length, *t.shape[1::2]).normal_() for t in qkv]
        options["key_ranges"] = torch.arange(2).repeat(length, 1)
    else:
        options["mask"] = (torch.rand(length, length) < 0.8).expand(batch, heads, -1, -1)
    leaves = [t.clone().requires_grad_() for t in qkv]
    out = (attention_varlen if packed else attention)(*leaves, *begins, *most, **options)
    truth = [out.detach(), *torch.autograd.grad(out.sum(), leaves)]
    for found in pool().run(3, ranks.strided, name, qkv, begins, options):
        torch.testing.assert_close(found, truth)


ENDS = 2**63 - 1, -(2**63)


@pytest.mark.parametrize("offset", [*ENDS, *(torch.tensor([end, 3]) for end in ENDS), torch.zeros(0).long()], ids=str)
def test_ends_of_int64(offset: int | torch.Tensor) -> None:
    """Sums of positions saturate, as in one process; the last case has no sequence."""
    seeded(0)
    qkv = torch.randn(3, len(offset) if isinstance(offset, torch.Tensor) else 1, 2, 11, 8).double().unbind()
    for window in ((-1, -1), (2**62, 0), (3, ENDS[0])):
        options = {"q_offset": offset, "window": window}
        truth = run(attention, qkv, qkv[0], None, **options)
        found, _ = pool().run(3, ranks.dense, "ring_attention", "zigzag", qkv, qkv[0], None, options)[0]
        torch.testing.assert_close(found, list(truth))
        if len(qkv[0]) == 1:
            tokens, begins = [t[0].transpose(0, 1) for t in qkv], torch.tensor([0, 11])
            given = tokens[0], torch.zeros(2, 11).double(), (begins, begins), options
            found = pool().run(3, ranks.packed, "zigzag_varlen", tokens, *given)[0]
            torch.testing.assert_close(found[0], truth[0][0].transpose(0, 1))


def test_shares_are_rounded_once() -> None:
    """Not for each pair of chunks, whose terms of dslopes cancel where the keys are far away."""
    seeded(0)
    case = Case(1, 2, 2, 60, 60, 8, 8, causal=False, q_offset=10_000)
    qkv, dout, _ = case.drawn(torch.float64)
    options = case.given(torch.float64) | {"alibi_slopes": torch.rand(2) / 10_000}
    exact = run(attention, qkv, dout, None, **in_double(options))
    (*_, found), shares = pool().run(4, ranks.dense, "ring_attention", "zigzag", qkv, dout, None, options)[0]
    rounding = rounded_shares(shares["alibi_slopes"]) + torch.finfo(torch.float32).eps * exact[-1].abs().max()
    assert (found - exact[-1]).abs().max() <= rounding


def test_runs_have_the_same_bits() -> None:
    case = Case(2, 4, 2, 130, 130, 32, 32, dropout_p=0.2, window=(60, -1), sinks=True)
    qkv, dout, dlse = case.drawn(torch.bfloat16)
    options = case.given(torch.bfloat16)
    runs = [pool().run(4, ranks.dense, "ring_attention", "zigzag", qkv, dout, dlse, options)[0][0] for _ in range(3)]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("layout", [*LAYOUTS, "zigzag_varlen"])
@pytest.mark.parametrize("length", [0, 1, 7, 32])
def test_shards(layout: str, length: int) -> None:
    whole = torch.randn(2, length, 3).to(torch.bfloat16)
    begins = torch.tensor([0, 0, length // 3, length - length // 5]) if layout == "zigzag_varlen" else None
    for size in (1, 3, 8):
        for again, gradient in pool().run(size, ranks.round_trip, layout, whole, 1, begins):
            assert torch.equal(again, whole)
            assert torch.equal(gradient, torch.full_like(gradient, size * (size + 1) / 2))


def test_dropout_of_a_larger_call() -> None:
    """Ranks with some of its sequences and heads drop the weights that it drops."""
    seeded(0)
    qkv = torch.randn(3, 3, 4, 20, 8).unbind()
    truth = attention(*qkv, dropout_p=0.4, dropout_seed=7)
    for found in pool().run(2, ranks.of_larger_call, qkv, 1, 2, 7):
        torch.testing.assert_close(found, truth[1:, 2:])


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("option", ["key_ranges", "mask", "bias"])
@pytest.mark.parametrize("name", ["ring_attention", "ulysses_attention", "usp_attention 2x4"])
def test_one_row_of_a_rank(name: str, option: str, compiles: bool) -> None:
    """Rank 0 may give one row for all its queries, and alone have a loss of lse."""
    seeded(0)
    size = 8 if name == "usp_attention 2x4" else 2
    length = 3 * size
    q, k, v, dout = torch.randn(4, 2, 4, length, 8).double().unbind()
    values = {
        "key_ranges": torch.stack([torch.randint(5, (2, length)), torch.randint(5, length, (2, length))], -1),
        "mask": torch.rand(2, 4, length, length) < 0.7,
        "bias": torch.randn(2, 4, length, length).double(),
    }
    whole, dim = values[option], 1 if option == "key_ranges" else 2
    whole.narrow(dim, 0, 3).copy_(whole.narrow(dim, 0, 1).expand_as(whole.narrow(dim, 0, 3)))
    leaves = [t.requires_grad_() for t in ((q, k, v, whole) if option == "bias" else (q, k, v))]
    out, lse = attention(q, k, v, return_lse=True, **{option: whole})
    expected = [out, *torch.autograd.grad((out * dout).sum() + lse[:, :, :3].sum(), leaves)]
    if option == "bias":
        expected[4][:, :, :3] = expected[4][:, :, :3].mean(2, keepdim=True)
    arguments = [t.detach() for t in (q, k, v)], dout, {option: whole.detach()}
    for found in pool().run(size, ranks.of_rank_0, name, compiles, *arguments):
        torch.testing.assert_close(found, [t.detach() for t in expected], rtol=1e-12, atol=1e-12)
