"""Promise: windows, key ranges and bool masks agree with the formula in every form, and masked keys have no effect."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from support.backends import Backend
from support.cases import Case, Truth, assert_case_accurate, assert_equal, each_dtype, run
from support.yardstick import NAMES, assert_accurate
from torch import Tensor

from pyattn import attention, masks, reference

CASES = [
    Case(1, 2, 1, 130, 130, 16, 16, window=(20, -1)),
    Case(1, 2, 2, 65, 200, 24, 20, causal=False, window=(7, 5)),
    Case(1, 1, 1, 140, 140, 16, 16, window=(0, 0)),
    Case(1, 2, 1, 100, 30, 16, 16, q_offset=-40, window=(10, -1)),
    Case(1, 3, 1, 70, 100, 16, 16, causal=False, q_offset=60, window=(-1, 3), dropout_p=0.2),
    Case(1, 2, 2, 40, 300, 72, 40, causal=False, q_offset=100, window=(130, 20)),
    Case(1, 2, 2, 300, 300, 32, 32, key_ranges="documents"),
    Case(2, 2, 1, 130, 66, 16, 24, causal=False, key_ranges="random"),
    Case(2, 2, 1, 70, 90, 64, 64, causal=False, key_ranges="prefix"),
    Case(3, 1, 1, 40, 150, 16, 16, causal=False, key_ranges="empty", dropout_p=0.3),
    Case(1, 2, 1, 70, 140, 16, 20, window=(60, -1), key_ranges="documents"),
    Case(1, 2, 1, 300, 300, 16, 24, key_ranges="streaming"),
    Case(2, 4, 2, 130, 500, 32, 20, causal=False, key_ranges="pieces", dropout_p=0.2),
    Case(1, 6, 1, 200, 250, 16, 16, window=(140, -1), key_ranges="pieces"),  # rows are split
    Case(2, 4, 2, 70, 150, 16, 16, key_ranges="one random"),
    Case(1, 2, 2, 3, 1500, 24, 16, causal=False, key_ranges="one pieces"),
    Case(2, 2, 1, 37, 193, 40, 31, causal=False, mask="random bhqk"),
    Case(1, 4, 2, 67, 93, 16, 16, mask="random k strided", window=(50, -1)),
    Case(1, 1, 1, 130, 130, 20, 24, causal=False, mask="causal qk"),
    Case(1, 1, 1, 130, 300, 16, 16, causal=False, mask="random k"),  # rows that see both ends of a tile, with holes
    Case(2, 3, 1, 33, 100, 16, 16, causal=False, mask="padding bk"),
    Case(1, 4, 2, 37, 150, 16, 16, causal=False, mask="padding hk"),
    Case(2, 2, 1, 50, 70, 16, 16, mask="random bq strided", key_ranges="random", dropout_p=0.1),
    Case(1, 2, 2, 20, 30, 8, 8, causal=False, mask="random -"),
    # Many queries per key, whose rows are split, so some keys are visible in one split only.
    Case(1, 8, 1, 150, 320, 16, 20, window=(40, 0)),
    Case(1, 6, 1, 200, 250, 24, 16, mask="random bhqk", key_ranges="documents", dropout_p=0.2),
    # Few queries, whose keys are split.
    Case(2, 2, 1, 1, 2100, 32, 16, causal=False, q_offset=1500, window=(700, 300)),
    Case(1, 4, 1, 4, 1500, 16, 16, key_ranges="random"),
    Case(1, 4, 1, 1, 3000, 32, 20, causal=False, key_ranges="pieces"),
    Case(2, 4, 2, 3, 1500, 16, 16, mask="random bqk", key_ranges="pieces"),
    Case(1, 2, 1, 20, 1500, 16, 16, key_ranges="streaming"),
    Case(1, 6, 2, 3, 1300, 32, 16, mask="random bhqk", key_ranges="random"),
    Case(1, 4, 1, 8, 1100, 32, 16, causal=False, mask="random hk"),
]


@each_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward(backend: Backend, case: Case, dtype: torch.dtype) -> None:
    assert_case_accurate(case, dtype, backend.attention)


def test_visible_is_what_its_docstring_says() -> None:
    """Its bounds saturate; Python's integers don't have to."""
    extremes = (-(2**63), -6, -1, 0, 2, 9, 2**63 - 1)
    ranges = torch.tensor([[0, 3], [4, 4], [1, 2], [0, 5]])
    for causal, offset, left, right in itertools.product((True, False), extremes, (-1, 0, 2, 2**63 - 1), (-1, 0, 2)):
        expected = [
            [
                (not causal or j <= i + offset)
                and (left < 0 or j >= i + offset - left)
                and (right < 0 or j <= i + offset + right)
                and begin <= j < end
                for j in range(5)
            ]
            for i, (begin, end) in enumerate(ranges.tolist())
        ]
        for q_offset in (offset, torch.tensor([offset])):
            options = {"causal": causal, "q_offset": q_offset, "window": (left, right)}
            seen = reference.visible(4, 5, **options, key_ranges=ranges[None])
            assert seen[0, 0].tolist() == expected


def visible(case: Case) -> Tensor:
    """The case's mask without its bias, (B, Hq, Sq, Sk)."""
    named = {x: y for x, y in case.options.items() if x in ("causal", "q_offset", "window", "key_ranges")}
    seen = reference.visible(case.seqlen_q, case.seqlen_k, **named)
    return seen.expand(case.batch, case.num_heads_q, case.seqlen_q, case.seqlen_k)


