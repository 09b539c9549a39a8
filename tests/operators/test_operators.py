"""Promise: every operator of attention takes the same options, and refuses what it has no kernels for."""

import math
import warnings
from typing import Any

import pytest
import torch
from support.assertions import Refusals, each_refusal, refused
from support.cases import assert_equal
from torch import Tensor

from pyattn import attention
from pyattn.options import Options, Packing

OPERATORS = [
    "attention_forward",
    "attention_backward",
    "attention_varlen_forward",
    "attention_varlen_backward",
    "attention_paged_forward",
    "attention_varlen_paged_forward",
    "attention_bytes_forward",
]
DIFFERENTIABLE = ["attention", "attention_varlen"]
"""Operators that call those above, whose checks they leave to them."""
ops = torch.ops.pyattn
each_operator = pytest.mark.parametrize("name", OPERATORS)


def test_all_operators_are_named() -> None:
    """A new operator of attention must pass these tests too."""
    names = {name.removeprefix("pyattn::") for name in torch._C._dispatch_get_all_op_names() if "pyattn::" in name}
    recorded = {f"{name}_recorded_backward" for name in DIFFERENTIABLE}
    few = {"attention_of_few_options"}
    assert {name for name in names if name.startswith("attention")} == {*OPERATORS, *DIFFERENTIABLE, *recorded, *few}


def test_few_options_are_the_first() -> None:
    few = list(ops.attention_of_few_options.default._schema.arguments)[3:]
    defaults = list(Options._field_defaults.items())[: len(few)]
    assert [(argument.name, argument.default_value) for argument in few] == defaults
    q, k, v = (torch.randn(2, 4, n, 8, requires_grad=True) for n in (3, 5, 5))
    for given in ((), (0.3,), (None, False), (-0.5, True, 1)):
        pairs = [ops.attention_of_few_options(q, k, v, *given), ops.attention(q, k, v, *given)[0]]
        gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in pairs]
        assert_equal([pairs[0], *gradients[0]], [pairs[1], *gradients[1]])


@pytest.mark.parametrize("name", [*OPERATORS, *DIFFERENTIABLE, *(f"{n}_recorded_backward" for n in DIFFERENTIABLE)])
def test_arguments_are_those_of_python(name: str) -> None:
    """In the order of the fields, with their defaults."""
    taken = {argument.name: argument for argument in getattr(ops, name).default._schema.arguments}
    names = list(taken)
    for group in [Packing, Options] if "varlen" in name else [Options]:
        first = names.index(group._fields[0])
        assert tuple(names[first : first + len(group._fields)]) == group._fields
        for field, default in group._field_defaults.items():
            value = taken[field].default_value
            assert (tuple(value) if isinstance(value, list) else value) == default, field


def foreign(kind: str) -> Tensor:
    x = torch.randn(1, 2, 3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # features in development warn
        match kind:
            case "Sparse":
                return x.to_sparse()
            case "SparseCsr":
                return x[0, 0].to_sparse_csr()
            case "SparseBsr":
                return torch.randn(4, 4).to_sparse_bsr((2, 2))
            case "Mkldnn":
                return x.to_mkldnn()
            case "quint8":
                return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)
            case "nested":
                return torch.nested.nested_tensor([x[0], x[0, :, :2]])
    raise ValueError(kind)


def arguments(name: str) -> dict[str, Any]:
    """Tensors, numbers and flags for every argument without a default, with no regard to its meaning."""
    x = torch.randn(1, 2, 3, 4)
    taken = getattr(ops, name).default._schema.arguments
    return {a.name: x if "Tensor" in str(a.type) else 1 for a in taken if not a.has_default_value()}


@pytest.mark.parametrize("kind", ["Sparse", "SparseCsr", "SparseBsr", "Mkldnn", "quint8", "nested"])
@pytest.mark.parametrize("name", [*OPERATORS, *DIFFERENTIABLE])
def test_tensors_that_are_not_dense(name: str, kind: str) -> None:
    """The error names each such argument, options included, and its kind."""
    call, dense, odd = getattr(ops, name), arguments(name), foreign(kind)
    tensors = [argument.name for argument in call.default._schema.arguments if "Tensor" in str(argument.type)]
    assert {"q", "k", "v", "q_offsets", "sinks"} <= set(tensors)
    for wrong in tensors:
        with pytest.raises(NotImplementedError, match=f"^pyattn: {wrong} must be a dense tensor.* got .*{kind}"):
            call(**dense | {wrong: odd})


