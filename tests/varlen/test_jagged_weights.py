"""Promise: attention_weights of jagged nested tensors gives rows, and sums of them, of each sequence alone."""

from functools import partial
from typing import Any

import pytest
import torch
from support.assertions import assert_close, refused
from support.jagged import OPTIONS, drawn, each, ranges
from support.yardstick import in_double

from pyattn import attention, attention_weights, dropout_mask

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

WEIGHTS = {
    "plain": {},
    "all": OPTIONS["all"],
    "dropout": {"dropout_p": 0.4, "dropout_seed": 5},
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name: str) -> None:
    """Chosen rows, and sums of all rows, are those of the sequences one by one, with gradients."""
    lengths, keys = (3, 17, 2, 5), (4, 9, 2, 5)
    q, k, v = drawn(lengths, keys)
    options = in_double(WEIGHTS[name])
    if "key_ranges" in options:
        options["key_ranges"] = ranges(lengths, keys)
    dropped = {n: options.pop(n) for n in ("dropout_p", "dropout_seed") if n in options}
    exact = [weights[0] for *_, weights in each(q, k, v, **options)]
    entropies = torch.cat([torch.special.entr(w).sum(-1) for w in exact], 1)
    if "sinks" in options:
        entropies = entropies + torch.cat([torch.special.entr(1 - w.sum(-1)) for w in exact], 1)
    if dropped:
        kept = dropout_mask(5, 4, 4, 17, 9, 0.4)
        exact = [w * kept[b, :, : w.shape[1], : w.shape[2]] / (1 - 26214 / 65536) for b, w in enumerate(exact)]
    lse = attention(q, k, v, return_lse=True, **options)[1]
    for given in ({}, {"lse": lse}):
        call = partial(attention_weights, q, k, **given, **options, **dropped)
        received, entropy = call(reduce="queries"), call(reduce="entropy")
        assert (received.shape, entropy.shape) == ((4, 4, k.shape[2]), (4, 4, q.shape[2]))
        pairs = [
            (received.values(), torch.cat([w.sum(1) for w in exact], 1)),
            (entropy.values(), entropies),
            (call(rows=[-1, 0]).values(), torch.cat([w[:, [-1, 0]] for w in exact], -1)),
            (call(rows=[1], heads=[2], reduce="queries").values(), torch.cat([w[2:3, 1] for w in exact], -1)),
            (call(rows=[1, 0], reduce="heads").values(), torch.cat([w[:, [1, 0]].sum(0) for w in exact], -1)),
        ]
        assert_close(*zip(*pairs, strict=True))
        losses = [torch.cat([x.sin().flatten() for x in some]).sum() for some in zip(*pairs, strict=True)]
        grads = [torch.autograd.grad(loss, (q, k), retain_graph=True) for loss in losses]
        assert_close(*([g.values() for g in some] for some in grads), 1e-10)
        assert_close(call(rows=[-1], reduce="entropy"), torch.stack([entropy[b][:, -1:] for b in range(4)]))


def test_no_sequence_and_no_tokens() -> None:
    """Results have the shapes that they have otherwise."""
    for lengths in ((), (0, 0)):
        q, k, _ = drawn(lengths)
        for reduce in ("queries", "entropy"):
            found = attention_weights(q, k, reduce=reduce, heads=[0])
            assert (found.shape[:2], found.values().shape) == ((len(lengths), 1), (1, 0))
        if not lengths:
            assert attention_weights(q, k, rows=[-1, 0], reduce="entropy").shape == (0, 4, 2)
            assert attention_weights(q, k, rows=[-1, 0]).values().shape == (4, 2, 0)
            assert attention_weights(q, k, rows=[-1, 0], reduce="heads").values().shape == (2, 0)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({}, NotImplementedError, "weights of all rows of jagged tensors would be jagged in two dimensions"),
        ({"reduce": "heads"}, NotImplementedError, "weights of all rows of jagged tensors would be jagged in two"),
        ({"reduce": "rows"}, ValueError, 'reduce must be "queries", "heads", "entropy" or None, got \'rows\''),
        ({"rows": [2]}, ValueError, "each of rows must be between -2 and 1, got 2 at 0"),
        ({"rows": [0], "heads": [4]}, ValueError, "each of heads must be between -4 and 3, got 4 at 0"),
        ({"rows": [0], "k": torch.randn(2, 2, 3, 8)}, TypeError, "k must be a nested tensor of layout torch.jagged"),
        ({"rows": [0], "mask": torch.ones(5).bool()}, NotImplementedError, "packed sequences take no mask"),
        ({"rows": [0], "lse": torch.zeros(4, 5)}, TypeError, "lse must be a nested tensor of layout torch.jagged"),
        (
            {"reduce": "queries", "key_ranges": torch.tensor([[0, 1]] * 4 + [[0, 3]])},
            ValueError,
            "key_ranges must hold 0 <= begin <= end <= seqlen_k = 2, got [0, 3] for query 1 of sequence 1",
        ),
    ],
)
def test_errors_of_weights(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    q, k, _ = drawn((3, 2))
    with refused(kind, message):
        attention_weights(**{"q": q, "k": k} | changes)


def test_lists() -> None:
    """Each sequence lists its own keys; weights in their order are no nested tensors, since lists have one length."""
    lengths = (3, 5, 2)
    q, k, _ = drawn(lengths)
    selected = torch.randint(-1, 2, (1, 10, 4))
    sequences = selected.split(lengths, 1)
    for reduce in (None, "heads", "queries", "entropy"):
        call = partial(attention_weights, rows=[-1, 0], reduce=reduce)
        found = call(q, k, selected=selected)
        alone = [call(q[b][None], k[b][None], selected=own[None])[0] for b, own in enumerate(sequences)]
        assert found.is_nested == (reduce == "queries")
        if reduce == "queries":
            found = found.values()
            assert_close(found, torch.cat(alone, -1))
        else:
            assert_close(found, torch.stack(alone))
    whole = attention_weights(q, k, selected=selected, reduce="entropy")
    assert whole.shape == q.shape[:3]
    none, _, _ = drawn(())
    empty = torch.zeros(1, 0, 4, dtype=torch.int64)
    assert attention_weights(none, none, selected=empty, rows=[0]).shape == (0, 4, 1, 4)
    assert attention_weights(none, none, selected=empty, rows=[0, 1], reduce="heads").shape == (0, 2, 4)
    for wrong, kind, message in (
        (selected[:, 1:], ValueError, "selected must have shape (lists, 10, count), got (1, 9, 4)"),
        (selected.expand(3, -1, -1), ValueError, "selected must have shape (1 or 1, 1 or"),
        (selected.float(), TypeError, "selected must have dtype int32 or int64"),
    ):
        with refused(kind, message):
            attention_weights(q, k, selected=wrong, reduce="entropy")