FORMS = [
    Case(2, 2, 1, 40, 70, 16, 16, window=(9, -1)),
    Case(2, 2, 1, 33, 70, 16, 16, causal=False, q_offset=20, window=(30, 6)),
    Case(2, 2, 1, 40, 70, 16, 16, causal=False, key_ranges="random"),
    Case(2, 2, 1, 70, 40, 16, 16, key_ranges="documents"),
    Case(2, 4, 2, 3, 300, 16, 16, causal=False, key_ranges="random"),
    Case(2, 2, 1, 70, 250, 16, 16, causal=False, key_ranges="pieces"),
    Case(2, 2, 1, 70, 250, 16, 16, causal=False, key_ranges="one pieces"),
    Case(2, 4, 2, 3, 300, 16, 16, window=(90, 2), key_ranges="pieces"),
]


@each_dtype
@pytest.mark.parametrize("case", FORMS, ids=str)
def test_a_mask_in_any_form(repeatable: Backend, case: Case, dtype: torch.dtype) -> None:
    """A window and key ranges equal the same bool mask, which equals a bias of 0 and -inf."""
    drawn, seen = case.drawn(dtype), visible(case)
    for form in ({"mask": seen}, {"bias": torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -math.inf)}):
        Truth(drawn, {"causal": False, **form}, same=case.options).assert_allows(repeatable.attention)


@each_dtype
def test_gaps_wider_than_a_block(backend: Backend, dtype: torch.dtype) -> None:
    """Tiles between the first keys and the window are not computed; the gradient of a bias is 0 there."""
    case, ranges = Case(1, 2, 2, 330, 330, 16, 16), masks.streaming(330, 4, (20, 0))
    options = {"key_ranges": ranges, "bias": torch.randn(1, 2, 330, 330).to(dtype)}
    Truth(case.drawn(dtype), options).assert_allows(backend.attention)


@each_dtype
def test_padding_equals_keys_cut_off(repeatable: Backend, dtype: torch.dtype) -> None:
    lengths, case = (50, 23), Case(2, 2, 1, 40, 60, 24, 20)
    qkv, dout, dlse = case.drawn(dtype)
    ranges = masks.padding(lengths, 60).to(qkv[0].device)
    seen = (torch.arange(60) < ranges[:, :1, 1:])[:, None]
    for options in ({"key_ranges": ranges[:, :40]}, {"mask": seen}):
        padded = run(repeatable.attention, qkv, dout, dlse, causal=False, **options)
        for b, length in enumerate(lengths):
            one, kept = slice(b, b + 1), (slice(b, b + 1), slice(None), slice(0, length))
            cut = (qkv[0][one], qkv[1][kept], qkv[2][kept])
            alone = run(repeatable.attention, cut, dout[one], dlse[one], causal=False)
            places = (one, one, one, kept, kept)
            for name, x, y, at in zip(NAMES, padded, alone, places, strict=True):
                assert_accurate(name, x[at], y, y.double())
            assert not any(x[b, :, length:].any() for x in padded[3:])


