"""Promise: selected keys give what a bool mask with True at these keys gives, in memory that follows the lists."""

import math
from typing import Any

import pytest
import torch
from support.cases import Case, Truth, assert_equal, each_dtype, memory_needed, run, seeded
from torch import Tensor

from pyattn import KVCache, attention, attention_weights, attention_with_cache

CASES = [
    # case, lists (of 1, the KV heads or the query heads), entries, keys of an entry
    (Case(2, 4, 2, 17, 40, 24, 20), 1, 9, 1),
    (Case(1, 16, 1, 9, 300, 64, 64), 1, 120, 1),
    (Case(2, 6, 2, 5, 333, 40, 31, q_offset=300), 2, 30, 3),
    (Case(1, 4, 2, 33, 90, 21, 40, window=(60, 3), causal=False, sinks=True), 4, 40, 1),
    (Case(3, 2, 2, 1, 1500, 64, 64, causal=False), 2, 40, 40),
    (Case(1, 20, 1, 3, 2500, 33, 17, causal=False, softcap=3.0), 1, 30, 64),
    (Case(2, 4, 2, 21, 70, 16, 20, dropout_p=0.4, key_ranges="pieces"), 2, 30, 1),
    (Case(1, 9, 3, 30, 64, 80, 72, dropout_p=0.2, q_offset=11), 9, 6, 16),
    (Case(2, 4, 1, 12, 50, 24, 24, mask="random hk", bias="bands bhqk", alibi="bh"), 1, 25, 1),
    (Case(2, 6, 2, 12, 50, 24, 24, mask="random bq", bias="float k", relative="bh 5", sinks=True), 6, 25, 1),
    (Case(1, 4, 4, 70, 20, 8, 8, bias="bands q strided", alibi="h", relative="- 30", wide=True), 4, 3, 6),
    (Case(1, 2, 1, 4, 100, 512, 576, causal=False), 1, 50, 1),
    # many queries of few rows: segments of the keys, and queries with few visible keys
    (Case(1, 3, 3, 100, 100, 64, 64), 1, 100, 1),
    (Case(1, 2, 2, 66, 2600, 72, 70, window=(2500, 0), sinks=True), 1, 240, 1),
    (Case(1, 2, 2, 70, 100, 64, 64, sinks=True), 1, 60, 1),
    (Case(2, 8, 2, 65, 1500, 80, 33, causal=False), 2, 200, 1),
    (Case(1, 16, 2, 64, 4000, 64, 64, key_ranges="random"), 16, 200, 1),
    (Case(1, 8, 1, 70, 1200, 40, 80, q_offset=900), 1, 40, 8),
    # many queries of more rows: these lie on the lanes, in one to four vectors
    (Case(1, 16, 1, 80, 700, 64, 64), 1, 200, 1),
    (Case(1, 12, 1, 66, 2600, 72, 70, window=(2500, 0), sinks=True), 1, 420, 1),
    (Case(2, 18, 2, 70, 400, 20, 17, causal=False), 2, 60, 1),
    (Case(1, 40, 1, 65, 300, 33, 48, key_ranges="random"), 1, 90, 1),
    (Case(2, 64, 1, 64, 900, 24, 33, q_offset=700), 1, 40, 16),
    # many queries that list blocks: tiles of several queries, blocks in pieces, blocks of which queries see a part
    (Case(1, 16, 1, 80, 700, 64, 64), 1, 6, 64),
    (Case(2, 6, 2, 70, 333, 40, 31, window=(200, 0), sinks=True), 2, 5, 40),
    (Case(1, 3, 3, 100, 900, 72, 33, causal=False), 3, 4, 130),
    (Case(1, 40, 1, 65, 300, 33, 48, key_ranges="random"), 1, 5, 33),
    (Case(2, 18, 2, 130, 500, 64, 80, q_offset=300), 18, 7, 48),
    # more queries of a work item than backward turns the lists of at once; rows without keys
    (Case(8, 32, 1, 130, 96, 16, 20), 1, 3, 32),
    # blocks that are read in place
    (Case(1, 16, 1, 9, 1000, 64, 64), 1, 8, 64),
    (Case(1, 12, 1, 5, 700, 33, 48, dropout_p=0.2, sinks=True), 1, 6, 128),
    (Case(2, 18, 2, 7, 333, 40, 64, mask="random hk", softcap=2.0), 2, 5, 40),
]


