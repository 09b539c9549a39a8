"""Promise: pages that sequences share are read once for all of them, with the results of reading them for each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.assertions import assert_close, assert_threads_change_no_bit, graph_of, refused
from support.axes import PUBLIC, forms, of_axes, with_seed
from support.cases import assert_equal, each_dtype
from support.yardstick import assert_accurate
from torch import Tensor

from pyattn import KVCache, attention, attention_with_cache, reference, set_row_invariant
from pyattn.cache import paged_attention, shared_pages
from pyattn.options.axes import AXES, having, part

PROMPTS, EACH = 2, 3
B, HQ, HKV, D, PAGE, SLOTS = PROMPTS * EACH, 4, 2, 20, 16, 128
LENGTH = 50
"""A prompt: three full pages, and two positions in a page that each sequence copies."""

FORMS = [(name, *form) for name in PUBLIC for form in forms(name)]


@pytest.fixture(autouse=True)
def any_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little sharing saves."""
    monkeypatch.setattr(shared_pages, "LEAST_BYTES", 1)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """The result of a call that reads the pages of each sequence."""

    def result(call: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(shared_pages, "LEAST_BYTES", 1 << 60)
            return call()

    return result


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The block table's shape in each call of the operator."""
    shapes: list[tuple[int, ...]] = []
    operator = paged_attention.ops.attention_paged_forward

    def counted(q: Tensor, k: Tensor, v: Tensor, table: Tensor, *rest: Any) -> Any:
        shapes.append(tuple(table.shape))
        return operator(q, k, v, table, *rest)

    monkeypatch.setattr(paged_attention.ops, "attention_paged_forward", counted)
    return shapes


def cache_of(
    dtype: torch.dtype = torch.float64, new: int = 9, lengths: list[int] | None = None, **sizes: Any
) -> tuple[KVCache, Tensor, Tensor]:
    """A cache whose sequences share the pages of two prompts, and the keys and values of each of its sequences."""
    cache = KVCache(B, HKV, SLOTS, D, dtype=dtype, page_size=PAGE, **sizes)
    prompt = torch.randn(2, PROMPTS, HKV, LENGTH, D).to(dtype).repeat_interleave(EACH, 1)
    own = torch.randn(2, B, HKV, new, D).to(dtype)
    keys, values = torch.cat([prompt, own], 3)
    cache.append(*prompt)
    cache.reorder([b // EACH * EACH for b in range(B)])
    cache.append(*own, lengths=lengths)
    return cache, keys, values


@each_dtype
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_accuracy(isa: str, calls: list[tuple[int, ...]], dtype: torch.dtype, seqlen_q: int) -> None:
    cache, k, v = cache_of(dtype)
    q = torch.randn(B, HQ, seqlen_q, D).to(dtype)
    options: dict[str, Any] = {"softcap": 4.0, "sinks": torch.randn(HQ).to(dtype), "window": (40, 0)}
    ours = attention_with_cache(q, cache, return_lse=True, **options)
    assert calls == [(PROMPTS, 3), (B, SLOTS // PAGE - 3)]
    plain = reference.attention(q, k, v, return_lse=True, **options)
    exact = reference.attention(*(t.double() for t in (q, k, v)), return_lse=True, **options)
    for name, *one in zip(("out", "lse"), ours, plain, exact, strict=True):
        assert_accurate(name, *one)


@each_dtype
def test_invariant_rows_share_none(isa: str, calls: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    """A merge would change their bits."""
    cache, k, v = cache_of(dtype)
    q = torch.randn(B, HQ, 3, D).to(dtype)
    with set_row_invariant(True):
        assert_equal((attention_with_cache(q, cache),), (attention(q, k, v),))
    assert calls == [(B, SLOTS // PAGE)]


@pytest.mark.parametrize(("name", "broadcast", "left_out"), FORMS)
def test_every_option(apart: Callable[..., Any], name: str, broadcast: str, left_out: int) -> None:
    """Compared with attention over the keys so far, and the call that reads all pages of each sequence."""
    cache, k, v = cache_of()
    q, length = torch.randn(B, HQ, 2, D, dtype=torch.float64), k.shape[2]
    sizes = {"b": B, "h": HQ, "g": HKV, "q": 2, "k": SLOTS, "n": 2, "r": 9, "2": 2}
    given: dict[str, Any] = with_seed(name, of_axes(name, sizes, broadcast, left_out))
    if name == "q_offset":
        given[name] = given[name] + length - 4
    if name == "selected":
        given[name] = torch.where(given[name] < length, given[name], -1)
    direct = given | {key: part(AXES[key], given[key], {"k": slice(length)}) for key in having("k") if key in given}
    if name == "key_ranges":
        direct[name] = given[name].clamp(max=length)

    def call() -> Any:
        return attention_with_cache(q, cache, return_lse=True, return_max_score=True, **given)

    ours = call()
    assert_close(ours, apart(call))
    assert_close(ours, attention(q, k, v, return_lse=True, return_max_score=True, **direct))


RAGGED: list[dict[str, Any]] = [
    {},
    {"window": (5, 0)},
    {"window": (30, -1), "causal": False},
    {"q_offset": 57},
    {"q_offset": torch.tensor([57, 52, 58, 20, 55, 56])},
    {"causal": False},
    {"alibi_slopes": torch.rand(HQ).double()},
    {"relative_bias": torch.randn(HQ, 61).double(), "sinks": torch.randn(HQ).double()},
    {"key_ranges": torch.tensor([[[3, 57]], [[5, 54]], [[0, 50]], [[10, 57]], [[11, 57]], [[12, 12]]])},
    {"mask": torch.rand(B, 1, 1, SLOTS) < 0.7},
]


@pytest.mark.parametrize("options", RAGGED, ids=lambda options: " ".join(options))
@pytest.mark.parametrize("seqlen_q", [1, 2, 9])
def test_sequences_of_different_lengths(apart: Callable[..., Any], options: dict[str, Any], seqlen_q: int) -> None:
    """Padded queries of a ragged append have out 0."""
    cache, *_ = cache_of(lengths=[9, 2, 7, 5, 0, 6])
    q = torch.randn(B, HQ, seqlen_q, D, dtype=torch.float64)

    def call() -> Any:
        return attention_with_cache(q, cache, return_lse=True, **options)

    assert_close(call(), apart(call))


def test_a_tree_of_drafts(apart: Callable[..., Any]) -> None:
    cache, *_ = cache_of(new=5)
    q, tree = torch.randn(B, HQ, 5, D, dtype=torch.float64), torch.eye(5, dtype=torch.bool)

    def call() -> Any:
        return attention_with_cache(q, cache, mask=tree, return_lse=True)

    assert_close(call(), apart(call))


def test_latent_vectors(apart: Callable[..., Any], calls: list[tuple[int, ...]]) -> None:
    """Values that are part of the keys."""
    cache = KVCache(3, 1, SLOTS, D, head_dim_v=16, dtype=torch.float64, page_size=PAGE, shared_values=True)
    cache.append(torch.randn(1, 1, 40, D).double().expand(3, -1, -1, -1))
    cache.reorder([0, 0, 0])
    cache.append(torch.randn(3, 1, 1, D).double())
    q = torch.randn(3, 16, 1, D, dtype=torch.float64)
    ours = attention_with_cache(q, cache)
    assert calls == [(1, 2), (3, 6)]
    assert_close(ours, apart(lambda: attention_with_cache(q, cache)))


Q = torch.randn(B, HQ, 1, D, dtype=torch.float64)
WHOLE = [(B, SLOTS // PAGE)]
"""One call over all pages."""


def test_nothing_to_share(calls: list[tuple[int, ...]]) -> None:
    """Pages that only some share, prompts with different numbers of sequences, and one sequence without full pages."""
    for order in ([0, 1, 2, 3, 4, 5], [0, 0, 2, 2, 2, 5], [0, 1, 0, 1, 0, 1]):
        cache = KVCache(B, HKV, SLOTS, D, dtype=torch.float64, page_size=PAGE)
        cache.append(*torch.randn(2, B, HKV, LENGTH, D).double())
        cache.reorder(order)
        attention_with_cache(Q, cache)
        assert calls == WHOLE, order
        calls.clear()
    cache, *_ = cache_of()
    cache.truncate([59, 59, 15, 59, 59, 59])
    attention_with_cache(Q, cache)
    assert calls == WHOLE


def test_as_many_pages_as_all_share(calls: list[tuple[int, ...]], apart: Callable[..., Any]) -> None:
    """After a page of two tokens less; a common beginning of both prompts counts as one prompt's."""
    cache, *_ = cache_of()
    cache.truncate([59, 59, 40, 59, 59, 59])
    ours = attention_with_cache(Q, cache)
    assert calls.pop(0) == (PROMPTS, 2)
    assert_close(ours, apart(lambda: attention_with_cache(Q, cache)))
    calls.clear()
    assert cache.block_table is not None
    cache.block_table[3:, 0] = cache.block_table[0, 0]
    ours = attention_with_cache(Q, cache)
    assert calls.pop(0) == (1, 1)
    assert_close(ours, apart(lambda: attention_with_cache(Q, cache)))


@pytest.mark.parametrize(
    "options",
    [
        {"dropout_p": 0.1, "dropout_seed": 1},
        {"bias": torch.zeros(B, 1, 1, 1)},
        {"sinks": torch.zeros(HQ, requires_grad=True)},
        {"key_ranges": torch.tensor([[[b, 59]] for b in range(B)])},
    ],
    ids=lambda options: next(iter(options)),
)
def test_calls_that_share_nothing_keep_their_bits(apart: Callable[..., Any], options: dict[str, Any]) -> None:
    cache, *_ = cache_of(torch.float32)
    q = Q.float()

    def call() -> Any:
        return attention_with_cache(q, cache, return_lse=True, **options)

    assert_equal(call(), apart(call))


def test_few_bytes_keep_their_bits(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[int, ...]]) -> None:
    """The threshold counts what is not read again: five pages of six sequences, or four of prompts of three."""
    cache, *_ = cache_of()
    saved = 3 * PAGE * HKV * 2 * D * 8 * (B - PROMPTS)
    for least, expected in ((saved, [(PROMPTS, 3), (B, 5)]), (saved + 1, WHOLE)):
        monkeypatch.setattr(shared_pages, "LEAST_BYTES", least)
        attention_with_cache(Q, cache)
        assert calls == expected
        calls.clear()
    attention_with_cache(torch.randn(B, HQ, shared_pages.MOST_QUERIES + 1, D).double(), cache)
    assert calls == WHOLE


def test_hidden_slots_never_matter() -> None:
    cache, *_ = cache_of()
    before = attention_with_cache(Q, cache, return_lse=True)
    used = torch.zeros(cache.k.shape[:2], dtype=torch.bool)
    assert cache.block_table is not None
    for length, pages in zip(cache.lengths.tolist(), cache.block_table.tolist(), strict=True):
        for position in range(length):
            used[pages[position // PAGE], position % PAGE] = True
    for storage in (cache.k, cache.v):
        storage[~used] = torch.nan
    assert_equal(attention_with_cache(Q, cache, return_lse=True), before)


def test_threads_change_no_bit(threads: None) -> None:
    cache, *_ = cache_of(torch.float32)
    assert_threads_change_no_bit(lambda: attention_with_cache(Q.float(), cache, return_lse=True))


def test_compiled_and_mapped(apart: Callable[..., Any]) -> None:
    """Tables of graphs and transforms can't be read: each sequence's pages are."""
    cache, *_ = cache_of()
    expected = apart(lambda: attention_with_cache(Q, cache))
    assert_close(graph_of(lambda q: attention_with_cache(q, cache))(Q), expected)
    assert_close(torch.vmap(lambda q: attention_with_cache(q, cache))(Q[None])[0], expected)


@pytest.mark.parametrize(
    ("q", "options", "message"),
    [
        ((5, HQ, 1, D), {}, "q must have the cache's batch, got 5 and 6"),
        ((B, 3, 1, D), {}, "num_heads_q must be a multiple of the cache's num_heads_kv, got 3 and 2"),
        ((B, HQ, 1, 8), {}, "q must have the cache's head_dim, got 8 and 20"),
        ((B, HQ, 1, D), {"alibi_slopes": torch.zeros(3)}, "alibi_slopes must have"),
        ((B, HQ, 1, D), {"mask": torch.ones(200) > 0}, "mask must"),
        (
            (B, HQ, 1, D),
            {"key_ranges": torch.tensor([[[0, 200]]])},
            "key_ranges must hold 0 <= begin <= end <= ",
        ),
    ],
)
def test_refusals(q: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    cache, *_ = cache_of()
    with refused(ValueError, message):
        attention_with_cache(torch.zeros(q, dtype=torch.float64), cache, **options)