@each_dtype
@pytest.mark.parametrize("causal", [True, False])
def test_documents_equal_sequences_one_by_one(repeatable: Backend, dtype: torch.dtype, causal: bool) -> None:
    lengths, case = [17, 1, 0, 33, 20], Case(1, 2, 1, 71, 71, 24, 20)
    qkv, dout, dlse = case.drawn(dtype)
    packed = run(
        repeatable.attention, qkv, dout, dlse, causal=causal, key_ranges=masks.documents(lengths).to(dout.device)
    )
    parts = [x.split(lengths, 2) for x in (*qkv, dout, dlse)]
    alone = [run(repeatable.attention, tuple(x[:3]), *x[3:], causal=causal) for x in zip(*parts, strict=True)]
    for name, x, y in zip(NAMES, packed, (torch.cat(z, 2) for z in zip(*alone, strict=True)), strict=True):
        assert_accurate(name, x, y, y.double())


HIDING = [
    Case(2, 2, 1, 36, 70, 21, 19, window=(11, -1)),
    Case(2, 2, 1, 36, 70, 16, 16, causal=False, window=(30, 4), softcap=2.0),
    Case(2, 2, 1, 70, 70, 16, 16, key_ranges="documents", alibi="h"),
    Case(2, 2, 1, 36, 70, 16, 16, causal=False, key_ranges="random", sinks=True),
    Case(2, 2, 1, 36, 270, 16, 16, causal=False, key_ranges="pieces"),
    Case(2, 2, 1, 36, 270, 16, 16, key_ranges="one random"),
    Case(2, 2, 1, 36, 150, 16, 16, mask="random qk", bias="bands hqk", key_ranges="pieces"),
    Case(2, 2, 1, 3, 150, 32, 16, causal=False, key_ranges="pieces"),
    Case(2, 4, 2, 36, 50, 21, 19, causal=False, mask="random bhqk"),
    Case(2, 2, 1, 36, 50, 16, 16, mask="random qk", window=(20, -1)),
    Case(2, 2, 1, 36, 50, 16, 16, causal=False, bias="bands bhqk"),
    Case(2, 2, 1, 36, 50, 16, 16, bias="bands hqk", key_ranges="random", softcap=3.0, alibi="bh"),
    Case(2, 2, 1, 3, 150, 32, 16, mask="random bhqk"),
    Case(2, 2, 1, 3, 150, 32, 16, causal=False, bias="bands hqk", key_ranges="random"),
    Case(2, 2, 1, 36, 50, 21, 19, causal=False, mask="random bhqk", bias="bands hqk"),
    Case(2, 2, 1, 36, 50, 16, 16, mask="random qk", bias="bands bk", window=(20, -1), key_ranges="random", softcap=3.0),
    Case(2, 2, 1, 3, 150, 32, 16, causal=False, mask="random bhqk", bias="bands bhqk"),
]


