"""Gradients in float64 are differences, for every pair of features, with every tensor that has a gradient as input."""

import itertools
import math
from typing import Any

import pytest
import torch
from backends import Backend
from helpers import Case
from torch import Tensor
from torch.autograd import gradcheck
from yardstick import learned

FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": (2, 1)},
    "key_ranges": {"key_ranges": "random"},
    "softcap": {"softcap": 0.7},
    "bool bias": {"bias": "bool bqk"},
    "broadcast bias": {"bias": "float hk"},
    "full bias": {"bias": "bands bhqk"},
    "slopes": {"alibi": "h"},
    "slopes of each sequence": {"alibi": "bh"},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.3},
    "grouped heads": {"num_heads_kv": 1},
    "not causal": {"causal": False},
}
PAIRS = [
    (a, b)
    for a, b in itertools.combinations(FEATURES, 2)
    if not FEATURES[a].keys() & FEATURES[b].keys()  # not two biases
]


@pytest.mark.parametrize(("a", "b"), PAIRS, ids="-".join)
def test_gradients_are_differences(repeatable: Backend, a: str, b: str) -> None:
    sizes: dict[str, Any] = {"batch": 2, "num_heads_q": 2, "num_heads_kv": 2, "seqlen_q": 5, "seqlen_k": 6}
    case = Case(**sizes | {"head_dim": 3, "head_dim_v": 2, "q_offset": 2} | FEATURES[a] | FEATURES[b])
    tensors = case.tensors(torch.float64)
    names = learned(tensors)
    hidden = tensors["bias"] == -math.inf if "bias" in names else None

    def out_and_lse(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        options = case.options | tensors | dict(zip(names, more, strict=True))
        if hidden is not None:
            options["bias"] = options["bias"].masked_fill(hidden, -math.inf)
        out, lse = repeatable.attention(q, k, v, return_lse=True, **options)
        return out, lse.masked_fill(lse == -math.inf, 0.0)  # there are no differences of -inf to take

    # A hidden bias varies too: its differences are 0.
    inputs = (*case.inputs(torch.float64), *(tensors[name].nan_to_num(neginf=0.0) for name in names))
    assert gradcheck(out_and_lse, tuple(x.requires_grad_() for x in inputs), fast_mode=True)
