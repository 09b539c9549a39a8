"""Calls of attention with one or more features, as functions of all differentiable tensors."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.assertions import assert_close, finite
from support.cases import Case
from support.yardstick import learned
from torch import Tensor

from pyattn import attention, attention_varlen, reference

FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": (2, 1)},
    "key_ranges": {"key_ranges": "random"},
    "softcap": {"softcap": 0.7},
    "mask": {"mask": "random bqk"},
    "broadcast bias": {"bias": "float hk"},
    "full bias": {"bias": "bands bhqk"},
    "slopes": {"alibi": "h"},
    "slopes of each sequence": {"alibi": "bh"},
    "sinks": {"sinks": True},
    "relative bias": {"relative": "h 2"},
    "relative bias of each sequence": {"relative": "b 3"},
    "dropout": {"dropout_p": 0.3},
    "grouped heads": {"num_heads_kv": 1},
    "not causal": {"causal": False},
}
"""Options in the words that Case takes."""

PAIRS = [
    (a, b)
    for a, b in itertools.combinations(FEATURES, 2)
    if not FEATURES[a].keys() & FEATURES[b].keys()  # not two biases
]

ALL = {"softcap": 0.7, "bias": "float hk", "alibi": "h", "sinks": True, "dropout_p": 0.3, "num_heads_kv": 1}
ALL |= {"relative": "h 2"}


class Call:
    """``call(function, *inputs)`` is out and a finite lse; ``inputs`` are q, k, v and the differentiable options."""

    def __init__(self, features: dict[str, Any], dtype: torch.dtype = torch.float64) -> None:
        sizes: dict[str, Any] = {"batch": 2, "num_heads_q": 2, "num_heads_kv": 2, "seqlen_q": 5, "seqlen_k": 6}
        case = Case(**sizes | {"head_dim": 3, "head_dim_v": 2, "q_offset": 2} | features)
        self._options = case.given(dtype)
        self._names = learned(self._options)
        bias = self._options.get("bias")
        self._hidden = None if bias is None else bias == -math.inf
        # Hidden entries of a bias are inputs too: their differences are 0.
        self.inputs = (*case.inputs(dtype), *(self._options[name].nan_to_num(neginf=0.0) for name in self._names))
        self.leaves = tuple(x.detach().requires_grad_() for x in self.inputs)

    def __call__(self, function: Callable[..., Any], *inputs: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, *more = inputs
        options = self._options | dict(zip(self._names, more, strict=True))
        if self._hidden is not None:
            options["bias"] = options["bias"].masked_fill(self._hidden, -math.inf)
        return finite(*function(q, k, v, return_lse=True, **options))

    ours, reference = staticmethod(attention), staticmethod(reference.attention)


class PackedCall:
    """The same for packed sequences: one without queries, one without keys, unused keys, and tokens after the last."""

    def __init__(self) -> None:
        q, k, v = torch.randn(8, 4, 3), torch.randn(9, 2, 3), torch.randn(9, 2, 2)
        self.inputs = tuple(x.double() for x in (q, k, v, torch.rand(4, 4), torch.randn(4), torch.randn(4, 1, 5)))
        self.leaves = tuple(x.detach().requires_grad_() for x in self.inputs)

    def __call__(
        self,
        function: Callable[..., Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor,
        sinks: Tensor,
        relative: Tensor,
    ) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor([0, 2, 2, 3, 6]), torch.tensor([0, 3, 4, 4, 8]), 3, 4
        options: dict[str, Any] = {"seqused_k": torch.tensor([2, 1, 0, 4]), "q_offset": torch.tensor([0, 1, 0, 2])}
        options |= {"window": (2, -1), "softcap": 1.3, "dropout_p": 0.2, "dropout_seed": 3}
        options |= {"alibi_slopes": slopes, "sinks": sinks, "relative_bias": relative}
        return finite(*function(q, k, v, *lengths, return_lse=True, **options))

    ours, reference = staticmethod(attention_varlen), staticmethod(reference.attention_varlen)


each_call = pytest.mark.parametrize("make", [lambda: Call(ALL), PackedCall], ids=["dense", "packed"])


def assert_as_reference(compute: Callable[..., Any], call: Any = Call, atol: float = 1e-11) -> None:
    """Asserts that ``compute(function)`` agrees for the call's function and for the formula."""
    assert_close(compute(call.ours), compute(call.reference), atol)


def loss(call: Any, function: Callable[..., Any]) -> Callable[..., Tensor]:
    """A scalar of a call's inputs whose derivatives of every order depend on all results."""

    def of(*inputs: Tensor) -> Tensor:
        out, lse = call(function, *inputs)
        return out.sin().sum() + lse.cos().sum()

    return of


def score_tensors(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Tensors for a batch of 2, 4 heads, 4 queries and 5 keys; the bias broadcasts over heads."""
    return {
        "bias": torch.randn(2, 1, 4, 5, dtype=dtype).masked_fill(torch.rand(2, 1, 4, 5) < 0.2, -torch.inf),
        "alibi_slopes": torch.rand(4, dtype=dtype),
        "sinks": torch.randn(4, dtype=dtype),
        "relative_bias": torch.randn(4, 7, dtype=dtype),
    }


SCORES = Case(2, 4, 2, 4, 5, 3, 3)


SEVERAL = torch.tensor([[[0, 1], [2, 5]], [[1, 4], [4, 4]], [[2, 2], [2, 2]], [[0, 2], [3, 5]]])
MASKS = {"window": (2, 1), "key_ranges": SEVERAL[None]}


def leaves_of(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.detach().requires_grad_() for t in tensors)
