"""Garbage in, one sentence out: from the public function and from the raw operators, forward and backward."""

import math
import re
from typing import Any

import pytest
import torch
from helpers import Case
from torch import Tensor

from pyattn import _C, attention

forward = torch.ops.pyattn.attention_forward
backward = torch.ops.pyattn.attention_backward


def tensors(**changes: Tensor) -> dict[str, Tensor]:
    q, k, v = Case(2, 4, 2, 5, 7, 8, 6).inputs(torch.float32)
    return {"q": q, "k": k, "v": v} | changes


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


BAD_INPUTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"q": zeros(4, 5, 8)},
        ValueError,
        "4 dimensions (batch, num_heads, seqlen, head_dim), got q [4, 5, 8], k [2, 2, 7",
    ),
    ({"v": zeros(2, 2, 7, 6, 1)}, ValueError, "must have 4 dimensions"),
    (dict.fromkeys("qkv", zeros(3)), ValueError, "got q [3], k [3] and v [3]"),
    (dict.fromkeys("qkv", torch.tensor(1.0)), ValueError, "got q [], k [] and v []"),
    ({"q": zeros(3, 4, 5, 8)}, ValueError, "q and k must have the same batch, got 3 and 2"),
    ({"q": zeros(2, 3, 5, 8)}, ValueError, "num_heads_q must be a multiple of num_heads_kv, got 3 and 2"),
    ({"k": zeros(2, 0, 7, 8), "v": zeros(2, 0, 7, 6)}, ValueError, "must be a multiple of num_heads_kv, got 4 and 0"),
    ({"q": zeros(2, 4, 5, 9)}, ValueError, "q and k must have the same head_dim, got 9 and 8"),
    ({"v": zeros(2, 2, 8, 6)}, ValueError, "v must have shape [2, 2, 7, 6], got [2, 2, 8, 6]"),
    ({"v": zeros(2, 4, 7, 6)}, ValueError, "v must have shape [2, 2, 7, 6], got [2, 4, 7, 6]"),
    ({"k": zeros(2, 2, 7, 8, dtype=torch.float64)}, TypeError, "k must have dtype float32, got float64"),
    ({"v": zeros(2, 2, 7, 6, dtype=torch.bfloat16)}, TypeError, "v must have dtype float32, got bfloat16"),
    (dict.fromkeys("qkv", zeros(2, 2, 7, 8, dtype=torch.int64)), TypeError, "bfloat16 or float16, got int64"),
    (dict.fromkeys("qkv", zeros(2, 2, 7, 8, dtype=torch.complex64)), TypeError, "float16, got complex64"),
    ({"k": zeros(2, 2, 7, 8).to("meta")}, ValueError, "k must be on q's device, got meta and cpu"),
    ({"softmax_scale": math.nan}, ValueError, "softmax_scale must be finite, got nan"),
    ({"softmax_scale": math.inf}, ValueError, "softmax_scale must be finite, got inf"),
    ({"q_offset": torch.zeros(3, dtype=torch.int64)}, ValueError, "q_offset must have shape [2], got [3]"),
    ({"q_offset": torch.zeros(2)}, TypeError, "q_offset must have dtype int64, got float32"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD_INPUTS, ids=[m[:40] for _, _, m in BAD_INPUTS])
def test_forward(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    inputs = tensors() | changes
    with pytest.raises(kind, match="pyattn: .*" + re.escape(message)):
        attention(**inputs)
    q, k, v = (inputs.pop(name) for name in "qkv")
    offset = inputs.pop("q_offset", None)
    with pytest.raises(kind, match="pyattn: .*" + re.escape(message)):
        forward(q, k, v, inputs.pop("softmax_scale", 1.0), True, 0, offset)
    rows = torch.zeros(q.shape[:-1])
    with pytest.raises(kind, match="pyattn: .*" + re.escape(message)):
        backward(q, None, q, k, v, q, rows, rows, changes.get("softmax_scale", 1.0), True, 0, offset)


@pytest.mark.parametrize("name", ["dout", "dlse", "out", "row_max", "row_sum"])
def test_backward_shapes_and_dtypes(name: str) -> None:
    q, k, v = tensors().values()
    out, _, row_max, row_sum = forward(q, k, v, 1.0, True, 0)
    arguments = {"dout": out, "dlse": row_sum, "q": q, "k": k, "v": v, "out": out}
    arguments |= {"row_max": row_max, "row_sum": row_sum}
    backward(**arguments, softmax_scale=1.0, causal=True, q_offset=0)
    good = arguments[name]
    for bad in (good[:, :, :-1], good[0], good.double(), good.to("meta")):
        with pytest.raises(TypeError if bad.dtype != good.dtype else ValueError, match=f"pyattn: {name} must "):
            backward(**arguments | {name: bad}, softmax_scale=1.0, causal=True, q_offset=0)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"causal": None}, TypeError, "pyattn: causal must be bool, got None"),
        ({"q_offset": 1.5}, TypeError, "pyattn: q_offset must be int or Tensor or NoneType, got 1.5"),
        ({"softmax_scale": "1"}, TypeError, "pyattn: softmax_scale must be int or float or NoneType, got '1'"),
        ({"q_offset": 2**63}, ValueError, "pyattn: q_offset must fit in 64 bits, got 9223372036854775808"),
    ],
)
def test_arguments_of_other_types(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        attention(**tensors(), **arguments)


def test_autocast_does_not_hide_wrong_dtypes() -> None:
    q, k, v = tensors().values()
    with torch.autocast("cpu", torch.bfloat16):
        for wrong in (torch.int64, torch.complex64, torch.bool):
            with pytest.raises(TypeError, match="pyattn: dtype must be"):
                attention(q.to(wrong), k.to(wrong), v.to(wrong))
        with pytest.raises(TypeError, match="pyattn: k must have dtype bfloat16, got float64"):
            attention(q, k.double(), v)
        assert attention(q.double(), k.double(), v.double()).dtype == torch.float64


def test_vmap_over_the_only_dimension() -> None:
    q, k, v = (torch.stack([x, x]) for x in tensors().values())
    with pytest.raises(ValueError, match="pyattn: under vmap each tensor keeps its batch dimension"):
        torch.vmap(lambda q, k, v, o: attention(q, k, v, q_offset=o))(q, k, v, torch.tensor([1, 2]))


def test_sparse_tensors_are_refused() -> None:
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(NotImplementedError, match="attention_forward"):
        attention(q.to_sparse(), q, q)


def test_unknown_instruction_set() -> None:
    with pytest.raises(ValueError, match=r"pyattn: instruction set must be one of .*scalar, got 'sse9'"):
        _C.set_isa("sse9")


@pytest.mark.parametrize("offset", [2**63 - 1, -(2**63), 2**40, -(2**40)])
def test_extreme_offsets(offset: int) -> None:
    q, k, v = tensors().values()
    out = attention(q, k, v, q_offset=offset)
    assert torch.equal(out, attention(q, k, v, causal=False) if offset > 0 else torch.zeros_like(out))
    assert torch.equal(out, attention(q, k, v, q_offset=torch.full((2,), offset)))
