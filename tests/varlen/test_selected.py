"""Promise: in packed sequences, lists count the keys of their own sequence."""

import math
from typing import Any

import pytest
import torch

from pyattn import attention, attention_varlen, reference


def test_packed_sequences_count_their_own_keys() -> None:
    lengths = [4, 0, 7]
    ends = torch.tensor([0, 4, 4, 11])
    q, k, v = (torch.randn(13, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    selected = torch.randint(-1, 4, (2, 13, 3))
    out, lse = attention_varlen(q, k, v, ends, ends, 7, 7, selected=selected, return_lse=True)
    assert not out[11:].any()
    assert (lse[:, 11:] == -math.inf).all()
    for begin, length in zip(ends, lengths, strict=False):
        own = slice(int(begin), int(begin) + length)
        alone = attention(*(t[own].transpose(0, 1)[None] for t in (q, k, v)), selected=selected[None, :, own])
        torch.testing.assert_close(out[own], alone[0].transpose(0, 1))


def test_packed_sequences_by_the_reference() -> None:
    """With empty sequences, keys without queries, and blocks that reach past a sequence's last key."""
    ends = torch.tensor([0, 5, 5, 9, 9]), torch.tensor([0, 6, 9, 14, 14])
    tensors = [
        torch.randn(tokens, heads, 8, dtype=torch.float64, requires_grad=True)
        for tokens, heads in ((11, 4), (14, 2), (14, 2))
    ]
    for lists in (1, 2, 4):
        selected, sinks = torch.randint(-1, 2, (lists, 11, 3)), torch.randn(4, dtype=torch.float64, requires_grad=True)
        options: dict[str, Any] = {"selected": selected, "selected_block": 3, "sinks": sinks, "causal": False}
        results = []
        for attend in (attention_varlen, reference.attention_varlen):
            out, lse = attend(*tensors, *ends, 5, 6, return_lse=True, dropout_p=0.3, dropout_seed=5, **options)
            loss = out.sin().sum() + lse[:, :9].masked_fill(lse[:, :9] == -math.inf, 0.0).sum()
            results.append([out, lse, *torch.autograd.grad(loss, [*tensors, sinks])])
        torch.testing.assert_close(*results)


def test_no_packed_sequences() -> None:
    """Results without sequences have gradients of 0, as without lists."""
    q, k, v, sinks = (torch.randn(2, heads, 8, requires_grad=True) for heads in (2, 1, 1, 1))
    ends = torch.zeros(1, dtype=torch.int64)
    options: dict[str, Any] = {"selected": torch.full((1, 2, 3), -1), "sinks": sinks[:, 0, 0], "return_lse": True}
    out, lse = attention_varlen(q, k, v, ends, ends, 0, 0, **options)
    assert not any(gradient.any() for gradient in torch.autograd.grad(out.sum(), (q, k, v, sinks), retain_graph=True))
    assert not any(gradient.any() for gradient in torch.autograd.grad(lse.exp().sum(), (q, k, v, sinks)))


def test_packed_sequences_in_pages() -> None:
    """Both with gradients, which copy the pages whatever the options, and without."""
    q, pages = torch.randn(6, 4, 16), torch.randn(2, 5, 16, 2, 16)
    table, ends = torch.tensor([[3, 1], [0, 4]]), (torch.tensor([0, 2, 6]), torch.tensor([0, 20, 25]))
    selected = torch.randint(-1, 5, (1, 6, 4))
    k, v = (torch.cat([side[table[0]].flatten(0, 1)[:20], side[table[1]].flatten(0, 1)[:5]]) for side in pages)
    expected = attention_varlen(q, k, v, *ends, 4, 20, selected=selected)
    for leaf in (q, q.clone().requires_grad_()):
        found = attention_varlen(leaf, *pages, *ends, 4, 20, block_table=table, selected=selected)
        torch.testing.assert_close(found, expected)


def test_packed_sequences_are_checked() -> None:
    q, k, v = (torch.randn(11, heads, 16) for heads in (4, 2, 2))
    selected, ends = torch.zeros(1, 11, 3, dtype=torch.int64), torch.tensor([0, 4, 11])
    for wrong, largest, lists, message in (
        (torch.tensor([0, 7, 4]), 7, selected, "cu_seqlens_q"),
        (torch.tensor([0, 4, 12]), 8, selected, "cu_seqlens_q"),
        (ends, 6, selected, "max_seqlen_q"),
        (ends, 7, torch.zeros(1, 12, 3, dtype=torch.int64), r"shape \(lists, 11, count\), got \(1, 12, 3\)"),
        (ends, 7, torch.full_like(selected, 4), "selected must hold keys from 0 to 3"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_varlen(q, k, v, wrong, wrong, largest, largest, selected=lists)
    with pytest.raises(NotImplementedError, match="packed sequences take no mask"):
        attention_varlen(q, k, v, ends, ends, 7, 7, selected=selected, mask=torch.ones(4, 4, dtype=torch.bool))
