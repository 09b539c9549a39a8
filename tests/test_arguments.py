"""Random arguments to the raw operators: a result of the right shapes, or one sentence that says what is wrong."""

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

SIZES = st.sampled_from([0, 1, 2, 3, 4, 17])
DTYPES = [torch.float32] * 8 + [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]
FORWARD = ("q", "k", "v", "softmax_scale", "causal", "q_offset", "q_offsets", "dropout_p", "dropout_seed")
BACKWARD = ("dout", "dlse", "q", "k", "v", "out", "row_max", "row_sum", *FORWARD[3:])


def tensor(draw: st.DrawFn, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Ones, in one of many layouts."""
    x = torch.ones(shape, dtype=dtype)
    match draw(st.sampled_from(["dense"] * 20 + ["reversed", "expanded", "padded", "meta", "sparse", "negated"])):
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


@st.composite
def arguments(draw: st.DrawFn, names: tuple[str, ...]) -> dict[str, Any]:
    """Arguments that fit together, except up to three that are drawn without regard to the others."""
    b, h, g, sq, sk, d, dv = (draw(SIZES) for _ in range(7))
    rows = [b, h * g, sq]
    shapes = {"q": [*rows, d], "k": [b, h, sk, d], "v": [b, h, sk, dv], "out": [*rows, dv], "dout": [*rows, dv]}
    shapes |= dict.fromkeys(("dlse", "row_max", "row_sum"), rows) | {"q_offsets": [b], "dropout_seed": []}
    odd = draw(st.lists(st.sampled_from(names), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    values: dict[str, Any] = {
        "softmax_scale": draw(st.none() | st.floats(-9, 9) | st.floats()),
        "causal": draw(st.booleans()),
        "dropout_p": draw(st.just(0.0) | st.floats(0, 0.99)),
        "q_offset": draw(st.none() | st.integers(-5, 20) | st.integers(-(2**63), 2**63 - 1)),
    }
    for name in names:
        if name in odd:
            shape, kind = draw(st.lists(SIZES, max_size=5)), draw(st.sampled_from(DTYPES))
            scalars = st.sampled_from([0, 1.5, -1, math.nan, "x", (), True, 2**70])
            # A sparse tensor where a number belongs is refused by torch's parser, in its own words: left out.
            other = tensor(draw, shape, kind) if name in shapes else torch.ones(shape, dtype=kind)
            values[name] = draw(st.none() | scalars | st.just(other))
        elif name in shapes:
            row = torch.float64 if dtype == torch.float64 else torch.float32
            integers = name in ("q_offsets", "dropout_seed")
            kind = torch.int64 if integers else row if len(shapes[name]) == 3 else dtype
            values[name] = tensor(draw, shapes[name], kind)
            if name in ("dlse", "q_offsets") and draw(st.booleans()):
                values[name] = None
    return {name: values[name] for name in names}


EXAMPLES = 120
"""Examples for each operator and instruction set. The checks, which are above the kernels, meet those of all sets."""


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("names", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_result_or_one_sentence(names: tuple[str, ...]) -> None:
    operator = torch.ops.pyattn.attention_forward if names is FORWARD else torch.ops.pyattn.attention_backward
    outcomes = {"result": 0, "refused": 0}

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(values=arguments(names))
    def check(values: dict[str, Any]) -> None:
        try:
            results = operator(**values)
        except (TypeError, ValueError, NotImplementedError) as error:
            assert str(error).startswith("pyattn: ")  # noqa: PT017
            outcomes["refused"] += 1
        except RuntimeError as error:
            assert "Expected a value of type" in str(error)  # noqa: PT017  (the dispatcher checks the schema's types)
            outcomes["refused"] += 1
        else:
            like = ("out", "row_max", "row_max", "row_max") if names is FORWARD else ("q", "k", "v")
            q, v = values["q"], values["v"]
            shapes = {"out": [*q.shape[:3], v.shape[3]], "row_max": [*q.shape[:3]]}
            shapes |= {name: list(values[name].shape) for name in "qkv"}
            assert [list(x.shape) for x in results if x is not None] == [shapes[name] for name in like]
            outcomes["result"] += 1

    check()
    assert min(outcomes.values()) > EXAMPLES / 10, outcomes
