"""Promise: attention_with_prefix refuses wrong arguments with an error that names the values."""

from typing import Any

import torch
from support.assertions import Refusals, each_refusal, refused
from support.prefixes import SK, P, tensors

from pyattn import attention_with_prefix


def test_fewer_heads_of_values() -> None:
    with refused(ValueError, "v must have shape [6, 2, 5, 3], got [6, 1, 5, 3]"):
        given = tensors()
        attention_with_prefix(*given[:2], given[2][:, :1], given[3], given[4][:, :1])


WHOLE = torch.tensor([[[0, P + SK + 1]]])
REFUSALS: Refusals = [
    ({"prefix_k": (2, 2, 6)}, ValueError, "prefix_k must have 4 dimensions (batch, num_heads, seqlen, head_dim), got"),
    (
        {"q": (2, 3, 4, 4, 2)},
        ValueError,
        "q must have 4 dimensions (batch, num_heads, seqlen, head_dim), got shape (2,",
    ),
    ({"prefix_k": (2, 1, 6, 2)}, ValueError, "prefix_k must have shape (2, 2, 6, 2), got (2, 1, 6, 2)"),
    ({"prefix_v": (2, 2, 5, 3)}, ValueError, "prefix_v must have shape (2, 2, 6, 3), got (2, 2, 5, 3)"),
    ({"prefix_v": (1, 2, 6, 3)}, ValueError, "prefix_v must have shape (2, 2, 6, 3), got (1, 2, 6, 3)"),
    (
        {"prefix_k": (4, 2, 6, 2), "prefix_v": (4, 2, 6, 3)},
        ValueError,
        "q's batch must be a multiple of that of prefix_k, got 6 answers and 4 prompts",
    ),
    (
        {"prefix_k": (0, 2, 6, 2), "prefix_v": (0, 2, 6, 3)},
        ValueError,
        "q's batch must be a multiple of that of prefix_k, got 6 answers and 0 prompts",
    ),
    ({"q": (6, 3, 4, 2)}, ValueError, "num_heads_q must be a multiple of num_heads_kv, got 3 and 2"),
    ({"k": (3, 2, 5, 2), "v": (3, 2, 5, 3)}, ValueError, "q and k must have the same batch, got 6 and 3"),
    ({"prefix_v": torch.zeros(2, 2, 6, 3)}, TypeError, "prefix_v must have v's dtype, got torch.float32 and torch.flo"),
    (
        {"prefix_k": torch.zeros(2, 2, 6, 2, device="meta", dtype=torch.float64)},
        ValueError,
        "prefix_k must be on k's device, got meta and cpu",
    ),
    ({"prefix_k": None}, TypeError, "prefix_k must be Tensor, got None"),
    ({"prefix_k": "nested"}, NotImplementedError, "prefix_k must be a dense tensor, got a nested one"),
    (
        {"mask": torch.ones(5) > 0},
        ValueError,
        "the last dimension of mask must be 1 or 11, the prefix and the own keys",
    ),
    ({"bias": torch.ones(4, 6)}, ValueError, "the last dimension of bias must be 1 or 11, the prefix and the own keys"),
    (
        {"key_ranges": WHOLE},
        ValueError,
        "key_ranges must hold 0 <= begin <= end <= seqlen_k = 11, got [0, 12] for quer",
    ),
    ({"q_offset": torch.zeros(2, dtype=torch.int64)}, ValueError, "q_offset must have shape [6], got [2]"),
    ({"alibi_slopes": torch.zeros(2, 4)}, ValueError, "alibi_slopes must have"),
    ({"mask": torch.ones(2, 1, 1, 11) > 0}, ValueError, "mask must"),
    ({"causal": 1}, TypeError, "causal must be bool, got 1"),
    ({"prefix": 1}, TypeError, "attention_with_prefix has no argument prefix (did you mean prefix_k?"),
]


@each_refusal(REFUSALS)
def test_refusals(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    given: dict[str, Any] = dict(zip(("q", "k", "v", "prefix_k", "prefix_v"), tensors(), strict=True))
    for name, change in changes.items():
        if isinstance(change, tuple):
            given[name] = torch.zeros(change, dtype=torch.float64)
        elif change == "nested" if isinstance(change, str) else False:
            given[name] = torch.nested.nested_tensor([torch.zeros(2, 3)], layout=torch.jagged)
        else:
            given[name] = change
    with refused(kind, message):
        attention_with_prefix(**given)
