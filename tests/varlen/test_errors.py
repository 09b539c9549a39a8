"""Promise: packed sequences that do not fit are refused in one sentence with the values."""

from typing import Any

import pytest
import torch
from support.assertions import Refusals, each_refusal, refused
from support.packed import Packed, starts

from pyattn import attention_varlen
from pyattn.options import Packing

forward = torch.ops.pyattn.attention_varlen_forward
backward = torch.ops.pyattn.attention_varlen_backward

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def inputs(**changes: Any) -> dict[str, Any]:
    packed = Packed([2, 3], [4, 3], (4, 2))
    q, k, v = packed.inputs(torch.float32, 8, 6)
    names = ("q", "k", "v", *Packing._fields[:4])
    return dict(zip(names, (q, k, v, *packed.packing), strict=True)) | changes


BAD: Refusals = [
    (
        {"q": torch.zeros(1, 5, 4, 8)},
        ValueError,
        "3 dimensions (tokens, num_heads, head_dim), got q [1, 5, 4, 8], k [7",
    ),
    ({"q": torch.zeros(5, 3, 8)}, ValueError, "num_heads_q must be a multiple of num_heads_kv, got 3 and 2"),
    ({"q": torch.zeros(5, 4, 9)}, ValueError, "q and k must have the same head_dim, got 9 and 8"),
    ({"v": torch.zeros(6, 2, 6)}, ValueError, "v must have shape [7, 2, 6], got [6, 2, 6]"),
    ({"k": torch.zeros(7, 2, 8).double()}, TypeError, "k must have dtype float32, got float64"),
    ({"cu_seqlens_q": torch.zeros(3)}, TypeError, "cu_seqlens_q must have dtype int32 or int64, got float32"),
    ({"cu_seqlens_k": torch.tensor([0, 7])}, ValueError, "must have shape (sequences + 1), got [3] and [2]"),
    ({"cu_seqlens_q": torch.tensor([[0, 2, 5]])}, ValueError, "must have shape (sequences + 1), got [1, 3] and [3]"),
    (dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), starts([])[:0]), ValueError, "(sequences + 1), got [0] and [0]"),
    ({"cu_seqlens_q": torch.tensor([1, 2, 5])}, ValueError, "cu_seqlens_q must start at 0, got 1"),
    ({"cu_seqlens_k": torch.tensor([0, 5, 4])}, ValueError, "cu_seqlens_k must never decrease, got 4 after 5 at 2"),
    ({"cu_seqlens_k": torch.tensor([0, 4, 8])}, ValueError, "cu_seqlens_k must end within the 7 tokens, got 8 at 2"),
    ({"cu_seqlens_q": torch.tensor([0, 2**62, 5])}, ValueError, "within the 5 tokens, got 4611686018427387904 at 1"),
    ({"cu_seqlens_q": torch.tensor([0, -1, 5])}, ValueError, "cu_seqlens_q must never decrease, got -1 after 0 at 1"),
    ({"max_seqlen_q": 2}, ValueError, "max_seqlen_q must be at least the longest sequence, got 2 and 3"),
    ({"max_seqlen_k": 3}, ValueError, "max_seqlen_k must be at least the longest sequence, got 3 and 4"),
    ({"seqused_k": torch.tensor([4])}, ValueError, "seqused_k must have shape (2), got [1]"),
    ({"seqused_k": torch.tensor([4.0, 3.0])}, TypeError, "seqused_k must have dtype int32 or int64, got float32"),
    (
        {"seqused_k": torch.tensor([4, 4])},
        ValueError,
        "seqused_k must be between 0 and the 3 keys of sequence 1, got 4",
    ),
    ({"seqused_k": torch.tensor([-1, 3])}, ValueError, "between 0 and the 4 keys of sequence 0, got -1"),
    ({"mask": torch.ones(1) > 0}, NotImplementedError, "packed sequences take no mask, got one of shape [1]"),
    ({"bias": torch.zeros(1)}, NotImplementedError, "packed sequences take no bias, got one of shape [1]"),
    ({"q_offset": torch.zeros(3, dtype=torch.int64)}, ValueError, "q_offset must have shape [2], got [3]"),
    ({"alibi_slopes": torch.zeros(3, 4)}, ValueError, "alibi_slopes must have shape (4) or (2, 4), got [3, 4]"),
    ({"sinks": torch.zeros(2)}, ValueError, "sinks must have shape (4), got [2]"),
    (
        {"key_ranges": torch.zeros(1, 5, 2, dtype=torch.int64)},
        ValueError,
        "key_ranges must have shape (5, 2) or (5, 1 to 4, 2), got [1, 5",
    ),
    ({"key_ranges": torch.tensor([[0, 4]] * 5)}, ValueError, "seqlen_k = 3, got [0, 4] for query 0 of sequence 1"),
    ({"key_ranges": torch.tensor([[0, 1]] + [[2, 1]] * 4)}, ValueError, "got [2, 1] for query 1 of sequence 0"),
    ({"cu_seqlens_k": torch.tensor([0, 4, 7]).to("meta")}, ValueError, "cu_seqlens_k must be on q's device, got meta"),
]


@each_refusal(BAD)
def test_errors(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    arguments = inputs(**changes)
    with refused(kind, message, inside=True):
        attention_varlen(**arguments)
    options = {"q_offsets" if name == "q_offset" else name: value for name, value in arguments.items()}
    with refused(kind, message, inside=True):
        forward(**options)
    q = options["q"]
    out, rows = torch.zeros(*q.shape[:-1], 6), torch.zeros(q.shape[-2::-1][:2])
    with refused(kind, message, inside=True):
        backward(out, None, out=out, row_max=rows, row_sum=rows, **options)


@each_refusal(
    [
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q must be at least 0, got -1"),
        ({"max_seqlen_k": 4.0}, TypeError, "max_seqlen_k must be int, got 4.0"),
        ({"cu_seqlens_q": [0, 2, 5]}, TypeError, "cu_seqlens_q must be Tensor, got [0, 2, 5]"),
        ({"seqused_k": [4, 3]}, TypeError, "seqused_k must be Tensor, got [4, 3]"),
        ({"is_causal": True}, TypeError, "attention_varlen has no argument is_causal (use causal"),
    ]
)
def test_errors_of_the_function(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with refused(kind, message):
        attention_varlen(**inputs(**changes))


def test_gradients_of_other_shapes() -> None:
    arguments = inputs()
    out, _, row_max, row_sum = forward(**arguments)
    tensors = {"dout": out, "dlse": row_sum, "out": out, "row_max": row_max, "row_sum": row_sum}
    backward(**tensors, **arguments)
    for name, good in tensors.items():
        for bad in (good[:-1], good.mT, good[None], good.double(), good.to("meta")):
            with pytest.raises(TypeError if bad.dtype != good.dtype else ValueError, match=f"pyattn: {name} must "):
                backward(**tensors | {name: bad}, **arguments)
    with pytest.raises(ValueError, match="pyattn: output_mask must ask for gradients of a bias"):
        backward(**tensors, **arguments, output_mask=[True, False, False, False])
