"""Promise: second derivatives are right and take linear memory, and third derivatives raise."""

import itertools
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from support.assertions import assert_close
from support.calls import ALL, FEATURES, PAIRS, Call, PackedCall, assert_as_reference, each_call, loss
from support.cases import Case, memory_needed
from support.yardstick import assert_accurate
from torch import Tensor
from torch.autograd import gradgradcheck

from pyattn import attention, attention_weights, reference
from pyattn.derivatives import tangents

# torch scripts its own forward-mode rules on first use; the category is FutureWarning since torch 2.15.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")

THIRD = "^pyattn: third derivatives of attention are not implemented$"


@pytest.mark.parametrize(("a", "b"), PAIRS, ids="-".join)
def test_second_derivatives_are_differences(a: str, b: str) -> None:
    call = Call(FEATURES[a] | FEATURES[b])
    with mock.patch.object(tangents, "PAIRS_AT_ONCE", 50):  # two query rows at a time
        assert gradgradcheck(lambda *x: call(attention, *x), call.leaves, fast_mode=True)


@pytest.mark.parametrize("case", [Case(1, 1, 1, 1, 1, 1, 1), Case(2, 2, 1, 3, 2, 2, 3, q_offset=-1)], ids=str)
def test_every_second_derivative(case: Case) -> None:
    """The second case has rows that see no key."""
    inputs = tuple(x.requires_grad_() for x in case.inputs(torch.float64))
    assert gradgradcheck(lambda *x: attention(*x, **case.options), inputs)


def test_second_derivatives_near_the_softcap() -> None:
    """Scores of 8 caps: 1 - tanh^2 has 3 bits left in float32; compared with float64, where it has 32."""
    k, v = torch.tensor([[[[8.0], [7.5]]]]), torch.tensor([[[[1.0], [-1.0]]]])

    def second(dtype: torch.dtype) -> Tensor:
        q = torch.ones(1, 1, 1, 1, dtype=dtype, requires_grad=True)
        out = attention(q, k.to(dtype), v.to(dtype), softmax_scale=1.0, softcap=1.0)
        (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        return torch.autograd.grad(dq.sum(), q)[0]

    torch.testing.assert_close(second(torch.float32), second(torch.float64).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("softcap", [1e300, 3.5e38, 1e-300])
def test_softcaps_past_float32(softcap: float) -> None:
    """The weights and second derivatives equal those with any cap that is as far beyond the scores."""
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    near = 2.0**90 if softcap > 1 else 2.0**-90

    def results(cap: float) -> list[Tensor]:
        x = q.clone().requires_grad_()
        weights = attention_weights(x, k, softcap=cap)
        (dq,) = torch.autograd.grad(attention(x, k, v, softcap=cap).square().sum(), x, create_graph=True)
        return [weights, *torch.autograd.grad(dq.sum(), x)]

    torch.testing.assert_close(results(softcap), results(near))


def test_second_derivatives_of_packed_sequences() -> None:
    call = PackedCall()
    assert gradgradcheck(lambda *x: call(call.ours, *x), call.leaves, fast_mode=True)


@each_call
def test_hessians(make: Any) -> None:
    """All four ways lead to plain PyTorch's double backward."""
    call = make()
    every = tuple(range(len(call.inputs)))

    def hessian(function: Any, outer: Any, inner: Any) -> Any:
        return outer(inner(loss(call, function), every), every)(*call.inputs)

    jacfwd, jacrev = torch.func.jacfwd, torch.func.jacrev
    truth = hessian(call.reference, jacrev, jacrev)
    for outer, inner in itertools.product((jacfwd, jacrev), repeat=2):
        assert_close(hessian(call.ours, outer, inner), truth, 1e-11)


def test_grad_of_grad_and_vmap() -> None:
    call = Call(ALL)

    def penalty(function: Any, *inputs: Tensor) -> Tensor:
        gradients = torch.func.grad(loss(call, function), (0, 1, 2))(*inputs)
        return sum(x.sin().sum() for x in gradients)

    stacks = [torch.stack([x, 2 * x, -x]) for x in call.inputs]
    grad = torch.func.grad(lambda *x: penalty(attention, *x), (0, 1, 2, 3))
    truth = torch.func.grad(lambda *x: penalty(reference.attention, *x), (0, 1, 2, 3))
    mapped = torch.vmap(grad)(*stacks)
    for i, inputs in enumerate(zip(*stacks, strict=True)):
        assert_close(tuple(x[i] for x in mapped), truth(*inputs), 1e-11)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "q v"])
