"""Promise: each function of pyattn.masks gives the ranges of the mask drawn in its docstring, or names the fault."""

import pytest
import torch
from support.assertions import graph_of, refused
from support.cases import assert_equal
from torch import Tensor

import pyattn
from pyattn import masks
from pyattn.masks.key_ranges import by_interval, check_ranges


def seen(ranges: Tensor, seqlen_k: int) -> Tensor:
    """bool (B, seqlen_q, seqlen_k), True if the key lies in the query's range, or in one of its ranges."""
    assert ranges.dtype == torch.int64
    check_ranges(ranges, seqlen_k)
    key, ranges = torch.arange(seqlen_k, device=ranges.device), by_interval(ranges)
    return ((ranges[..., :1] <= key) & (key < ranges[..., 1:])).any(2)


def same_group(groups: list[int]) -> Tensor:
    group = torch.tensor(groups)
    return (group == group[:, None])[None]


@pytest.mark.parametrize("given", [list, tuple, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)])
def test_documents(given):
    groups = [0] * 3 + [2] * 1 + [3] * 4
    assert torch.equal(seen(masks.documents(given([3, 0, 1, 4, 0])), 8), same_group(groups))
    assert masks.documents(given([0])).shape == (1, 0, 2)


def test_no_documents():
    assert masks.documents([]).shape == (1, 0, 2)


@pytest.mark.parametrize("prefix", [0, 1, 3, 5])
def test_prefix_lm(prefix):
    query, key = torch.arange(5)[:, None], torch.arange(5)
    assert torch.equal(seen(masks.prefix_lm(prefix, 5), 5), ((key < prefix) | (key <= query))[None])


def test_prefixes_of_a_batch():
    many = masks.prefix_lm(torch.tensor([0, 4, 2]), 5)
    assert torch.equal(many, torch.cat([masks.prefix_lm(prefix, 5) for prefix in (0, 4, 2)]))
    assert torch.equal(many, masks.prefix_lm(torch.tensor([0, 4, 2], dtype=torch.int32), 5))


