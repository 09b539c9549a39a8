"""Promise: forward-mode derivatives are right for every differentiable tensor."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from support.assertions import assert_close
from support.calls import ALL, FEATURES, PAIRS, Call, assert_as_reference, each_call, loss
from support.cases import Case
from support.yardstick import assert_accurate
from torch import Tensor
from torch.autograd import forward_ad, gradcheck

from pyattn import attention, attention_weights, reference
from pyattn.derivatives import tangents

# torch scripts its own forward-mode rules on first use; the category is FutureWarning since torch 2.15.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")


@pytest.mark.parametrize(("a", "b"), PAIRS, ids="-".join)
def test_tangents_are_differences(a: str, b: str) -> None:
    call = Call(FEATURES[a] | FEATURES[b])
    with mock.patch.object(tangents, "PAIRS_AT_ONCE", 50):  # two query rows at a time
        assert gradcheck(
            lambda *x: call(attention, *x), call.leaves, check_forward_ad=True, check_backward_ad=False, fast_mode=True
        )


@each_call
def test_jvp_of_each_tensor(make: Any) -> None:
    """Tangents of all tensors, and of a single one."""
    call = make()

    def moved(function: Any) -> Any:
        yield torch.func.jvp(lambda *x: call(function, *x), call.inputs, tuple(x.sin() for x in call.inputs))
        for i, x in enumerate(call.inputs):
            before, after = call.inputs[:i], call.inputs[i + 1 :]
            yield torch.func.jvp(partial(lambda b, a, x: call(function, *b, x, *a), before, after), (x,), (x.cos(),))

    assert_as_reference(lambda function: list(moved(function)), call, 1e-12)


def test_vmap_of_jvp() -> None:
    """Primals and tangents mapped together, as for many samples' directional derivatives."""
    call = Call(ALL)
    stacks = tuple(torch.stack([x, 2 * x, -x]) for x in call.inputs)

    def moved(function: Any, *inputs: Tensor) -> Any:
        return torch.func.jvp(lambda *x: call(function, *x), inputs, tuple(x.sin() for x in inputs))[1]

    mapped = torch.vmap(lambda *x: moved(attention, *x))(*stacks)
    for i, inputs in enumerate(zip(*stacks, strict=True)):
        truth = moved(reference.attention, *inputs)
        assert_close(tuple(x[i] for x in mapped), truth)


@each_call
def test_forward_ad_and_forward_over_reverse(make: Any) -> None:
    """Dual tensors of torch.autograd.forward_ad, through the call and through its backward."""
    call = make()

    def tangents_of(function: Any) -> list[Tensor]:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, x.detach().sin()) for x in call.leaves]
            out, lse = call(function, *duals)
            gradients = torch.autograd.grad(out.sin().sum() + lse.cos().sum(), duals)
            return [forward_ad.unpack_dual(x).tangent for x in (out, lse, *gradients)]

    assert_as_reference(tangents_of, call)


def test_a_tangent_of_no_tensor_costs_nothing() -> None:
    inputs = Call({}).inputs
    with forward_ad.dual_level():
        out = attention(*inputs)
        assert forward_ad.unpack_dual(out).tangent is None
        assert torch.equal(out, attention(*inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_accuracy(dtype: torch.dtype) -> None:
    case = Case(1, 4, 2, 60, 70, 16, 16, softcap=5.0, dropout_p=0.1)
    qkv = case.inputs(dtype)
    directions = tuple(torch.randn(x.shape).to(dtype) for x in qkv)

    def moved(function: Any, wide: torch.dtype) -> tuple[Tensor, ...]:
        primals, tangents = (tuple(x.to(wide) for x in tensors) for tensors in (qkv, directions))
        return torch.func.jvp(lambda *x: function(*x, return_lse=True, **case.options), primals, tangents)[1]

    ours, plain, exact = (
        moved(attention, dtype),
        moved(reference.attention, dtype),
        moved(reference.attention, torch.float64),
    )
    assert (ours[0].dtype, ours[1].dtype) == (dtype, torch.float32)
    for name, x, y, truth in zip(("out", "lse"), ours, plain, exact, strict=True):
        assert_accurate(name, x, y, truth)


def test_under_autocast() -> None:
    """The tangent belongs to the call in autocast's dtype, and like it is computed in float32."""
    inputs = tuple(x.float() for x in Call({}).inputs)
    moved = tuple(x.sin() for x in inputs)
    with torch.autocast("cpu", torch.bfloat16):
        out, tangent = torch.func.jvp(attention, inputs, moved)
    halves = (tuple(x.bfloat16() for x in tensors) for tensors in (inputs, moved))
    assert_close((out, tangent), torch.func.jvp(attention, *halves), 0)


def test_what_is_not_seen_does_not_matter() -> None:
    results = []
    for value in (0.0, torch.nan):
        torch.manual_seed(0)
        primals, moved = (torch.randn(3, 2, 2, 6, 3).double() for _ in range(2))
        primals[1:, :, :, 4:] = moved[1:, :, :, 4:] = value
        results.append(torch.func.jvp(lambda *x: attention(*x, q_offset=-2), tuple(primals), tuple(moved)))
    assert_close(*results, 0)


@pytest.mark.parametrize("moved", [True, False])
def test_nan_that_is_seen_arrives(moved: bool) -> None:
    primals, directions = torch.randn(2, 3, 1, 1, 4, 2)
    (directions if moved else primals)[2, 0, 0, 1] = torch.nan
    out = torch.func.jvp(attention, tuple(primals), tuple(directions))[1]
    assert out.isnan().any(-1).tolist() == [[[False, True, True, True]]]


def test_gradient_of_a_tangent() -> None:
    """Reverse over forward: a loss on a directional derivative."""
    call = Call(ALL)

    def slope(function: Any, *inputs: Tensor) -> Tensor:
        return torch.func.jvp(loss(call, function), inputs, tuple(x.sin() for x in inputs))[1]

    every = tuple(range(len(call.inputs)))
    assert_as_reference(lambda function: torch.func.grad(partial(slope, function), every)(*call.inputs))


def test_weights() -> None:
    (q, k, v), moved = Call({}).inputs, torch.ones(2, 2, 5, 3).double()
    results = [
        torch.func.jvp(lambda q, f=function: f(q), (q,), (moved,))
        for function in (lambda q: attention_weights(q, k) @ v, lambda q: attention(q, k, v))
    ]
    assert_close(*results)
