"""Promise: each tensor option says its axes once, and by them a part of a call gives that part of the result."""

import pytest
import torch
from support.axes import forms, of_axes

from pyattn import ops
from pyattn.options import Options
from pyattn.options.axes import AXES, PACKED_AXES, dims_of, take
from pyattn.options.positions import explicit, shift

B, HQ, HKV, SQ, SK, D = 3, 4, 2, 6, 7, 8
SIZES = {"b": B, "h": HQ, "g": HKV, "q": SQ, "k": SK, "n": 2, "r": 9, "2": 2, "5": 5}


CASES = [(name, *form) for name in AXES if name not in ("q_offset", "dropout_seed") for form in forms(name)]
"""q_offsets is the operators' form of q_offset, and a seed is a scalar."""


def test_every_tensor_of_the_operators_has_axes() -> None:
    arguments = ops.attention_forward._schema.arguments[3:]
    tensors = {argument.name for argument in arguments if "Tensor" in str(argument.type)}
    assert tensors == AXES.keys() - {"q_offset"} == PACKED_AXES.keys() - {"q_offset"}


@pytest.mark.parametrize(("name", "broadcast", "left_out"), CASES)
def test_a_part_of_a_call(name: str, broadcast: str, left_out: int) -> None:
    """Sequences, heads and rows of a call, with the options of these, give the part of the call's out and lse."""
    q, k, v = (
        torch.randn(B, heads, length, D, dtype=torch.float64) for heads, length in ((HQ, SQ), (HKV, SK), (HKV, SK))
    )
    tensor = of_axes(name, SIZES, broadcast, left_out)
    seed = {"dropout_p": 0.3, "dropout_seed": torch.tensor(5)} if name == "dropout_origins" else {}
    options = explicit(Options(**{name: tensor}, **seed), B, HQ, SK - SQ, q.device)
    whole = ops.attention_forward(q, k, v, *options)[:2]
    for batch, heads, rows in ((slice(1, 3), slice(2, 4), slice(0, 6)), (slice(0, 1), slice(0, 4), slice(2, 5))):
        own = take(options, batch=batch, heads=heads, rows=rows, num_heads=HQ)
        own = shift(own, queries=rows.start, keys=0, num_keys=SK)
        if seed:
            own = own._replace(dropout_origins=own.dropout_origins + torch.tensor([0, 0, heads.start, 0, 0]))
        groups = slice(heads.start // 2, heads.stop // 2)
        part = ops.attention_forward(q[batch, heads, rows], k[batch, groups], v[batch, groups], *own)[:2]
        for one, all_of_them in zip(part, whole, strict=True):
            torch.testing.assert_close(one, all_of_them[batch, heads, rows], equal_nan=True)


@pytest.mark.parametrize(("name", "broadcast", "left_out"), CASES)
def test_chosen_numbers(name: str, broadcast: str, left_out: int) -> None:
    """Indices choose what the same numbers of a slice do, in any order."""
    tensor, order = of_axes(name, SIZES, broadcast, left_out), torch.tensor([2, 1])
    for argument in ("batch", "heads", "rows", "keys"):
        by_slice = getattr(take(Options(**{name: tensor}), **{argument: slice(1, 3)}, num_heads=HQ), name)
        chosen = getattr(take(Options(**{name: tensor}), **{argument: order}, num_heads=HQ), name)
        axes = {"batch": "b", "heads": "hg", "rows": "q", "keys": "k"}[argument]
        dim = next((dim for axis, dim in dims_of(AXES[name], tensor).items() if axis in axes), None)
        assert torch.equal(chosen, by_slice if dim is None else by_slice.flip(dim))