@pytest.mark.parametrize(("seqlen", "chunk"), [(7, 3), (6, 3), (2, 5), (4, 1), (0, 2)])
def test_chunked(seqlen, chunk):
    ranges = masks.chunked(seqlen, chunk)
    assert torch.equal(seen(ranges, seqlen), same_group([i // chunk for i in range(seqlen)]))
    assert ranges.shape == (1, seqlen, 2)
    assert (ranges <= seqlen).all()


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding(side):
    key = torch.arange(4)
    for given in ([0, 3, 4], torch.tensor([0, 3, 4], dtype=torch.int32)):
        lengths = torch.tensor([0, 3, 4])[:, None, None]
        token = key < lengths if side == "right" else key >= 4 - lengths
        assert torch.equal(seen(masks.padding(given, 4, side), 4), token.expand(3, 4, 4))
    assert torch.equal(masks.padding([3], 4), masks.padding([3], 4, "right"))
    for queries in (0, 1, 2, 9):  # of another sequence
        assert torch.equal(
            masks.padding([3, 4], 4, side, queries), masks.padding([3, 4], 4, side)[:, :1].repeat(1, queries, 1)
        )


@pytest.mark.parametrize(
    "ranges",
    [
        masks.documents([3, 1, 4]),
        masks.prefix_lm(torch.tensor([0, 5, 8]), 8),
        masks.chunked(8, 3),
        masks.padding([8, 2, 7], 8, "left"),
    ],
)
def test_from_bool_takes_back_what_ranges_mean(ranges):
    mask = seen(ranges, 8)
    for wide in (mask[:, None], mask[:, None].expand(-1, 5, -1, -1), mask.mT.contiguous().mT[:, None]):
        assert torch.equal(masks.from_bool(wide), ranges)
    assert torch.equal(masks.from_bool(mask[0]), ranges[:1])
    assert torch.equal(masks.from_bool(mask[:1]), ranges[:1]), "three dimensions: the first is that of heads"


def test_from_bool_of_several_intervals():
    """Masks whose rows have few enough intervals come back, of 500, with no more intervals than the row with most."""
    found = [0] * 6
    for _ in range(500):
        mask = torch.rand(2, 1, 3, 7) < torch.rand(())
        runs = (mask & ~torch.nn.functional.pad(mask, (1, 0))[..., :-1]).sum(-1).amax()
        most = max(1, int(runs))
        found[most] += 1
        for intervals in (1, 2, 3, 4):
            ranges = masks.from_bool(mask.expand(-1, 2, -1, -1), intervals=intervals)
            if most > intervals:
                assert ranges is None
                continue
            assert torch.equal(seen(ranges, 7), mask[:, 0])
            assert ranges.shape == ((2, 3, 2) if most == 1 else (2, 3, most, 2))
            assert ranges.whole
    assert min(found[1:5]) > 5
    heads = torch.tensor([[[[True, False, True]], [[True, True, True]]]])
    assert masks.from_bool(heads, intervals=2) is None
    assert masks.from_bool(torch.zeros(0, 1, 3, 4, dtype=torch.bool), intervals=3).shape == (0, 3, 2)


@pytest.mark.parametrize("first", [0, 1, 3, 9])
@pytest.mark.parametrize("window", [(1, 1), (0, 0), (-1, 0), (2, -1), (2**63 - 1, 2)])
def test_streaming(first, window):
    ranges, query, key = masks.streaming(6, first, window), torch.arange(6)[:, None], torch.arange(6)
    left, right = (6 if side < 0 else min(side, 6) for side in window)
    assert torch.equal(seen(ranges, 6), (key < first) | ((key >= query - left) & (key <= query + right))[None])
    assert ranges.shape == (1, 6, 2, 2)
    assert not ranges.whole
    assert masks.streaming(0, first, window).shape == (1, 0, 2, 2)


def test_unions_and_intersections():
    """The union of random intervals, sorted as they are and the other way round, some empty and some touching."""
    too_many = 0
    for _ in range(300):
        sets = []
        for count in torch.randint(1, 4, (2,)).tolist():
            ends = torch.randint(0, 20, (int(torch.randint(1, 3, ())), 4, 2 * count)).sort(-1).values
            sets.append(ends if count == 1 else ends.unflatten(-1, (count, 2)))
        dims = max(s.dim() for s in sets)
        one, other = (seen(s, 19) for s in sets)
        for join, expected in ((masks.union, one | other), (masks.within, one & other)):
            alone = join is masks.within and dims == 3
            runs = (expected & ~torch.nn.functional.pad(expected, (1, 0))[..., :-1]).sum(-1).amax()
            if runs > 4:
                too_many += 1
                with refused(ValueError, "a query must see at most 4 intervals of keys, got ", inside=True):
                    join(*sets)
                continue
            found = join(*sets)
            assert torch.equal(seen(found, 19), expected)
            assert found.dim() == 3 if alone or runs <= 1 else found.shape[2] == runs
            assert torch.equal(join(*(s.int() for s in sets)).long(), found)
            assert type(found) is Tensor
    assert too_many > 3
    whole = masks.prefix_lm(2, 4)
    assert masks.union(whole, masks.chunked(4, 2)).whole
    assert masks.union(whole).tolist() == whole.tolist()
    assert not masks.union(masks.chunked(4, 2), torch.tensor([[[0, 1]]])).whole


def test_from_bool_of_rows_without_keys():
    mask = torch.tensor([[False, False, False], [False, True, True]])
    assert masks.from_bool(mask).tolist() == [[[0, 0], [1, 3]]]
    assert masks.from_bool(torch.ones(2, 1, 4, 0, dtype=torch.bool)).tolist() == [[[0, 0]] * 4] * 2
    assert masks.from_bool(torch.ones(2, 0, 4, 3, dtype=torch.bool)).shape == (2, 4, 2)


def test_from_bool_of_a_mask_for_all_queries():
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]], dtype=torch.bool)[:, None, None]
    assert masks.from_bool(mask).tolist() == [[[1, 3]], [[0, 1]]]
    assert masks.from_bool(mask[0, 0, 0]).tolist() == [[[1, 3]]]