def lists(case: Case, of: int, entries: int, block: int) -> Tensor:
    """Lists in any order, with repetitions and -1, shared by all sequences or not."""
    blocks = -(-case.seqlen_k // block)
    shape = (1 if case.seqlen_q % 2 else case.batch, of, case.seqlen_q, entries)
    return torch.randint(-1, blocks, shape, dtype=torch.int32 if of > 1 else torch.int64)


def as_mask(selected: Tensor, block: int, num_heads: int, seqlen_k: int) -> Tensor:
    """bool (batch or 1, num_heads, Sq, Sk)."""
    found = (selected.unsqueeze(-1) == torch.arange(seqlen_k) // block).any(-2)
    return found.repeat_interleave(num_heads // selected.shape[1], 1)


@each_dtype
@pytest.mark.parametrize(("case", "of", "entries", "block"), CASES, ids=str)
def test_forward_and_backward(isa: str, case: Case, of: int, entries: int, block: int, dtype: torch.dtype) -> None:
    seeded(0)
    selected = lists(case, of, entries, block)
    options = case.given(dtype) | {"selected": selected, "selected_block": block}
    Truth(case.drawn(dtype), options).assert_allows(attention)


@pytest.mark.parametrize(("case", "of", "entries", "block"), CASES, ids=str)
def test_the_result_of_the_same_mask(case: Case, of: int, entries: int, block: int) -> None:
    """Gradients too, and the same weights are dropped."""
    selected = lists(case, of, entries, block)
    options = case.given(torch.float64)
    mask = as_mask(selected, block, case.num_heads_q, case.seqlen_k)
    masked = options | {"mask": mask & options["mask"] if "mask" in options else mask}
    drawn = case.drawn(torch.float64)
    found = run(attention, *drawn, **options, selected=selected, selected_block=block)
    close = 1e-6 if case.wide else 1e-9  # gradients of float32 options are rounded to float32
    torch.testing.assert_close(found, run(attention, *drawn, **masked), rtol=close, atol=close / 100)


@each_dtype
def test_keys_that_are_not_listed_have_no_effect(isa: str, dtype: torch.dtype) -> None:
    case = Case(1, 6, 2, 5, 200, 32, 40, causal=False)
    selected = torch.randint(0, 100, (1, 1, 5, 20))
    (q, k, v), dout, dlse = case.drawn(dtype)
    clean = run(attention, (q, k, v), dout, dlse, causal=False, selected=selected)
    for bad in (math.nan, math.inf):
        k_, v_ = k.clone(), v.clone()
        k_[:, :, 100:], v_[:, :, 100:] = bad, bad
        assert_equal(run(attention, (q, k_, v_), dout, dlse, causal=False, selected=selected), clean)


@pytest.mark.parametrize("heads", [(6, 2), (16, 1), (3, 3)])
def test_threads_change_no_bit_of_listed_blocks(heads: tuple[int, int]) -> None:
    case = Case(2, *heads, 300, 900, 64, 64)
    selected = torch.randint(-1, 19, (2, heads[1], 300, 6))
    again = torch.cat([selected, selected[..., :2]], -1).flip(-1)
    drawn, bits = case.drawn(torch.float32), []
    threads = torch.get_num_threads()
    try:
        for count, one in ((1, selected), (2, selected), (3, again)):
            torch.set_num_threads(count)
            bits.append(run(attention, *drawn, selected=one, selected_block=48))
    finally:
        torch.set_num_threads(threads)
    assert_equal(bits[0], bits[1])
    assert_equal(bits[0], bits[2])


@pytest.mark.parametrize("of", [1, 2, 6])
def test_order_repetitions_and_threads_change_no_bit(of: int) -> None:
    case = Case(2, 6, 2, 40, 500, 64, 64)
    selected = torch.randint(-1, 500, (2, of, 40, 60))
    again = torch.cat([selected, selected[..., :7], torch.full((2, of, 40, 3), -1)], -1).flip(-1)
    drawn, bits = case.drawn(torch.float32), []
    threads = torch.get_num_threads()
    try:
        for count, one in ((1, selected), (2, selected), (3, again)):
            torch.set_num_threads(count)
            bits.append(run(attention, *drawn, selected=one, dropout_p=0.2, dropout_seed=3))
    finally:
        torch.set_num_threads(threads)
    assert_equal(bits[0], bits[1])
    assert_equal(bits[0], bits[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "learned",
    [{"alibi_slopes": (1,)}, {"bias": (1,)}, {"bias": (1, 1, 200, 1)}, {"relative_bias": (1, 9)}],
    ids=lambda x: next(iter(x)),
)
def test_threads_change_no_bit_of_sums_over_all_pairs(learned: dict[str, Any], dtype: torch.dtype) -> None:
    """A sum of one head over 100,000 listed keys."""
    case = Case(1, 1, 1, 200, 600, 16, 16, causal=False)
    selected, drawn, bits = torch.randint(0, 600, (1, 1, 200, 500)), case.drawn(dtype), []
    options = {name: torch.rand(shape, dtype=dtype) for name, shape in learned.items()}
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            bits.append(run(attention, *drawn, causal=False, selected=selected, **options))
    finally:
        torch.set_num_threads(threads)
    assert_equal(bits[0], bits[1])
    assert_equal(bits[0], bits[2])


@pytest.mark.parametrize(("block", "entries"), [(1, 5), (32, 1)])
def test_repeated_and_unused_entries_choose_no_kernel(isa: str, block: int, entries: int) -> None:
    """Kernels are chosen by how many keys queries list: here just too few for segments of keys, and for blocks."""
    case = Case(1, 6, 2, 70, 640 if block > 1 else 100, 64, 64, causal=False)
    selected = torch.randint(0, case.seqlen_k // block, (1, 1, 70, entries))
    drawn, options = case.drawn(torch.float32), {"causal": False, "selected_block": block}
    bits = run(attention, *drawn, selected=selected, **options)
    for more in (selected.repeat(1, 1, 1, 9), torch.full((1, 1, 70, 9 * entries), -1)):
        assert_equal(bits, run(attention, *drawn, selected=torch.cat([selected, more], -1), **options))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "entries"), [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
def test_empty(seqlen_q: int, seqlen_k: int, entries: int) -> None:
    case = Case(2, 4, 2, seqlen_q, seqlen_k, 16, 16, causal=False)
    options = {"causal": False, "bias": torch.randn(1, 4, seqlen_q, seqlen_k), "alibi_slopes": torch.rand(4)}
    options["mask"] = torch.ones(1, 1, seqlen_q, seqlen_k, dtype=torch.bool)
    selected = torch.full((1, 2, seqlen_q, entries), -1)
    out, lse, *gradients = run(attention, *case.drawn(torch.float32), **options, selected=selected)
    assert not any(t.any() for t in (out, *gradients))
    assert (lse == -math.inf).all()


@pytest.mark.parametrize(("heads", "heads_kv"), [(0, 0), (0, 3), (4, 2)])
def test_slopes_of_any_strides_and_no_heads(heads: int, heads_kv: int) -> None:
    q, k, v = (t.requires_grad_() for t in Case(3, heads, heads_kv, 5, 9, 16, 16).inputs(torch.float64))
    slopes = torch.rand(heads, 3, dtype=torch.float64).mT
    offset, selected = torch.tensor([4, 0, 9, 0, 1])[::2], torch.randint(-1, 9, (3, 9, 5, 1)).transpose(1, 3)
    out = attention(q, k, v, alibi_slopes=slopes, q_offset=offset, selected=selected)
    torch.autograd.grad(out.sum(), (q, k, v))
    mask = (selected.unsqueeze(-1) == torch.arange(9)).any(-2)
    torch.testing.assert_close(out, attention(q, k, v, alibi_slopes=slopes, q_offset=offset, mask=mask))


def test_weights_are_in_the_order_of_the_lists() -> None:
    q, k, v = Case(2, 4, 2, 6, 30, 16, 16).inputs(torch.float64)
    selected = torch.randint(-1, 30, (2, 2, 6, 8))
    selected[..., 5] = selected[..., 2]
    weights = attention_weights(q, k, selected=selected)
    keys = selected.clamp(min=0)[..., None].expand(-1, -1, -1, -1, 16)
    values = v[:, :, None].expand(-1, -1, 6, -1, -1).gather(3, keys).repeat_interleave(2, 1)
    torch.testing.assert_close((weights[..., None, :] @ values).squeeze(-2), attention(q, k, v, selected=selected))
    assert not weights[..., 5].any()
    some = attention_weights(q, k, selected=selected, heads=[3, 0], rows=[-1, 2])
    torch.testing.assert_close(some, weights[:, [3, 0]][:, :, [-1, 2]])


@pytest.mark.parametrize("page_size", [None, 16])
def test_over_a_cache(page_size: int | None) -> None:
    """Entries are positions; those from a sequence's length on are not visible."""
    case = Case(2, 4, 2, 3, 60, 32, 32)
    q, k, v = case.inputs(torch.float32)
    cache = KVCache(2, 2, 64, 32, page_size=page_size)
    cache.append(k, v, torch.tensor([60, 41]))
    selected = torch.randint(-1, 64, (2, 1, 3, 12))
    out = attention_with_cache(q, cache, q_offset=torch.tensor([57, 38]), selected=selected)
    mask = as_mask(selected, 1, 4, 60) & (torch.arange(60) < torch.tensor([60, 41])[:, None, None, None])
    torch.testing.assert_close(out, attention(q, k, v, q_offset=torch.tensor([57, 38]), mask=mask))
    ring = KVCache(2, 2, 64, 32, window=(30, 0))
    with pytest.raises(NotImplementedError, match="a cache with a window takes no selected"):
        attention_with_cache(q, ring, selected=selected)


def test_compiled() -> None:
    """In one graph, with gradients; lists of another length take another graph."""
    case = Case(1, 4, 2, 20, 30, 16, 16)
    compiled = torch.compile(lambda *tensors, selected: attention(*tensors, selected=selected), backend="aot_eager")
    for entries in (5, 8):
        selected = torch.randint(-1, 30, (1, 2, 20, entries))
        (q, k, v), dout, _ = case.drawn(torch.float32)
        tensors = [t.requires_grad_() for t in (q, k, v)]
        found = torch.autograd.grad(compiled(*tensors, selected=selected), tensors, dout)
        assert_equal(found, torch.autograd.grad(attention(*tensors, selected=selected), tensors, dout))


def test_memory_follows_the_lists() -> None:
    """All pairs would be 8192^2 bytes as a mask, and 4 times that for each head as scores."""
    q, k, v = (torch.randn(1, 2, 8192, 16, requires_grad=True) for _ in range(3))
    selected = torch.randint(0, 8192, (1, 1, 8192, 16), dtype=torch.int32)

    def step() -> None:
        attention(q, k, v, selected=selected).sum().backward()

    step()
    assert memory_needed(step) < 8192**2 / 2


def test_a_block_of_more_keys_than_there_are() -> None:
    """Its size costs no memory, in second derivatives either."""
    q, k, v = Case(2, 4, 2, 5, 9, 8, 8).inputs(torch.float64)
    selected = torch.tensor([0, -1]).expand(1, 1, 5, 2).clone()
    selected[0, 0, 2] = -1
    leaf = q.requires_grad_()
    out = attention(leaf, k, v, selected=selected, selected_block=2**31 - 1)
    mask = (torch.arange(5) != 2)[:, None]
    expected = attention(leaf, k, v, mask=mask)
    torch.testing.assert_close(out, expected)
    twice = [torch.autograd.grad(o.square().sum(), leaf, create_graph=True)[0].square().sum() for o in (out, expected)]
    torch.testing.assert_close(*(torch.autograd.grad(t, leaf) for t in twice))