def test_some_gradients_of_some_tensors(wanted: str) -> None:

    def second(function: Any) -> Any:
        inputs = dict(zip("qkv", Call({}).inputs, strict=True))
        torch.manual_seed(1)
        leaves = {name: torch.randn_like(x).requires_grad_(name in wanted.split()) for name, x in inputs.items()}
        some = [leaves[name] for name in wanted.split()]
        gradients = torch.autograd.grad(function(**leaves).sin().sum(), some, create_graph=True)
        return torch.autograd.grad(gradients[-1].sin().sum(), some[0])

    assert_as_reference(second, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_accuracy(dtype: torch.dtype) -> None:
    """The error of a product with the Hessian is at most twice plain PyTorch's."""
    case = Case(1, 4, 2, 60, 70, 16, 16, softcap=5.0, dropout_p=0.1)
    qkv, dout, _ = case.drawn(dtype)
    directions = [torch.randn(x.shape).to(dtype) for x in qkv]

    def product(function: Any, wide: torch.dtype) -> tuple[Tensor, ...]:
        leaves = tuple(x.to(wide).requires_grad_() for x in qkv)
        out = function(*leaves, **case.options)
        gradients = torch.autograd.grad(out, leaves, dout.to(wide), create_graph=True)
        return torch.autograd.grad(gradients, leaves, [x.to(wide) for x in directions])

    plain, exact = product(reference.attention, dtype), product(reference.attention, torch.float64)
    for name, x, y, truth in zip("qkv", product(attention, dtype), plain, exact, strict=True):
        assert x.dtype == dtype
        assert_accurate(name, x, y, truth)


def test_what_is_not_seen_does_not_matter() -> None:
    """NaN in keys after every query's last visible one, and in rows that see no key, reaches no second derivative."""
    results = []
    for value in (0.0, torch.nan):
        torch.manual_seed(0)
        q, k, v, dout = torch.randn(4, 2, 2, 6, 3).double().unbind()
        q[:, :, :2], k[:, :, 4:], v[:, :, 4:], dout[:, :, :2] = value, value, value, value
        leaves = tuple(x.requires_grad_() for x in (q, k, v, dout))
        gradients = torch.autograd.grad(attention(*leaves[:3], q_offset=-2), leaves[:3], leaves[3], create_graph=True)
        results.append(torch.autograd.grad([x[..., 2:4, :].sin().sum() for x in gradients], leaves))
    assert_close(*results, 0)
    assert all(x.isfinite().all() for x in results[1])


@pytest.mark.parametrize("which", ["q", "k", "v", "dout", "direction"])
def test_nan_that_is_seen_arrives(which: str) -> None:
    tensors = dict(zip(("q", "k", "v", "dout", "direction"), torch.randn(5, 1, 1, 4, 2).unbind(), strict=True))
    tensors[which][0, 0, 1, 0] = torch.nan
    q, k, v, dout = (tensors[name].requires_grad_() for name in ("q", "k", "v", "dout"))
    (dq,) = torch.autograd.grad(attention(q, k, v), q, dout, create_graph=True)
    row = torch.autograd.grad(dq, q, tensors["direction"])[0][0, 0, 1]
    assert row.isnan().any()


@pytest.mark.parametrize("size", ["batch", "num_heads_q", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"])
def test_sizes_of_zero(size: str) -> None:
    sizes = dict.fromkeys(("batch", "num_heads_q", "num_heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"), 2)
    sizes |= {size: 0} | ({"num_heads_kv": 0} if size == "num_heads_q" else {})
    leaves = tuple(x.requires_grad_() for x in Case(**sizes).inputs(torch.float64))
    gradients = torch.autograd.grad(attention(*leaves).sin().sum(), leaves, create_graph=True)
    for x, leaf in zip(torch.autograd.grad([x.sin().sum() for x in gradients], leaves), leaves, strict=True):
        assert x.shape == leaf.shape
        assert x.isfinite().all()


def test_memory_is_linear() -> None:
    """Less than one float32 matrix of all pairs; a formula without blocks holds some twenty.

    The allocator keeps freed memory, so the blocks take 19 to 34 MB; the matrix takes 67 MB.
    """
    leaves = tuple(x.requires_grad_() for x in torch.randn(3, 1, 1, 4096, 8).unbind())

    def call() -> None:
        gradients = torch.autograd.grad(attention(*leaves).sum(), leaves, create_graph=True)
        torch.autograd.grad([x.sum() for x in gradients], leaves)

    with mock.patch.object(tangents, "PAIRS_AT_ONCE", 2**16):
        assert memory_needed(call) < 4096**2 * 4


def test_third_derivatives_raise() -> None:
    leaves = Call({}).leaves
    gradients = torch.autograd.grad(attention(*leaves).sin().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(gradients[0].sin().sum(), leaves, create_graph=True)
    with pytest.raises(NotImplementedError, match=THIRD):
        torch.autograd.grad(second[0].sum(), leaves)
    call, moved = Call({}), torch.ones(2, 2, 5, 3).double()
    q, k, v = call.inputs
    first = torch.func.grad(lambda q: loss(call, attention)(q, k, v))

    def along(q: Tensor) -> Tensor:
        return torch.func.jvp(first, (q,), (moved,))[1]

    def summed(q: Tensor) -> Tensor:
        return torch.func.grad(lambda q: first(q).sin().sum())(q).sum()

    for third in (
        lambda: torch.func.grad(summed)(q),
        lambda: torch.func.jvp(summed, (q,), (moved,)),
        lambda: torch.func.grad(lambda q: along(q).sum())(q),
        lambda: torch.func.jvp(along, (q,), (moved,)),
    ):
        with pytest.raises(NotImplementedError, match=THIRD):
            third()


def test_autograd_functional() -> None:
    """torch.autograd.functional's jvp is a double backward; its hvp is a triple one, and raises."""
    call, functional = Call({}), torch.autograd.functional
    moved = tuple(x.sin() for x in call.inputs)
    assert_as_reference(
        lambda function: (
            functional.jvp(partial(call, function), call.inputs, moved),
            functional.vhp(loss(call, function), call.inputs, moved),
            functional.hessian(loss(call, function), call.inputs),
        )
    )
    with pytest.raises(NotImplementedError, match=THIRD):
        functional.hvp(loss(call, attention), call.inputs, moved)


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (1, 0), "softcap": 2.0}], ids=["causal", "window"])
def test_vectorized_hessians(options: dict[str, Any], strategy: str) -> None:
    """They use an older vmap than torch.func's."""
    x, functional = torch.randn(1, 2, 3, 4, dtype=torch.float64), torch.autograd.functional

    def scalar(x: Tensor) -> Tensor:
        return attention(x, x.cos(), x, **options).sin().sum()

    found = functional.hessian(scalar, x, vectorize=True, outer_jacobian_strategy=strategy)
    assert_close(found, functional.hessian(scalar, x), 1e-11)


@pytest.mark.parametrize("which", range(3))
def test_saved_tensors_changed_in_place_raise(which: int) -> None:
    leaves = Call({}).leaves
    inputs = [x.clone() for x in leaves]
    gradient = torch.autograd.grad(attention(*inputs).sin().sum(), leaves, create_graph=True)[0].sin().sum()
    with torch.no_grad():
        inputs[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(gradient, leaves)