def test_from_bool_of_what_no_range_is():
    holes = torch.ones(2, 1, 3, 4, dtype=torch.bool)
    holes[1, 0, 2, 1] = False
    assert masks.from_bool(holes) is None
    heads = torch.ones(1, 2, 3, 4, dtype=torch.bool)
    heads[0, 1, 0, 0] = False
    assert masks.from_bool(heads) is None
    assert masks.from_bool(heads[:, 1:]) is not None


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: masks.documents([3, -1]), ValueError, "each of lengths must be at least 0, got -1 at 1"),
        (lambda: masks.documents([[3], [1]]), TypeError, "each of lengths must be int, got [3]"),
        (lambda: masks.documents(torch.ones(2, 2, dtype=torch.int64)), ValueError, "must have 1 dimension, got shape"),
        (lambda: masks.documents(torch.ones(2)), TypeError, "lengths must be int32 or int64, got torch.float32"),
        (lambda: masks.documents(5), TypeError, "lengths must be Sequence or Tensor, got 5"),
        (lambda: masks.prefix_lm(5, 4), ValueError, "each of prefix must be between 0 and 4, got 5 at 0"),
        (
            lambda: masks.prefix_lm(torch.tensor([0, -2]), 4),
            ValueError,
            "each of prefix must be between 0 and 4, got -2 at 1",
        ),
        (lambda: masks.prefix_lm(2, -1), ValueError, "seqlen must be at least 0, got -1"),
        (lambda: masks.prefix_lm(2.0, 4), TypeError, "prefix must be int or Tensor, got 2.0"),
        (lambda: masks.chunked(4, 0), ValueError, "chunk must be at least 1, got 0"),
        (lambda: masks.chunked(4.0, 2), TypeError, "seqlen must be int, got 4.0"),
        (lambda: masks.padding([5], 4), ValueError, "each of lengths must be between 0 and 4, got 5 at 0"),
        (lambda: masks.padding([4], 4, "top"), ValueError, "side must be 'right' or 'left', got 'top'"),
        (lambda: masks.padding([4], 4, seqlen_q=-1), ValueError, "seqlen_q must be at least 0, got -1"),
        (lambda: masks.padding([4], 4, seqlen_q=2.0), TypeError, "seqlen_q must be int, got 2.0"),
        (lambda: masks.from_bool(torch.ones(2, 2)), TypeError, "mask must be bool, True = takes part, got torch.flo"),
        (lambda: masks.from_bool(torch.ones(2).bool(), intervals=5), ValueError, "intervals must be at most 4, got 5"),
        (lambda: masks.from_bool(torch.ones(2).bool(), intervals=0), ValueError, "intervals must be at least 1, got"),
        (lambda: masks.streaming(-1, 1, (1, 0)), ValueError, "seqlen must be at least 0, got -1"),
        (lambda: masks.streaming(4, -1, (1, 0)), ValueError, "first must be at least 0, got -1"),
        (lambda: masks.streaming(4, 1, (-2, 0)), ValueError, "window must be (left, right), each at least -1, got [-2"),
        (lambda: masks.streaming(4, 1, 3), TypeError, "window must be a pair of ints (left, right)"),
        (lambda: masks.union(), ValueError, "union must be of at least one range, got none"),
        (lambda: masks.union(masks.chunked(4, 2), [0, 1]), TypeError, "ranges must be Tensor, got [0, 1]"),
        (lambda: masks.from_bool("causal"), TypeError, "mask must be Tensor, got 'causal'"),
        (lambda: masks.from_bool(torch.ones(()).bool()), ValueError, "1 to 4 dimensions, got shape ()"),
    ],
)
def test_errors(make, kind, message):
    with refused(kind, message, inside=True):
        make()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compile():
    def make(lengths: Tensor) -> tuple[Tensor, ...]:
        return masks.padding(lengths, 6, "left"), masks.chunked(6, 4), masks.prefix_lm(lengths, 6)

    def several(lengths: Tensor) -> Tensor:
        return seen(masks.within(masks.streaming(6, 1, (1, 0)), masks.padding(lengths, 6)), 6)

    lengths = torch.tensor([2, 6])
    assert_equal(graph_of(make)(lengths), make(lengths))
    assert torch.equal(graph_of(several)(lengths), several(lengths))


def test_masks_come_with_the_package():
    assert pyattn.masks is masks
