"""Promise: with set_row_invariant(True), a row has the same bits whatever else is in its call, on any threads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from support.caches import made
from support.cases import Case, assert_equal, each_dtype
from torch import Tensor

from pyattn import attention, attention_varlen, attention_with_cache, set_row_invariant

CASES = [
    Case(1, 4, 4, 300, 300, 8, 8),
    Case(1, 4, 2, 260, 260, 30, 30, sinks=True),
    Case(1, 2, 2, 1100, 1100, 64, 64),
    Case(1, 4, 1, 333, 333, 80, 64, window=(150, 0), softcap=3.0),
    Case(1, 8, 1, 210, 210, 128, 128, alibi="h"),
    Case(1, 2, 2, 150, 150, 256, 256, softmax_scale=-0.3, window=(7, 0)),
    Case(1, 4, 2, 250, 250, 64, 40, mask="random qk", relative="h 99"),
    Case(1, 2, 1, 250, 250, 64, 64, bias="float hqk", sinks=True),
]
"""Head dimensions that do and do not fill vectors; grouped heads; one tile of keys and several."""
IN_CACHES = [case for case in CASES if not (case.mask or case.bias)]

each_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture
def invariant() -> Iterator[None]:
    with set_row_invariant(True):
        yield


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def part_of(options: dict[str, Any], rows: slice, keys: int) -> dict[str, Any]:
    """The options of some rows over the first keys."""
    parts = {name: options[name][..., rows, :keys] for name in ("mask", "bias") if name in options}
    return options | parts


def chunks_of(seqlen: int, random: Random) -> list[slice]:
    """A prompt in random chunks, often short ones: steps of decoding and drafts in a line."""
    chunks, done = [], 0
    while done < seqlen:
        new = min(random.choice([1, 1, 2, 3, 5, 8, 9, 17, 64, 97, 130]), seqlen - done)
        chunks.append(slice(done, done + new))
        done += new
    return chunks


def in_chunks(qkv: tuple[Tensor, ...], options: dict[str, Any], random: Random) -> list[tuple[Tensor, ...]]:
    """(out, lse) of each chunk, whose keys end with its own."""
    q, k, v = qkv
    return [
        attention(
            q[:, :, rows], k[:, :, : rows.stop], v[:, :, : rows.stop], return_lse=True,
            **part_of(options, rows, rows.stop),
        )
        for rows in chunks_of(q.shape[2], random)
    ]  # fmt: skip


def joined(parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.cat(tensors, 2) for tensors in zip(*parts, strict=True)]


def with_companions(qkv: tuple[Tensor, ...], options: dict[str, Any], random: Random) -> tuple[Tensor, ...]:
    """(out, lse) of a sequence that is one of several in a batch."""
    place, count = random.randrange(3), 3
    batch = [torch.randn(count, *t.shape[1:]).to(t.dtype) for t in qkv]
    for some, t in zip(batch, qkv, strict=True):
        some[place] = t[0]
    out, lse = attention(*batch, return_lse=True, **options)
    return out[place : place + 1], lse[place : place + 1]


def between_others(qkv: tuple[Tensor, ...], rows: slice, random: Random) -> tuple[list[Tensor], tuple[Any, ...], slice]:
    """q, k and v of a chunk, packed between two random sequences; the sequences' places; the chunk's rows of q."""
    before, after = random.randrange(1, 40), random.randrange(1, 200)
    seqlens = [(before, rows.stop - rows.start, after), (before, rows.stop, after)]
    some = []
    for t, own in zip(qkv, (rows, slice(rows.stop), slice(rows.stop)), strict=True):
        part = t[0, :, own].transpose(0, 1)
        some.append(torch.cat([torch.randn(n, *part.shape[1:]).to(t) if n else part for n in (before, 0, after)]))
    starts = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in seqlens]
    return some, (*starts, *(max(n) for n in seqlens)), slice(before, before + rows.stop - rows.start)


def packed(qkv: tuple[Tensor, ...], options: dict[str, Any], random: Random) -> list[tuple[Tensor, ...]]:
    """(out, lse) of each chunk, packed with random sequences before and after it."""
    found = []
    for rows in chunks_of(qkv[0].shape[2], random):
        some, places, own = between_others(qkv, rows, random)
        out, lse = attention_varlen(*some, *places, return_lse=True, **options)
        found.append((out[own].transpose(0, 1)[None], lse[None, :, own]))
    return found


def over_a_cache(
    qkv: tuple[Tensor, ...], case: Case, options: dict[str, Any], random: Random, page_size: int | None
) -> list[tuple[Tensor, ...]]:
    """(out, lse) of each chunk over a cache with another sequence, which is longer or shorter."""
    cached = made(replace(case, batch=2), qkv[0].dtype, 1500, page_size=page_size)
    other = random.choice([0, 40, 100])
    _, k, v = qkv
    if other:
        noise = [torch.randn(2, t.shape[1], other, t.shape[3]).to(t) for t in (k, v)]
        cached.append(*noise, lengths=[0, other])
    found = []
    for rows in chunks_of(k.shape[2], random):
        now = [torch.cat([t[:, :, rows], torch.randn_like(t[:, :, rows])]) for t in qkv]
        cached.append(*now[1:])
        out, lse = attention_with_cache(now[0], cached, return_lse=True, **options)
        found.append((out[:1], lse[:1]))
    return found


HISTORIES: dict[str, Callable[..., Any]] = {
    "chunks": lambda qkv, case, options, random: joined(in_chunks(qkv, options, random)),
    "companions": lambda qkv, case, options, random: with_companions(qkv, options, random),
    "packed": lambda qkv, case, options, random: joined(packed(qkv, options, random)),
    "cache": lambda qkv, case, options, random: joined(over_a_cache(qkv, case, options, random, None)),
    "pages": lambda qkv, case, options, random: joined(over_a_cache(qkv, case, options, random, 16)),
}
SEPARATE = "packed", "cache", "pages"
"""Histories that take no mask or bias over the keys of one call."""


@each_dtype
@each_case
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.usefixtures("isa", "invariant")
def test_a_row_has_the_bits_of_one_whole_call(dtype: torch.dtype, case: Case, history: str) -> None:
    """Prompts in random chunks, random companions, and any number of threads."""
    if history in SEPARATE and case not in IN_CACHES:
        return
    random = Random(f"{case} {history}")
    qkv, options = case.inputs(dtype), case.given(dtype)
    whole = attention(*qkv, return_lse=True, **options)
    for threads in (1, 2, 3):
        with on_threads(threads):
            assert_equal(HISTORIES[history](qkv, case, options, random), whole)


LONG = [
    Case(2, 16, 4, 1300, 1300, 128, 128),
    Case(2, 12, 12, 1025, 1025, 64, 64, window=(500, 0)),
    Case(2, 8, 1, 2000, 2000, 66, 36, softcap=3.0, alibi="h", sinks=True),
    Case(1, 14, 2, 1000, 1000, 80, 56),
]
"""Several ranges of keys, joined, and so many elements that some of 16 bits show another order of sums."""
STEPS = 1, 2, 3, 5, 8, 9, 40
"""Queries of a call: one row to several in every group, more than decode, a block."""


@each_dtype
@pytest.mark.parametrize("case", LONG, ids=str)
@pytest.mark.parametrize("heads_inside", [False, True])
@pytest.mark.usefixtures("isa", "invariant")
def test_a_decoded_row_has_the_bits_of_one_whole_call(dtype: torch.dtype, case: Case, heads_inside: bool) -> None:
    """Keys end at and beside the ends of tiles and ranges; heads of a position are neighbours or apart."""
    qkv, options = case.inputs(dtype), case.given(dtype)
    if heads_inside:
        qkv = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv)
    q, k, v = qkv
    whole = attention(q, k, v, return_lse=True, **options)
    for steps in STEPS:
        for end in (steps, 96, 97, 191, 959, 960, 961, 1023, case.seqlen_k):
            rows = slice(end - steps, end)
            found = attention(q[:, :, rows], k[:, :, :end], v[:, :, :end], return_lse=True, **options)
            assert_equal(found, [t[:, :, rows] for t in whole])


@each_dtype
@pytest.mark.usefixtures("isa", "invariant")
def test_sums_of_values_that_cancel(dtype: torch.dtype) -> None:
    """16 bits of out show the order of its sum, and bf16 pairs, which a window may cut between their keys."""
    case = Case(1, 12, 12, 700, 700, 64, 64, window=(500, 0))
    q, k, v = case.inputs(dtype)
    k[:, :, 3::4], v[:, :, 3::4] = k[:, :, ::4], -100 * v[:, :, ::4]
    v[:, :, ::4] *= 100
    v[:, :, 1::4] /= 1024
    v[:, :, 2::4] /= 1024
    whole = attention(q, k, v, window=(500, 0))
    for row in range(500, 700):
        rows = slice(row, row + 1)
        alone = attention(q[:, :, rows], k[:, :, : row + 1], v[:, :, : row + 1], window=(500, 0))
        assert torch.equal(alone, whole[:, :, rows])


@each_dtype
@pytest.mark.usefixtures("isa", "invariant")
def test_masked_values_that_are_not_finite(dtype: torch.dtype) -> None:
    """They are left out one by one, in the order of the other sums; where a row sees one, both calls do."""
    case = Case(1, 4, 2, 300, 300, 64, 72, mask="random qk")
    (q, k, v), options = case.inputs(dtype), case.given(dtype)
    v[:, :, 200::7] = float("nan")
    v[:, :, 3::50] = float("inf")
    mask = options["mask"]
    mask[..., 200::7] &= torch.rand(mask[..., 200::7].shape) < 0.01
    whole = attention(q, k, v, return_lse=True, **options)
    assert whole[0].isfinite().any()
    assert not whole[0].isfinite().all()
    for row in range(150, 300, 3):
        some = slice(row, row + 1)
        found = attention(
            q[:, :, some], k[:, :, : row + 1], v[:, :, : row + 1], return_lse=True, **part_of(options, some, row + 1)
        )
        for ours, theirs in zip(found, whole, strict=True):
            torch.testing.assert_close(ours, theirs[:, :, some], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("isa", "invariant")
def test_sums_that_underflow_to_negative_zero(dtype: torch.dtype) -> None:
    """They become 0, as where a tile of masked keys follows. Only the first key weighs much, and its value is 0."""
    q, k, v = (torch.zeros(1, 1, 250, 64, dtype=dtype) for _ in range(3))
    q[..., 0], k[:, :, 0, 0] = 1.0, 40.0
    v[:, :, 1:] = -torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    whole = attention(q, k, v)
    for row in (1, 50, 95, 96, 249):
        rows = slice(row, row + 1)
        alone = attention(q[:, :, rows], k[:, :, : row + 1], v[:, :, : row + 1])
        assert_equal(alone, whole[:, :, rows])
        assert not alone.signbit().any()
    assert not whole.signbit().any()


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.usefixtures("isa")
def test_otherwise_it_has_not(history: str) -> None:
    """The test above can fail."""
    case = Case(1, 2, 2, 1300, 1300, 64, 64, window=(300, 0))
    qkv, options = case.inputs(torch.float32), case.given(torch.float32)
    whole = attention(*qkv, return_lse=True, **options)
    parts = HISTORIES[history](qkv, case, options, Random(0))
    equal = all(torch.equal(x, y) for x, y in zip(parts, whole, strict=True))
    assert equal == (history == "companions")


def gradient_of_q(qkv: tuple[Tensor, ...], dout: Tensor, dlse: Tensor, **options: Any) -> Tensor:
    q, k, v = (t.detach().requires_grad_() for t in qkv)
    return torch.autograd.grad(attention(q, k, v, return_lse=True, **options), q, (dout, dlse))[0]


@each_dtype
@each_case
@pytest.mark.usefixtures("isa", "invariant")
def test_so_has_the_gradient_of_its_query(dtype: torch.dtype, case: Case) -> None:
    """The queries come in chunks, and as one sequence of a batch."""
    random = Random(str(case))
    (q, k, v), dout, dlse = case.drawn(dtype)
    dlse = dlse.to(torch.promote_types(dtype, torch.float32))
    options = case.given(dtype)
    whole = gradient_of_q((q, k, v), dout, dlse, **options)
    chunks = [
        gradient_of_q(
            (q[:, :, rows], k[:, :, : rows.stop], v[:, :, : rows.stop]), dout[:, :, rows], dlse[:, :, rows],
            **part_of(options, rows, rows.stop),
        )
        for rows in chunks_of(case.seqlen_q, random)
    ]  # fmt: skip
    assert torch.equal(torch.cat(chunks, 2), whole)
    batch, place = [torch.cat([torch.randn_like(t)] * 5 + [t]) for t in (q, k, v, dout, dlse)], 5
    assert torch.equal(gradient_of_q(tuple(batch[:3]), *batch[3:], **options)[place:], whole)


@each_dtype
@pytest.mark.parametrize("case", IN_CACHES, ids=str)
@pytest.mark.usefixtures("isa", "invariant")
def test_so_has_the_gradient_of_its_query_among_packed_sequences(dtype: torch.dtype, case: Case) -> None:
    random = Random(str(case))
    qkv, dout, dlse = case.drawn(dtype)
    dlse = dlse.to(torch.promote_types(dtype, torch.float32))
    options = case.given(dtype)
    whole = gradient_of_q(qkv, dout, dlse, **options)
    for rows in chunks_of(case.seqlen_q, random):
        (q, k, v), places, own = between_others(qkv, rows, random)
        q.requires_grad_()
        out, lse = attention_varlen(q, k, v, *places, return_lse=True, **options)
        into = torch.randn_like(out), torch.randn_like(lse)
        into[0][own], into[1][:, own] = dout[0, :, rows].transpose(0, 1), dlse[0, :, rows]
        (found,) = torch.autograd.grad((out, lse), q, into)
        assert torch.equal(found[own].transpose(0, 1)[None], whole[:, :, rows])
