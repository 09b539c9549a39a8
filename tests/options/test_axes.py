"""Promise: each tensor option says its axes once, and by them a part of a call gives that part of the result."""

import pytest
import torch
from torch import Tensor

from pyattn import ops
from pyattn.options import Options
from pyattn.options.axes import AXES, PACKED_AXES, dims_of, take
from pyattn.options.positions import explicit, shift

B, HQ, HKV, SQ, SK, D = 3, 4, 2, 6, 7, 8
SIZES = {"b": B, "h": HQ, "q": SQ, "k": SK, "n": 2, "r": 9, "2": 2, "5": 5}


def of_axes(name: str, axes: str, broadcast: str = "", left_out: int = 0) -> Tensor:
    """A tensor for an option: of size 1 along ``broadcast`` where it may be, without ``left_out`` optional axes."""
    words = axes.split()
    for word in [word for word in words if word.startswith("(")][:left_out]:
        words.remove(word)
    words = [word.strip("()") for word in words]
    shape = [1 if word.endswith("?") and word[0] in broadcast else SIZES[word[0]] for word in words]
    if name == "key_ranges":
        ends = torch.randint(SK + 1, (*shape[:2], 2 * (shape[2] if len(shape) == 4 else 1))).sort(-1).values
        return ends.view(shape)
    if name == "mask":
        return torch.rand(shape) < 0.7
    if name in ("q_offset", "q_offsets"):
        return torch.randint(-1, 3, shape)
    if name == "dropout_origins":
        return torch.tensor([[2 * b, HQ + 2, 1, 5, 9] for b in range(shape[0])])
    return torch.randn(shape)


CASES = [
    (name, broadcast, left_out)
    for name, axes in AXES.items()
    if name not in ("q_offset", "dropout_seed")  # q_offsets is the operators' form of it; a scalar
    for left_out in range(axes.count("(") + 1)
    for broadcast in ("", "b", "h", "q", "bhq", "k")
]


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
    tensor = of_axes(name, AXES[name], broadcast, left_out)
    tensor = tensor.double() if tensor.is_floating_point() else tensor
    seed = {"dropout_p": 0.3, "dropout_seed": torch.tensor(5)} if name == "dropout_origins" else {}
    options = explicit(Options(**{name: tensor}, **seed), B, HQ, SK - SQ, q.device)
    whole = ops.attention_forward(q, k, v, *options)[:2]
    for batch, heads, rows in ((slice(1, 3), slice(2, 4), slice(0, 6)), (slice(0, 1), slice(0, 4), slice(2, 5))):
        own = take(options, batch=batch, heads=heads, rows=rows)
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
    tensor, order = of_axes(name, AXES[name], broadcast, left_out), torch.tensor([2, 1])
    for argument in ("batch", "heads", "rows", "keys"):
        by_slice = getattr(take(Options(**{name: tensor}), **{argument: slice(1, 3)}), name)
        chosen = getattr(take(Options(**{name: tensor}), **{argument: order}), name)
        axis = {"batch": "b", "heads": "h", "rows": "q", "keys": "k"}[argument]
        dim = dims_of(AXES[name], tensor).get(axis)
        assert torch.equal(chosen, by_slice if dim is None else by_slice.flip(dim))
