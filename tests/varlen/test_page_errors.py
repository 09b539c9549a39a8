"""Promise: pages that do not fit are refused in one sentence; entries that no key needs are not read."""

from typing import Any

import pytest
import torch
from support.assertions import Refusals, each_refusal, refused
from support.packed import Packed
from varlen.test_pages import Paged

from pyattn import attention_varlen

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def inputs(**changes: Any) -> dict[str, Any]:
    packed = Packed([2, 3], [20, 33], (4, 2))
    q, k, v = packed.inputs(torch.float32, 8, 6)
    paged = Paged(packed, 16)
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    made = dict(zip(names, (q, paged.of(k), paged.of(v), *packed.packing), strict=True))
    return made | {"block_table": paged.table} | changes


TABLE = torch.tensor([[0, 1, -1], [2, 3, 4]])
BAD: Refusals = [
    ({"k": torch.zeros(53, 2, 8)}, ValueError, "(pages, page_size, num_heads, head_dim)"),
    ({"k": torch.zeros(7, 15, 2, 8), "v": torch.zeros(7, 15, 2, 6)}, ValueError, "at least 16, got 15"),
    ({"block_table": TABLE.float()}, TypeError, "block_table must have dtype int32 or int64, got float32"),
    ({"block_table": TABLE[:1]}, ValueError, "block_table must have shape (2, pages of a sequence), got [1, 3]"),
    ({"block_table": TABLE[0]}, ValueError, "block_table must have shape (2, pages of a sequence), got [3]"),
    ({"block_table": TABLE[:, :2]}, ValueError, "got 2 of size 16 for the 33 keys of sequence 1"),
    ({"block_table": TABLE + 5}, ValueError, "block_table must hold pages from 0 to 6, got 7 at [1, 0]"),
    ({"block_table": TABLE - 1}, ValueError, "block_table must hold pages from 0 to 6, got -1 at [0, 0]"),
    ({"cu_seqlens_k": torch.tensor([0, 20, 19])}, ValueError, "cu_seqlens_k must never decrease, got 19 after 20 at 2"),
    ({"cu_seqlens_k": torch.tensor([1, 20, 53])}, ValueError, "cu_seqlens_k must start at 0, got 1"),
    ({"cu_seqlens_k": torch.tensor([0, 20, 2**63 - 1])}, ValueError, "max_seqlen_k must be at least the longest"),
    ({"max_seqlen_k": 32}, ValueError, "max_seqlen_k must be at least the longest sequence, got 32 and 33"),
    ({"seqused_k": torch.tensor([20, 34])}, ValueError, "between 0 and the 33 keys of sequence 1, got 34"),
    ({"seqused_k": torch.tensor([20])}, ValueError, "seqused_k must have shape (2), got [1]"),
    ({"bias": torch.zeros(1)}, NotImplementedError, "packed sequences take no bias, got one of shape [1]"),
]


@pytest.mark.parametrize("learned", [False, True])
@each_refusal(BAD)
def test_errors(changes: dict[str, Any], kind: type[Exception], message: str, learned: bool) -> None:
    """The message is the same if a gradient is wanted, when pages are copied."""
    arguments = inputs(**changes)
    arguments["q"].requires_grad_(learned)
    with refused(kind, message, inside=True):
        attention_varlen(**arguments)


def test_entries_behind_the_keys_in_use_are_not_looked_at() -> None:
    arguments = inputs(seqused_k=torch.tensor([3, 16]))
    expected = attention_varlen(**arguments)
    arguments["block_table"][:, 1:] = 2**40
    assert torch.equal(attention_varlen(**arguments), expected)
    arguments["q"].requires_grad_()
    assert torch.equal(attention_varlen(**arguments), expected)


def test_refusals_by_name() -> None:
    with pytest.raises(TypeError, match=r"^pyattn: block_table must be Tensor, got \[\[0\]\]"):
        attention_varlen(**inputs(block_table=[[0]]))
