"""Promise: ranges of pyattn.masks stay KeyRanges through any operation, and are refused where they would be wrong."""

import copy
import io
import operator
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.modules import D_IN, cache_for, made, pair
from torch import Tensor, nn

from pyattn import KVCache, attention, attention_varlen, attention_weights, attention_with_cache, masks
from pyattn.masks import KeyRanges
from pyattn.parts import attention_backward

ROWS = 6
MAKERS: dict[str, Callable[[], KeyRanges]] = {
    "documents": lambda: masks.documents([4, 2]),
    "chunked": lambda: masks.chunked(ROWS, 4),
    "padding": lambda: masks.padding([ROWS, 3], ROWS, "left"),
    "prefix_lm": lambda: masks.prefix_lm(torch.tensor([3, 5]), ROWS),
    "from_bool": lambda: masks.from_bool(torch.ones(ROWS, ROWS, dtype=torch.bool).tril(1)),
    "own": lambda: KeyRanges(torch.tensor([[[1, 4]] * ROWS], dtype=torch.int32)),
    "own, whole": lambda: KeyRanges(torch.tensor([[[1, 4]] * ROWS]), whole=True),
}
WHOLE = {"prefix_lm", "from_bool", "own, whole"}
REFUSED = re.escape("masks.prefix_lm and masks.from_bool give them, need causal=False, got causal=True")

each_maker = pytest.mark.parametrize("name", MAKERS)


def saved(ranges: Tensor) -> Any:
    file = io.BytesIO()
    torch.save({"ranges": ranges}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["ranges"]


def in_a_module(ranges: Tensor) -> Any:
    module, other = nn.Module(), nn.Module()
    module.register_buffer("ranges", ranges)
    other.register_buffer("ranges", torch.zeros_like(ranges))
    other.load_state_dict(copy.deepcopy(module).half().to("cpu").state_dict())
    return other.ranges


KEPT: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda r: r[:, -2:],
    "sequence": lambda r: r[0],
    "picked": lambda r: r[:, [1, 0]],
    "dtype": lambda r: r.to(torch.int32),
    "device": lambda r: r.to("meta"),
    "expand": lambda r: r[:1].expand(3, -1, -1),
    "repeat": lambda r: r.repeat(2, 1, 1),
    "clone": lambda r: r.clone(),
    "contiguous": lambda r: r.contiguous(),
    "packed": lambda r: r.flatten(0, 1),
    "reshape": lambda r: r.reshape(-1, 2),
    "unbind": lambda r: r.unbind(0)[0],
    "iterated": lambda r: next(iter(r)),
    "split": lambda r: r.split(2, 1)[1],
    "chunk": lambda r: r.chunk(2, 1)[0],
    "cat": lambda r: torch.cat([r, r], 1),
    "cat of rows by name": lambda r: torch.cat(tensors=[r, r]),
    "cat with bare": lambda r: torch.cat([torch.zeros(r.shape, dtype=r.dtype), r]),
    "stack": lambda r: torch.stack([r, r]),
    "shifted": lambda r: (r - 1).clamp(0, 3),
    "added to": lambda r: torch.ones(2, dtype=torch.int64) + r,
    "where": lambda r: torch.where(torch.tensor(True), r, 0),
    "pickle": lambda r: pickle.loads(pickle.dumps(r)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "save": saved,
    "buffer": in_a_module,
    "as_tensor": torch.as_tensor,
    "again": lambda r: KeyRanges(r, whole=r.whole),
}


@each_maker
@pytest.mark.parametrize("how", KEPT)
def test_kept(name: str, how: str) -> None:
    ranges = MAKERS[name]()
    numbers = torch.tensor(ranges.tolist(), dtype=ranges.dtype)
    found = KEPT[how](ranges)
    assert isinstance(found, KeyRanges)
    assert found.whole == ranges.whole == (name in WHOLE)
    expected = numbers if how == "again" else KEPT[how](numbers)
    assert type(expected) is Tensor
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert found.is_meta or torch.equal(found, expected)


SEVERAL: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda r: r[:, -2:],
    "sequence": lambda r: r[0],
    "first intervals": lambda r: r[:, :, 0],
    "expand": lambda r: r.expand(3, -1, -1, -1),
    "packed": lambda r: r.flatten(0, 1),
    "shifted": lambda r: (r - 1).clamp(0, 3),
    "pickle": lambda r: pickle.loads(pickle.dumps(r)),
    "same shape": lambda r: r.view(r.shape),
}


def test_several_intervals() -> None:
    """Rows and intervals stay apart: a reshape that mixes them gives a bare tensor, which attention refuses."""
    ranges = masks.from_bool(torch.tensor([[1, 0, 1, 1], [1, 0, 0, 1], [1, 1, 1, 1]]) > 0, intervals=2)
    assert ranges.shape == (1, 3, 2, 2)
    for how in SEVERAL.values():
        assert isinstance(how(ranges), KeyRanges)
        assert how(ranges).whole
    for how in (lambda r: r.flatten(1, 2), lambda r: r.reshape(1, 6, 2), lambda r: r.reshape(-1, 2)):
        assert type(how(ranges)) is Tensor
    assert type(ranges[..., 0]) is Tensor
    with pytest.raises(ValueError, match=r"or \(1 or 1, 3 or 1, 1 to 4, 2\), got \[1, 6, 2\]$"):
        attention(*torch.randn(3, 1, 1, 3, 4), causal=False, key_ranges=ranges.flatten(1, 2))