@each_dtype
@pytest.mark.parametrize("case", HIDING, ids=str)
def test_what_is_hidden_changes_no_bit(backend: Backend, case: Case, dtype: torch.dtype) -> None:
    """The contents of a key and value reach only the rows that see it; those of a query, only the keys that it sees.

    One sequence has NaN there, the other inf.
    """
    (q, k, v), dout, dlse = case.drawn(dtype)
    options, seen = case.given(dtype), visible(case)
    seen = seen & options.get("mask", True) & (options["bias"] != -math.inf if "bias" in options else True)
    clean = run(backend.attention, (q, k, v), dout, dlse, **options)
    places = (math.nan, case.seqlen_k // 2, 1), (math.inf, case.seqlen_k - 9, case.seqlen_q - 2)
    soiled_k, soiled_v, soiled_q, soiled_dout = (x.clone() for x in (k, v, q, dout))
    for b, (bad, key, query) in enumerate(places):
        soiled_k[b, :, key], soiled_v[b, :, key], soiled_q[b, :, query], soiled_dout[b, :, query] = bad, bad, bad, bad
    rows = run(backend.attention, (q, soiled_k, soiled_v), dout, dlse, **options)
    blind = torch.stack([~seen[b, ..., key] for b, (_, key, _) in enumerate(places)])
    backend.assert_same(tuple(x[blind] for x in rows[:3]), tuple(x[blind] for x in clean[:3]))
    assert not rows[0][~blind].isfinite().all(-1).any()
    keys = run(backend.attention, (soiled_q, k, v), soiled_dout, dlse, **options)
    visible_keys = torch.stack([seen[b, :, query] for b, (_, _, query) in enumerate(places)])
    hidden = ~visible_keys.unflatten(1, (case.num_heads_kv, -1)).any(2)
    assert_equal((x[hidden] for x in keys[3:5]), (x[hidden] for x in clean[3:5]))


@each_dtype
@pytest.mark.parametrize("case", [case for case in HIDING if case.softcap], ids=str)
@pytest.mark.usefixtures("isa")
def test_a_hidden_product_that_overflows_changes_no_bit(case: Case, dtype: torch.dtype) -> None:
    """That of finite rows may be inf - inf, where softcap has no derivative."""
    (q, k, v), *gradients = replace(case, head_dim=64).drawn(dtype)
    options, hidden = case.given(dtype), torch.arange(case.seqlen_k) == case.seqlen_k // 2
    options["mask"] = options.get("mask", True) & ~hidden
    q[..., 4], q[..., 40] = 64, 64
    clean = run(attention, (q, k, v), *gradients, **options)
    k[:, :, hidden, 4], k[:, :, hidden, 40] = torch.finfo(dtype).max, torch.finfo(dtype).min
    assert_equal(run(attention, (q, k, v), *gradients, **options), clean)


@each_dtype
@pytest.mark.parametrize("queries", [5, 20])
def test_rows_without_keys(backend: Backend, dtype: torch.dtype, queries: int) -> None:
    """Whatever hides all keys of a row: out 0, lse -inf, no gradient, and none for keys that no row sees.

    A mask beside a bias: the mask hides row 0, both hide row 3, the bias hides the last one, and row 2 alternates.
    """
    case = Case(2, 2, 1, queries, 40, 16, 16, causal=False)
    drawn, rows = case.drawn(dtype), torch.zeros(queries, dtype=torch.bool)
    rows[[0, 2, 3, -1]] = True
    hidden = rows[:, None] | (torch.arange(40) >= 30)
    by_mask, by_bias = hidden.clone(), hidden.clone()
    by_mask[-1], by_bias[0], by_mask[2, ::2], by_bias[2, 1::2] = False, False, False, False
    ranges = torch.tensor([0, 30]).repeat(1, queries, 1).masked_fill(rows[:, None], 7)

    def bias(hidden: Tensor) -> Tensor:
        return torch.randn(2, queries, 40).to(dtype).masked_fill(hidden, -math.inf)

    for form in (
        {"key_ranges": ranges},
        {"mask": ~hidden},
        {"bias": bias(hidden)},
        {"mask": ~by_mask[None, None], "bias": bias(by_bias)},
    ):
        out, lse, dq, dk, dv, *dbias = run(backend.attention, *drawn, **case.options, **form)
        assert not any(x[:, :, rows].any() for x in (out, dq))
        assert (lse[:, :, rows] == -math.inf).all()
        assert lse[:, :, ~rows].isfinite().all()
        assert not any(x[:, :, 30:].any() for x in (dk, dv))
        assert not any(x[:, hidden].any() for x in dbias)
        assert all(x.isfinite().all() for x in (out, dq, dk, dv, *dbias))


@pytest.mark.parametrize("offset", [2**63 - 1, -(2**63), 2**40, 0, -3])
def test_extreme_windows(repeatable: Backend, offset: int) -> None:
    """The ends of windows saturate."""
    q, k, v = Case(2, 2, 1, 5, 7, 8, 6).inputs(torch.float64)
    sides = (-1, 0, 3, 2**40, 2**63 - 1)
    for causal, *window in itertools.product((True, False), sides, sides):
        options = {"causal": causal, "window": tuple(window)}
        expected = reference.attention(q, k, v, **options, q_offset=offset)
        for q_offset in (offset, torch.full((2,), offset)):
            out = repeatable.attention(q, k, v, **options, q_offset=q_offset)
            assert_accurate("out", out, expected, expected)
