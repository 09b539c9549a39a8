"""Promise: random arguments to the raw operators give a result of the right shapes, or one sentence of refusal."""

import math
import re
from random import Random
from typing import Any

import pytest
import torch
from support.assertions import check_examples
from torch import Tensor

import pyattn
from pyattn.options import Options, Packing

SIZES = [0, 1, 2, 3, 4, 17]
SLIPS = [0] * 15 + [1]
EXTREME_INTEGERS = [-(2**63), 1 - 2**63, -(2**40), -1, 2**31, 2**40, 2**63 - 2, 2**63 - 1]
EXTREME_FLOATS = [math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, -1e-40, 1e-30, 65536.0, 3e38, 4e38, -1e300]
DTYPES = [torch.float32] * 8 + [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]
FORWARD = ("q", "k", "v", *Options._fields)
ROWS = ("dout", "dlse", "q", "k", "v", "out", "row_max", "row_sum")
BACKWARD = (*ROWS, *Options._fields, "output_mask")
VARLEN_FORWARD = ("q", "k", "v", *Packing._fields, *Options._fields)
VARLEN_BACKWARD = (*ROWS, *Packing._fields, *Options._fields, "output_mask")


def tensor(draw: Random, shape: list[int], dtype: torch.dtype) -> Tensor:
    """A tensor of ones in one of many layouts."""
    x = torch.ones(shape, dtype=dtype)
    match draw.choice(["dense"] * 60 + ["reversed", "expanded", "padded", "meta", "sparse", "negated"]):
        case "reversed":
            backwards = tuple(reversed(range(x.dim())))
            return x.permute(backwards).contiguous().permute(backwards)
        case "expanded":
            return x.new_ones(()).expand(shape)
        case "padded":
            return torch.ones([n + 1 for n in shape], dtype=dtype)[tuple(slice(1, None) for _ in shape)]
        case "meta":
            return x.to("meta")
        case "sparse":
            return x.to_sparse()
        case "negated" if dtype == torch.float32:
            return torch.complex(x, x).conj().imag
    return x