LOST: dict[str, Callable[[Tensor], Any]] = {
    "begins": lambda r: r[..., 0],
    "ends": lambda r: r.select(-1, 1),
    "both": lambda r: r.unbind(-1)[0],
    "empty": lambda r: r[..., 1:] > r[..., :1],
    "compared": lambda r: r == r,
    "float": lambda r: r.double(),
    "most": lambda r: r.amax(1).amax(-1),
    "as_subclass": lambda r: r.as_subclass(Tensor),
}


@each_maker
@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("rows", [2, ROWS])
def test_lost(name: str, how: str, rows: int) -> None:
    """A result that holds no pairs is a bare tensor, even if two queries give a last dimension of 2."""
    ranges = MAKERS[name]()[:, :rows]
    found = LOST[how](ranges)
    assert type(found) is Tensor
    assert torch.equal(found, LOST[how](torch.tensor(ranges.tolist(), dtype=ranges.dtype)))


@each_maker
def test_compared_and_shown(name: str) -> None:
    ranges = MAKERS[name]()
    numbers = torch.tensor(ranges.tolist(), dtype=ranges.dtype)
    assert torch.equal(ranges, numbers)
    assert torch.equal(numbers, ranges)
    assert ranges.numpy().tolist() == numbers.tolist()
    scope = {"KeyRanges": KeyRanges, "tensor": torch.tensor, "torch": torch}
    again = eval(repr(ranges), scope)
    assert torch.equal(again, ranges)
    assert again.whole == ranges.whole
    assert ("whole=True" in repr(ranges)) == ranges.whole


@each_maker
def test_changed_in_place(name: str) -> None:
    """The operators see the new values, whoever wrote them."""
    ranges = MAKERS[name]()
    view = ranges[:, :1]
    attention(*torch.randn(3, len(ranges), 1, ROWS, 4), causal=False, key_ranges=ranges)
    view.fill_(0)
    ranges[:, 1] = torch.tensor([0, 1])
    _, lse = attention(*torch.randn(3, len(ranges), 1, ROWS, 4), causal=False, key_ranges=ranges, return_lse=True)
    assert lse[:, :, 0].isneginf().all()
    assert lse[:, :, 1].isfinite().all()


def seen_in(ranges: Tensor) -> Tensor:
    key = torch.arange(ROWS)
    return (ranges[..., :1] <= key) & (key < ranges[..., 1:])


@pytest.mark.parametrize("one", MAKERS)
@pytest.mark.parametrize("other", MAKERS)
def test_two_together(one: str, other: str) -> None:
    a, b = MAKERS[one](), MAKERS[other]()
    bare = torch.tensor(b.tolist())
    for both in (masks.within(a, b), masks.within(b, a)):
        assert torch.equal(seen_in(both), seen_in(a).logical_and(seen_in(b)))
        assert isinstance(both, KeyRanges)
        assert both.whole == (a.whole or b.whole)
    assert masks.within(a, bare).whole == masks.within(bare, a).whole == a.whole
    assert type(masks.within(bare, bare)) is Tensor
    for bits in (operator.and_, operator.iand, operator.or_, operator.ior):
        for pair_of in ((a, b), (a, bare), (bare, a)):
            with pytest.raises(NotImplementedError, match=r"^pyattn: masks.within gives .* both .* bitwise __"):
                bits(*pair_of)
    for join in (lambda: torch.cat([a.long(), b.long()]), lambda: torch.maximum(a[:1], b[:1])):
        if a.whole == b.whole:
            assert join().whole == a.whole
        else:
            with pytest.raises(ValueError, match=r"^pyattn: key_ranges that are combined .*, got both$"):
                join()


def cached(q: Tensor, k: Tensor, v: Tensor, page_size: int | None = None, **options: Any) -> Tensor:
    cache = KVCache(len(q), 1, ROWS, 4, page_size=page_size, dtype=q.dtype)
    cache.append(k, v)
    return attention_with_cache(q, cache, **options)


def packed(q: Tensor, k: Tensor, v: Tensor, key_ranges: Tensor, **options: Any) -> Tensor:
    ends, rows = torch.arange(len(q) + 1) * ROWS, [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
    return attention_varlen(*rows, ends, ends, ROWS, ROWS, key_ranges=key_ranges.flatten(0, 1), **options)


CALLS: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "weights": lambda q, k, v, **options: attention_weights(q, k, **options),
    "backward": lambda q, k, v, **options: (
        attention_backward(q, q, k, v, *attention(q, k, v, return_lse=True, causal=False), **options).q
    ),
    "cache": cached,
    "pages": lambda *qkv, **options: cached(*qkv, page_size=16, **options),
    "one query": lambda q, k, v, key_ranges, **options: cached(
        q[:, :, -1:], k, v, key_ranges=key_ranges[:, -1:], **options
    ),
    "varlen": packed,
}


