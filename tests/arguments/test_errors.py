"""Promise: wrong input is refused in one sentence by the public function and by the raw operators."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from support.assertions import Refusals, each_refusal, refused
from support.cases import Case
from torch import Tensor

from pyattn import attention

forward = torch.ops.pyattn.attention_forward
backward = torch.ops.pyattn.attention_backward


def tensors(**changes: Tensor) -> dict[str, Tensor]:
    q, k, v = Case(2, 4, 2, 5, 7, 8, 6).inputs(torch.float32)
    return {"q": q, "k": k, "v": v} | changes


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def ranges(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


BAD_INPUTS: Refusals = [
    (
        {"q": zeros(4, 5, 8)},
        ValueError,
        "4 dimensions (batch, num_heads, seqlen, head_dim), got q [4, 5, 8], k [2, 2, 7",
    ),
    ({"v": zeros(2, 7, 6)}, ValueError, "must have 4 dimensions"),
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
    ({"k": zeros(2, 2, 7, 8).to("meta")}, ValueError, "k must be on q's device, got meta and c"),
    ({"softmax_scale": math.nan}, ValueError, "softmax_scale must be finite, got nan"),
    ({"softmax_scale": math.inf}, ValueError, "softmax_scale must be finite, got inf"),
    ({"softmax_scale": 1e-50}, ValueError, "between 1.4013e-45 and 8.50706e+37 in magnitude for float32, got 1e-50"),
    ({"softmax_scale": -1e39}, ValueError, "between 1.4013e-45 and 8.50706e+37 in magnitude for float32, got -1e+39"),
    ({"q_offset": torch.zeros(3, dtype=torch.int64)}, ValueError, "q_offset must have shape [2], got [3]"),
    ({"q_offset": torch.zeros(2)}, TypeError, "q_offset must have dtype int64, got float32"),
    ({"window": (-2, 3)}, ValueError, "window must be (left, right), each at least -1, got [-2, 3]"),
    ({"window": (3, -(2**63))}, ValueError, "each at least -1, got [3, -9223372036854775808]"),
    (
        {"key_ranges": ranges(2, 5)},
        ValueError,
        "(2 or 1, 5 or 1, 2) or (2 or 1, 5 or 1, 1 to 4, 2), got [2, 5]",
    ),
    (
        {"key_ranges": ranges(3, 5, 2)},
        ValueError,
        "(2 or 1, 5 or 1, 2) or (2 or 1, 5 or 1, 1 to 4, 2), got [3, 5, 2]",
    ),
    (
        {"key_ranges": ranges(2, 7, 2)},
        ValueError,
        "(2 or 1, 5 or 1, 2) or (2 or 1, 5 or 1, 1 to 4, 2), got [2, 7, 2]",
    ),
    (
        {"key_ranges": ranges(2, 5, 3)},
        ValueError,
        "(2 or 1, 5 or 1, 2) or (2 or 1, 5 or 1, 1 to 4, 2), got [2, 5, 3]",
    ),
    ({"key_ranges": ranges(2, 5, 5, 2)}, ValueError, "2 or 1, 5 or 1, 1 to 4, 2), got [2, 5, 5, 2]"),
    ({"key_ranges": ranges(2, 5, 0, 2)}, ValueError, "2 or 1, 5 or 1, 1 to 4, 2), got [2, 5, 0, 2]"),
    ({"key_ranges": ranges(2, 3, 2, 2)}, ValueError, "2 or 1, 5 or 1, 1 to 4, 2), got [2, 3, 2, 2]"),
    ({"key_ranges": ranges(3, 5, 2, 2)}, ValueError, "2 or 1, 5 or 1, 1 to 4, 2), got [3, 5, 2, 2]"),
    ({"key_ranges": zeros(2, 5, 2)}, TypeError, "key_ranges must have dtype int32 or int64, got float32"),
    ({"key_ranges": ranges(2, 5, 2).to("meta")}, ValueError, "key_ranges must be on q's device, got meta and c"),
    ({"softcap": -0.5}, ValueError, "softcap must be finite and at least 0, got -0.5"),
    ({"softcap": math.nan}, ValueError, "softcap must be finite and at least 0, got nan"),
    ({"softcap": math.inf}, ValueError, "softcap must be finite and at least 0, got inf"),
    ({"bias": zeros(5, 6)}, ValueError, "each 1 or that of [2, 4, 5, 7], got [5, 6]"),
    ({"bias": zeros(2, 2, 5, 7)}, ValueError, "each 1 or that of [2, 4, 5, 7], got [2, 2, 5, 7]"),
    ({"bias": zeros(0, 1, 5, 7)}, ValueError, "each 1 or that of [2, 4, 5, 7], got [0, 1, 5, 7]"),
    ({"bias": zeros(1, 2, 4, 5, 7)}, ValueError, "bias must have 1 to 4 dimensions, each 1 or that of"),
    ({"bias": torch.tensor(1.0)}, ValueError, "bias must have 1 to 4 dimensions, each 1 or that of"),
    ({"bias": zeros(5, 7, dtype=torch.float64)}, TypeError, "bias must have dtype float32, got float64"),
    ({"bias": zeros(5, 7, dtype=torch.uint8)}, TypeError, "bias must have dtype float32, got uint8"),
    ({"bias": zeros(5, 7).to("meta")}, ValueError, "bias must be on q's device, got meta and c"),
    ({"alibi_slopes": zeros(2)}, ValueError, "alibi_slopes must have shape (4) or (2, 4), got [2]"),
    ({"alibi_slopes": zeros(1, 4)}, ValueError, "alibi_slopes must have shape (4) or (2, 4), got [1, 4]"),
    ({"alibi_slopes": zeros(4, 1, 1)}, ValueError, "alibi_slopes must have shape (4) or (2, 4), got [4, 1, 1]"),
    ({"relative_bias": zeros(4)}, ValueError, "relative_bias must have shape (4 or 1, 2 * reach + 1) or (2, 4 or 1, 2"),
    ({"relative_bias": zeros(4, 6)}, ValueError, "relative_bias must have shape (4 or 1, 2 * reach + 1) or (2, 4 or 1"),
    ({"relative_bias": zeros(2, 3, 5)}, ValueError, "relative_bias must have shape (4 or 1, 2 * reach + 1) or (2, 4 "),
    ({"relative_bias": ranges(4, 5)}, TypeError, "relative_bias must have dtype float32, got int64"),
    ({"alibi_slopes": ranges(4)}, TypeError, "alibi_slopes must have dtype float32, got int64"),
    ({"alibi_slopes": zeros(4).to("meta")}, ValueError, "alibi_slopes must be on q's device, got meta and c"),
    ({"sinks": zeros(2)}, ValueError, "sinks must have shape (4), got [2]"),
    ({"sinks": zeros(2, 4)}, ValueError, "sinks must have shape (4), got [2, 4]"),
    ({"sinks": zeros(4, dtype=torch.float16)}, TypeError, "sinks must have dtype float32, got float16"),
    ({"sinks": zeros(4).to("meta")}, ValueError, "sinks must be on q's device, got meta and c"),
]


@each_refusal(BAD_INPUTS)
def test_forward(device: str, changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    changes = {name: x.to(device) if isinstance(x, Tensor) and not x.is_meta else x for name, x in changes.items()}
    inputs = tensors() | changes
    options = {"q_offsets" if name == "q_offset" else name: value for name, value in inputs.items()}
    q, rows = inputs["q"], torch.zeros(inputs["q"].shape[:-1])
    for call in (
        lambda: attention(**inputs),
        lambda: forward(**options),
        lambda: backward(dout=q, dlse=None, out=q, row_max=rows, row_sum=rows, **options),
    ):
        with refused(kind, message, inside=True):
            call()


@pytest.mark.parametrize(
    "row",
    [
        [-1, 3],
        [4, 3],
        [2, 8],
        [-(2**31), 2**31 - 1],
        [0, 4, 3, 5],
        [5, 6, 0, 4],
        [0, 1, 2, 3, 4, 5, 6, 8],
        [0, 1, 7, 6, 7, 7],
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ranges_out_of_bounds(row: list[int], dtype: torch.dtype) -> None:
    """The error names the first wrong query and its ranges; a GPU does not read them, and kernels stay in bounds."""
    q, k, v = tensors().values()
    several = len(row) > 2
    bad = torch.full((2, 5, len(row)), 7, dtype=dtype)
    bad[1, 3] = torch.tensor(row, dtype=dtype)
    bad = bad.unflatten(-1, (-1, 2)) if several else bad
    rule = "sorted, disjoint intervals 0 <= begin <= end" if several else "0 <= begin <= end"
    message = f"key_ranges must hold {rule} <= seqlen_k = 7, got {row} for query 3 of sequence 1"
    rows, out = torch.zeros(q.shape[:-1]), torch.zeros(2, 4, 5, 6)
    for call in (attention, forward, lambda *qkv, **named: backward(out, None, *qkv, out, rows, rows, **named)):
        with refused(ValueError, message):
            call(q, k, v, key_ranges=bad)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("wanted", range(4))
def test_gradients_of_what_is_not_there(wanted: int) -> None:
    """The raw operator refuses to compute one; a mask has none."""
    q, k, v = tensors().values()
    out, rows = torch.zeros(2, 4, 5, 6), torch.zeros(2, 4, 5)
    mask = [i == wanted for i in range(4)]
    for options in ({}, {"mask": torch.ones(7, dtype=torch.bool)}):
        with pytest.raises(ValueError, match="pyattn: output_mask must ask for gradients of a bias"):
            backward(out, None, q, k, v, out, rows, rows, **options, output_mask=mask)


@pytest.mark.usefixtures("device")
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


@each_refusal(
    [
        ({"causal": None}, TypeError, "causal must be bool, got None"),
        ({"q_offset": 1.5}, TypeError, "q_offset must be int or Tensor, got 1.5"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale must be int or float or NoneType, got '1'"),
        (
            {"softmax_scale": zeros(2, 3)},
            TypeError,
            "softmax_scale must be int or float or NoneType, got torch.T",
        ),
        ({"q_offset": 2**63}, ValueError, "q_offset must fit in 64 bits, got 9223372036854775808"),
        ({"window": (0, 2**63)}, ValueError, "window must fit in 64 bits, got 9223372036854775808"),
        ({"key_ranges": [[0, 1]]}, TypeError, "key_ranges must be Tensor, got [[0, 1]]"),
        ({"softcap": "50"}, TypeError, "softcap must be int or float, got '50'"),
        ({"bias": "causal"}, TypeError, "bias must be Tensor, got 'causal'"),
        ({"alibi_slopes": [0.5]}, TypeError, "alibi_slopes must be Tensor, got [0.5]"),
        ({"sinks": 1.0}, TypeError, "sinks must be Tensor, got 1.0"),
    ]
)
def test_arguments_of_other_types(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with refused(kind, message):
        attention(**tensors(), **changes)


def test_autocast_does_not_hide_wrong_dtypes(device: str) -> None:
    q, k, v = tensors().values()
    with torch.autocast(device, torch.bfloat16):
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


def test_jagged_tensors_are_refused() -> None:
    jagged = torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(1, 3, 4)], layout=torch.jagged)
    with pytest.raises(NotImplementedError, match=r"^pyattn: k must be a dense tensor, got a nested one"):
        attention(torch.randn(2, 1, 3, 4), jagged, jagged)


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (None, "None"),
        (3, "3"),
        ([[1.0]], "[[1.0]]"),
        ("q", "'q'"),
        (np.zeros((2, 8, 100, 64), np.float32), "numpy.ndarray of shape (2, 8, 100, 64)"),
        ([1.0] * 1000, "[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, ...]"),
    ],
    ids=["None", "int", "list", "str", "array", "long list"],
)
def test_what_is_no_tensor(value: Any, got: str) -> None:
    x = torch.randn(1, 1, 2, 2)
    for name in "qkv":
        with pytest.raises(TypeError, match=f"^pyattn: {name} must be Tensor, got {re.escape(got)}$"):
            attention(**dict.fromkeys("qkv", x) | {name: value})


def test_none_for_a_tensor_of_the_operators() -> None:
    x = torch.randn(1, 1, 2, 2)
    rows = x[..., 0]
    arguments = {"dout": x, "dlse": rows, "q": x, "k": x, "v": x, "out": x, "row_max": rows, "row_sum": rows}
    for name in arguments.keys() - {"dlse"}:
        with pytest.raises(TypeError, match=r"^pyattn: .* must be .*Tensors?, got None"):
            backward(**arguments | {name: None})
    for name in "qkv":
        with pytest.raises(TypeError, match=r"^pyattn: q, k and v must be Tensors, got None"):
            forward(**dict.fromkeys("qkv", x) | {name: None})
    with pytest.raises(TypeError, match=r"^pyattn: q must be a Tensor, got None"):
        forward(None, None, None)