FRACTIONS = ("alibi_slopes", "sinks", "relative_bias")
LEARNED = ("bias", *FRACTIONS)
INTEGERS = ("q_offsets", "dropout_seed", "dropout_origins", "key_ranges", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
INTEGERS += ("selected",)
OPTIONAL = ("dlse", "q_offsets", "dropout_origins", "key_ranges", "mask", "bias", "seqused_k", "selected", *FRACTIONS)


def lengths(draw: Random, count: int) -> list[int]:
    """The starts and ends of sequences, mostly in order."""
    begins = [0]
    for _ in range(count):
        begins.append(begins[-1] + draw.choice(SIZES))
    if draw.choice(SLIPS):
        begins[draw.randint(0, count)] = draw.choice([*EXTREME_INTEGERS, *range(-3, 31)])
    return begins


def arguments(draw: Random, names: tuple[str, ...]) -> dict[str, Any]:
    """Arguments that fit together, except up to three that are drawn independently."""
    b, h, g, sq, sk, d, dv = draw.choices(SIZES, k=7)
    rows = [b, h * g, sq]
    shapes = {"q": [*rows, d], "k": [b, h, sk, d], "v": [b, h, sk, dv], "out": [*rows, dv], "dout": [*rows, dv]}
    shapes |= dict.fromkeys(("dlse", "row_max", "row_sum"), rows) | {"q_offsets": [b], "dropout_seed": []}
    shapes["key_ranges"] = [draw.choice([1, b]), sq, 2]
    for name in ("mask", "bias"):
        shapes[name] = [draw.choice([1, n]) for n in (*rows, sk)][draw.randrange(4) :]
    shapes |= {"alibi_slopes": rows[draw.randrange(2) : 2], "sinks": rows[1:2]}
    contents: dict[str, list[int]] = {}
    bounds: dict[str, Any] = {}
    if "cu_seqlens_q" in names:
        contents = {"cu_seqlens_q": lengths(draw, b), "cu_seqlens_k": lengths(draw, b)}
        begins = contents["cu_seqlens_k"]
        contents["seqused_k"] = [
            min(draw.choice(SIZES), begins[i + 1] - begins[i] + draw.choice(SLIPS)) for i in range(b)
        ]
        sq, sk = (max(0, min(contents[name][-1], 100)) + draw.randrange(4) for name in Packing._fields[:2])
        bounds = {name: 17 - draw.choice(SLIPS) for name in Packing._fields[2:4]}
        rows = [h * g, sq]
        shapes = {"q": [sq, h * g, d], "k": [sk, h, d], "v": [sk, h, dv]}
        shapes |= {name: [sq, h * g, dv] for name in ("out", "dout")}
        shapes |= dict.fromkeys(("dlse", "row_max", "row_sum"), rows) | {"q_offsets": [b], "dropout_seed": []}
        shapes |= {"key_ranges": [sq, 2], "alibi_slopes": [b, h * g][draw.randrange(2) :], "sinks": [h * g]}
        shapes |= {name: [len(x)] for name, x in contents.items()}
    shapes["dropout_origins"] = [draw.choice([1, b]), 5]
    if "cu_seqlens_q" not in names:
        shapes["selected"] = [draw.choice([1, b]), draw.choice([1, h, h * g]), sq, draw.choice(SIZES)]
    shapes["relative_bias"] = [b, draw.choice([1, h * g]), 1 + 2 * draw.choice(SIZES)][draw.randrange(2) :]
    odd = draw.choices(names, k=draw.choice([0, 0, 0, 1, 2, 3]))
    dtype = draw.choice(DTYPES)
    sides = [-1, draw.randint(-1, 20), draw.randint(-1, 20), draw.choice([2**40, 2**63 - 1])]
    values: dict[str, Any] = {
        "softmax_scale": draw.choice([None, None, draw.uniform(-9, 9), draw.choice(EXTREME_FLOATS)]),
        "causal": draw.choice([True, False]),
        "dropout_p": draw.choice([0.0, draw.uniform(0, 0.99)]),
        "q_offset": draw.choice([None, draw.randint(-5, 20), draw.choice(EXTREME_INTEGERS)]),
        "window": draw.choices(sides, k=2),
        "softcap": draw.choice([0.0, draw.uniform(0, 50), 10 ** draw.uniform(-40, 38)]),
        "selected_block": draw.choice([1, 1, draw.randint(2, 20), draw.choice(EXTREME_INTEGERS)]),
        **dict.fromkeys(("mask", "bias", "selected")),
        **bounds,
    }
    for name in names:
        if name in odd:
            shape, kind = draw.choices(SIZES, k=draw.randrange(6)), draw.choice(DTYPES)
            scalars = [0, 1.5, -1, math.nan, "x", (), True, 2**70, [3], [-5, 2], [1, 2, 3]]
            # torch's parser refuses a sparse tensor in place of a number, in its own words, so that case is omitted.
            other = tensor(draw, shape, kind) if name in shapes else torch.ones(shape, dtype=kind)
            values[name] = draw.choice([None, draw.choice(scalars), other])
        elif name in OPTIONAL and draw.randrange(3):
            values[name] = None
        elif name in shapes:
            row = torch.float64 if dtype == torch.float64 else torch.float32
            kind = row if name in ("dlse", "row_max", "row_sum") else dtype
            if name in INTEGERS:
                kind = torch.int64
            elif name == "mask":
                kind = torch.bool
            elif name in FRACTIONS or name == "bias":
                kind = draw.choice([dtype, torch.float32])
            values[name] = tensor(draw, shapes[name], kind)
            if name in contents and values[name].device.type == "cpu":
                values[name] = torch.tensor(contents[name], dtype=torch.int64)
            if name == "dropout_origins" and values[name].device.type == "cpu":
                values[name] = values[name] * draw.choice([0, 1, 7, *EXTREME_INTEGERS])
            if name == "selected" and values[name].device.type == "cpu" and not values[name].is_sparse:
                values[name] = values[name] % (sk + draw.choice(SLIPS) + 1) - 1
                values[name] = values[name].to(draw.choice([torch.int32, torch.int64]))
            if name == "key_ranges" and values[name].device.type == "cpu":
                ends = [draw.choice([-1, 0, 0, 0, 0, 1, 2]), draw.randint(0, sk + draw.choice(SLIPS))]
                values[name] = values[name] * torch.tensor(ends)
                values[name] = values[name].to(draw.choice([torch.int32, torch.int64]))
    if "output_mask" in names and "output_mask" not in odd:
        given = (isinstance(values[name], Tensor) for name in LEARNED)
        values["output_mask"] = [there and draw.random() < 0.5 for there in given]
    return {name: values[name] for name in names}


OPERATORS = {
    "forward": FORWARD,
    "backward": BACKWARD,
    "varlen_forward": VARLEN_FORWARD,
    "varlen_backward": VARLEN_BACKWARD,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_result_or_one_sentence(request: pytest.FixtureRequest, name: str) -> None:
    """480 examples per operator, on every instruction set."""
    names, operator = OPERATORS[name], getattr(torch.ops.pyattn, f"attention_{name}")
    outcomes = {"result": 0, "refused": 0}

    def check_by(isa: str, values: dict[str, Any]) -> None:
        pyattn.set_isa(isa)
        try:
            results = operator(**values)
        except (TypeError, ValueError, NotImplementedError) as error:
            assert str(error).startswith("pyattn: ")  # noqa: PT017
            outcomes["refused"] += 1
        except RuntimeError as error:
            assert re.search("Expected a value of type|fixed-size array|isIntegral", str(error))  # noqa: PT017  (of the schema)
            outcomes["refused"] += 1
        else:
            q, v = values["q"], values["v"]
            if "output_mask" not in names:
                rows = list(q.shape[-2::-1]) if "cu_seqlens_q" in names else list(q.shape[:3])
                expected: list[Any] = [[*q.shape[:-1], v.shape[-1]]] + [rows] * 3
            else:
                wanted = zip(LEARNED, values["output_mask"], strict=True)
                expected = [list(values[name].shape) for name in "qkv"]
                expected += [list(values[name].shape) if asked else None for name, asked in wanted]
            assert [None if x is None else list(x.shape) for x in results] == expected
            outcomes["result"] += 1

    def check(draw: Random) -> None:
        values = arguments(draw, names)
        for isa in pyattn.isas():
            check_by(isa, values)

    check_examples(request, 480, check)
    print(outcomes)
    assert min(outcomes.values()) > sum(outcomes.values()) / 10, outcomes