@pytest.mark.parametrize("kind", ["Sparse", "SparseCsr", "SparseBsr", "Mkldnn", "quint8", "nested"])
def test_tensors_that_are_not_dense_of_the_function(kind: str) -> None:
    dense, odd = torch.randn(1, 2, 3, 4), foreign(kind)
    for tensors in ((odd, odd, odd), (odd, dense, dense), (dense, odd, dense), (dense, dense, odd)):
        with pytest.raises(NotImplementedError, match=f"^pyattn: [qkv] must be a dense tensor.* got .*{kind}"):
            attention(*tensors)


X = torch.zeros(2, 4, 5, 6)
Y = torch.zeros(2, 2, 7, 6)
SEEN = torch.ones(5, 7, dtype=torch.bool)

BAD_MASKS: Refusals = [
    ({"mask": SEEN.float()}, TypeError, "mask must have dtype bool, got float32"),
    ({"mask": SEEN.to(torch.uint8)}, TypeError, "mask must have dtype bool, got uint8"),
    ({"mask": SEEN[:, :6]}, ValueError, "each 1 or that of [2, 4, 5, 7], got [5, 6]"),
    ({"mask": SEEN.expand(2, 2, 5, 7)}, ValueError, "each 1 or that of [2, 4, 5, 7], got [2, 2, 5, 7]"),
    ({"mask": SEEN[None, None, None]}, ValueError, "mask must have 1 to 4 dimensions, each 1 or that of"),
    ({"mask": SEEN[0, 0]}, ValueError, "mask must have 1 to 4 dimensions, each 1 or that of"),
    ({"mask": SEEN.to("meta")}, ValueError, "mask must be on q's device, got meta and cpu"),
    (
        {"bias": SEEN},
        TypeError,
        "bias must be float, added to the scores (use mask for a bool mask, True = takes part)",
    ),
]


@each_refusal(BAD_MASKS)
def test_errors_of_masks(changes: dict[str, Tensor], kind: type[Exception], message: str) -> None:
    """Every operator over a batch gives the same errors."""
    rows, table = X[..., 0], torch.zeros(2, 1, dtype=torch.int64)
    pages = torch.zeros(1, 16, 2, 6)
    for call in (
        lambda: ops.attention_forward(X, Y, Y, **changes),
        lambda: ops.attention_backward(X, None, X, Y, Y, X, rows, rows, **changes),
        lambda: ops.attention_paged_forward(X, pages, pages, table, 7, **changes),
    ):
        with refused(kind, message, inside=True):
            call()


@pytest.mark.parametrize("shape", [(7,), (5, 1), (4, 5, 7), (2, 1, 5, 7), (1, 4, 1, 7)], ids=str)
def test_a_mask_hides_what_a_bias_of_minus_infinity_hides(shape: tuple[int, ...]) -> None:
    """In forward and backward, alone and beside a bias; a row that sees no key gives zeros."""
    q, k, v = torch.randn(2, 4, 5, 6), torch.randn(2, 2, 7, 6), torch.randn(2, 2, 7, 6)
    mask = torch.rand(shape) < 0.6
    dout, added = torch.randn_like(q), torch.randn(5, 7)
    for beside, bias in (({}, 0.0), ({"bias": added}, added)):
        found = []
        for options in (beside | {"mask": mask}, {"bias": torch.where(mask, bias, -math.inf)}):
            out, lse, row_max, row_sum = ops.attention_forward(q, k, v, **options)
            gradients = ops.attention_backward(dout, None, q, k, v, out, row_max, row_sum, **options)
            found.append((out, lse, *gradients[:3]))
        for masked, biased in zip(*found, strict=True):
            torch.testing.assert_close(masked, biased)


@each_operator
def test_derivatives_of_the_operators_raise(name: str) -> None:
    """Only pyattn's functions define derivatives: an operator called directly raises and is not silently constant."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"pyattn::{name}", "Autograd")
