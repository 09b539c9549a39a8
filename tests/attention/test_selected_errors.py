"""Wrong lists of keys, and lists that change before backward, are errors."""

from typing import Any

import pytest
import torch
from support.cases import Case
from torch import Tensor

from pyattn import KVCache, attention, attention_varlen, attention_weights, attention_with_cache
from pyattn.cache import paged_attention


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"selected": torch.zeros(1, 3, 5, 4, dtype=torch.int64)},
            ValueError,
            r"selected must have shape \(2 or 1, 1 or",
        ),
        ({"selected": torch.zeros(1, 1, 4, 4, dtype=torch.int64)}, ValueError, r"5, count\), got \[1, 1, 4, 4\]"),
        ({"selected": torch.zeros(1, 0, 5, 4, dtype=torch.int64)}, ValueError, r"5, count\), got \[1, 0, 5, 4\]"),
        ({"selected": torch.zeros(0, 1, 5, 4, dtype=torch.int64)}, ValueError, r"5, count\), got \[0, 1, 5, 4\]"),
        ({"selected": torch.zeros(1, 5, 4, dtype=torch.int64)}, ValueError, r"5, count\), got \[1, 5, 4\]"),
        (
            {"selected": torch.zeros(1, 1, 5, 4, dtype=torch.int64, device="meta")},
            ValueError,
            "selected must be on q's device, got meta and cpu",
        ),
        ({"selected": torch.zeros(1, 1, 5, 4)}, TypeError, "selected must have dtype int32 or int64, got float32"),
        ({"selected": [[1]]}, TypeError, "selected must be Tensor"),
        (
            {"selected": torch.tensor([0, 2, 9, 1]).expand(1, 1, 5, 4)},
            ValueError,
            "selected must hold keys from 0 to 8, or -1 for none, got 9 in entry 2 of query 0, sequence 0, list 0",
        ),
        (
            {"selected": torch.tensor([0, -2]).expand(1, 1, 5, 2), "selected_block": 4},
            ValueError,
            "blocks of keys from 0 to 2, or -1 for none, got -2 in entry 1",
        ),
        ({"selected_block": 0}, ValueError, "selected_block must be at least 1, got 0"),
        ({"selected_block": 2.0}, TypeError, "selected_block must be int"),
    ],
)
def test_errors(given: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v = Case(2, 4, 2, 5, 9, 8, 8).inputs(torch.float32)
    with pytest.raises(error, match=message):
        attention(q, k, v, **given)
    pages, table, lengths = torch.zeros(4, 16, 2, 8), torch.tensor([[2], [0]]), torch.tensor([9, 9])
    with pytest.raises(error, match=message):
        paged_attention.attention(q, pages, pages, table, lengths, 9, **given)


def _packed(q: Tensor, k: Tensor, v: Tensor, selected: Tensor) -> Tensor:
    ends = torch.tensor([0, 3, 6]), torch.tensor([0, 4, 9])
    return attention_varlen(*(t[0].transpose(0, 1) for t in (q, k, v)), *ends, 3, 5, selected=selected[0])


def _cached(q: Tensor, k: Tensor, v: Tensor, selected: Tensor) -> Tensor:
    cache = KVCache(1, 2, 16, 8)
    cache.append(k.detach(), v.detach())
    return attention_with_cache(q, cache, selected=selected)


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v, selected: attention(q, k, v, selected=selected),
        lambda q, k, v, selected: torch.autograd.grad(
            attention(q, k, v, selected=selected).sum(), q, create_graph=True
        )[0],
        _packed,
        _cached,
        lambda q, k, v, selected: attention_weights(q, k, selected=selected),
        lambda q, k, v, selected: attention_weights(q, k, selected=selected, reduce="queries"),
    ],
    ids=["attention", "second derivative", "packed", "cache", "weights", "sums of weights"],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_change_of_the_lists_before_backward_raises(call: Any, dtype: torch.dtype) -> None:
    """As of any tensor that autograd saves."""
    for change in (lambda t: t.zero_(), lambda t: t[:, :, 4].fill_(1), lambda t: torch.add(t, 0, out=t)):
        q, k, v = (t.requires_grad_() for t in Case(1, 4, 2, 6, 9, 8, 8).inputs(torch.float32))
        selected = torch.randint(0, 4, (1, 1, 6, 3), dtype=dtype)
        out = call(q, k, v, selected)
        change(selected)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