OUT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "attention": lambda out, _: out,
    "weights": lambda weights, v: weights @ v,
    "cache": lambda out, _: out,
    "pages": lambda out, _: out,
    "varlen": lambda out, _: out.unflatten(0, (-1, ROWS)).transpose(1, 2),
}


@pytest.mark.parametrize("call", OUT)
@pytest.mark.parametrize("causal", [True, False])
def test_calls_with_several_intervals(call: str, causal: bool) -> None:
    ranges = torch.cat([masks.streaming(ROWS, 1, (1, 1)), masks.streaming(ROWS, 2, (0, 0))])
    q, k, v = torch.randn(3, 2, 1, ROWS, 4, dtype=torch.float64).unbind(0)
    seen = seen_in(ranges[:, :, 0]).logical_or(seen_in(ranges[:, :, 1]))
    expected = attention(q, k, v, causal=causal, mask=seen[:, None])
    out = CALLS[call](q, k, v, causal=causal, key_ranges=ranges)
    torch.testing.assert_close(OUT[call](out, v), expected, rtol=1e-12, atol=1e-12)


@each_maker
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("causal", [True, False, None])
@pytest.mark.parametrize("learning", [False, True])
def test_calls(name: str, call: str, causal: bool | None, learning: bool) -> None:
    """None leaves causal at its default."""
    ranges = MAKERS[name]()
    qkv = torch.randn(3, len(ranges), 1, ROWS, 4).unbind(0)
    qkv = tuple(t.requires_grad_(learning) for t in qkv) if call != "backward" else qkv
    options = {} if causal is None else {"causal": causal}
    if name in WHOLE and causal is not False:
        with pytest.raises(ValueError, match=f"^pyattn: key_ranges that are the whole mask, as {REFUSED}$"):
            CALLS[call](*qkv, key_ranges=ranges, **options)
        return
    bare = torch.tensor(ranges.tolist(), dtype=ranges.dtype)
    results = [CALLS[call](*qkv, key_ranges=r, **options) for r in (ranges, bare)]
    assert type(results[0]) is Tensor
    assert torch.equal(*results)
    if learning and results[0].requires_grad:
        assert torch.equal(*(torch.autograd.grad(out.sin().sum(), qkv[0])[0] for out in results))


@pytest.mark.parametrize("page_size", [None, 16])
def test_modules(page_size: int | None) -> None:
    """Causal modules refuse a whole mask before they append to a cache; a module without its own mask takes it."""
    x, ranges = torch.randn(2, 9, D_IN, dtype=torch.float64), masks.prefix_lm(torch.tensor([3, 6]), 9)
    for module in (made("MultiHeadAttention"), made("GroupedQueryAttention"), pair("MHAEinsum")[0].double()):
        cache = cache_for(module, page_size=page_size)
        for options in ({}, {"kv_cache": cache}):
            with pytest.raises(ValueError, match=REFUSED):
                module(x, key_ranges=ranges, **options)
        assert cache.lengths.tolist() == [0, 0]
    module = made("Attention")
    assert torch.equal(module(x, key_ranges=ranges), module(x, key_ranges=ranges.as_subclass(Tensor)))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: KeyRanges([[0, 1]]), TypeError, "ranges must be Tensor, got [[0, 1]]"),
        (lambda: KeyRanges(torch.zeros(3, 2)), TypeError, "ranges must be int32 or int64, got torch.float32"),
        (lambda: KeyRanges(torch.tensor([1, 2, 3])), ValueError, "ranges must have shape (..., 2), got (3,)"),
        (lambda: KeyRanges(torch.tensor([1, 2]), whole=1), TypeError, "whole must be bool, got 1"),
    ],
)
def test_errors(make: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^pyattn: {re.escape(message)}$"):
        make()


WRITING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy_": lambda r, other: r.copy_(other),
    "assigned": lambda r, other: r.__setitem__(slice(0, 1), other),
    "added to": lambda r, other: r.__iadd__(other),
    "out": lambda r, other: torch.add(r, other, out=r),
}


@pytest.mark.parametrize("how", WRITING)
def test_nothing_is_written_before_the_refusal(how: str) -> None:
    ranges, whole = KeyRanges(torch.tensor([[[0, 1]]])), KeyRanges(torch.tensor([[[0, 2]]]), whole=True)
    for target, other in ((ranges, whole), (whole, ranges)):
        before = target.tolist()
        with pytest.raises(ValueError, match="must all be the whole mask"):
            WRITING[how](target, other)
        assert target.tolist() == before
    WRITING[how](ranges, KeyRanges(torch.tensor([[[0, 1]]])))
    assert ranges.tolist() != [[[0, 1]]] or how in ("copy_", "assigned")
