"""Promise: derivatives are right in every way PyTorch requests them, and unimplemented ones raise."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.assertions import assert_close, finite
from support.backends import Backend
from support.calls import FEATURES, PAIRS, SCORES, Call, leaves_of, score_tensors
from support.cases import Case, assert_equal, run
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from pyattn import attention, reference

CASES = [
    Case(1, 1, 1, 1, 1, 1, 1),
    Case(2, 2, 2, 6, 6, 3, 3),
    Case(1, 4, 2, 5, 7, 3, 4),
    Case(2, 2, 1, 4, 6, 5, 2, causal=False, softmax_scale=0.7),
    Case(1, 2, 2, 7, 4, 3, 3, q_offset=-2),
    Case(1, 1, 1, 3, 5, 9, 17, q_offset=1, softmax_scale=-1.5),
    Case(2, 2, 1, 6, 9, 3, 4, dropout_p=0.3),
]


def leaves(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = case.inputs(dtype)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def out_and_lse(function: Callable[..., Any], case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Both results; -inf in lse, from rows that see nothing, becomes 0, because -inf has no finite differences."""
    return finite(*function(q, k, v, return_lse=True, **case.options))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradcheck(case: Case) -> None:
    assert gradcheck(partial(out_and_lse, attention, case), leaves(case))


@pytest.mark.parametrize(("a", "b"), PAIRS, ids="-".join)
def test_gradients_are_differences(repeatable: Backend, a: str, b: str) -> None:
    """Every differentiable input, with every pair of features."""
    call = Call(FEATURES[a] | FEATURES[b])
    assert gradcheck(lambda *x: call(repeatable.attention, *x), call.leaves, fast_mode=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradcheck_of_the_reference(case: Case) -> None:
    assert gradcheck(partial(out_and_lse, reference.attention, case), leaves(case))


QKV = ("q", "k", "v", "q k", "k v")
WITH_SCORES = ("q", "bias", "alibi_slopes", "sinks", "relative_bias", "bias sinks", "v alibi_slopes", "k bias")


@pytest.mark.parametrize(("wanted", "scores"), [*((some, False) for some in QKV), *((x, True) for x in WITH_SCORES)])
def test_gradients_of_some_tensors(wanted: str, scores: bool) -> None:
    inputs = dict(zip("qkv", SCORES.inputs(torch.float64), strict=True)) | (score_tensors() if scores else {})
    results = []
    for attend in (attention, reference.attention):
        leaves = {name: x.clone().requires_grad_(name in wanted.split()) for name, x in inputs.items()}
        attend(**leaves).sin().sum().backward()
        results.append({name: x.grad for name, x in leaves.items()})
    for name, grad in results[0].items():
        assert (grad is None) == (name not in wanted.split())
        if grad is not None:
            assert_close(grad, results[1][name])


def test_gradient_into_lse_alone() -> None:
    case = Case(1, 2, 1, 5, 8, 4, 3)
    q, k, v = leaves(case)
    _, lse = attention(q, k, v, return_lse=True)
    _, expected = reference.attention(q, k, v, return_lse=True)
    weights = torch.randn_like(lse)
    ours = torch.autograd.grad((lse * weights).sum(), (q, k, v))
    truth = torch.autograd.grad((expected * weights).sum(), (q, k))
    assert_close(ours[:2], truth)
    assert torch.count_nonzero(ours[2]) == 0


def test_a_recorded_backward_gives_the_same_gradients() -> None:
    """Only code that differentiates the gradients needs the graph: a penalty on another part of the model may."""
    inputs = leaves(Case(2, 4, 2, 5, 7, 3, 4))
    out = attention(*inputs, dropout_p=0.3, dropout_seed=3, q_offset=torch.tensor([1, -2]))
    plain = torch.autograd.grad(out.sin().sum(), inputs, retain_graph=True)
    for x, y in zip(torch.autograd.grad(out.sin().sum(), inputs, create_graph=True), plain, strict=True):
        assert torch.equal(x, y)
        assert x.requires_grad


def test_raw_operators_have_no_derivatives() -> None:
    q, k, v = leaves(Case(1, 2, 2, 4, 4, 3, 3))
    out, _, row_max, row_sum = torch.ops.pyattn.attention_forward(q, k, v, 1.0, True, 0)
    with pytest.raises(RuntimeError, match="attention_forward"):
        out.sum().backward()
    dq, *_ = torch.ops.pyattn.attention_backward(out.detach(), None, q, k, v, out.detach(), row_max, row_sum, 1.0)
    with pytest.raises(RuntimeError, match="attention_backward"):
        dq.sum().backward()


def test_meta_tensors() -> None:
    q, k, v = (t.to("meta") for t in Case(2, 4, 2, 5, 7, 8, 6).inputs(torch.float32))
    out, lse, dq, dk, dv = run(attention, (q, k, v), torch.empty(2, 4, 5, 6, device="meta"))
    assert out.shape == (2, 4, 5, 6)
    assert lse.shape == (2, 4, 5)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    case = Case(1, 2, 2, 9, 9, 8, 8)
    q, k, v = leaves(case, torch.float32)
    with torch.autocast("cpu", dtype):
        out = attention(q, k.to(dtype), v)
    assert out.dtype == dtype
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert [g.dtype for g in grads] == [torch.float32] * 3
    halves = leaves_of(*(x.to(dtype) for x in (q, k, v)))
    expected = torch.autograd.grad(attention(*halves).float().sum(), halves)
    for x, y in zip(grads, expected, strict=True):
        assert torch.equal(x, y.float())


def test_autocast_casts_the_bias() -> None:
    q, k, v = SCORES.inputs(torch.float32)
    tensors = leaves_of(*score_tensors(torch.float32).values())
    names = tuple(score_tensors())
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, **dict(zip(names, tensors, strict=True)))
    grads = torch.autograd.grad(out.float().sum(), tensors)
    assert [g.dtype for g in grads] == [torch.float32] * len(tensors)
    halves = leaves_of(tensors[0].bfloat16(), *tensors[1:])
    plain = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), **dict(zip(names, halves, strict=True)))
    assert torch.equal(out, plain)
    for x, y in zip(grads, torch.autograd.grad(plain.float().sum(), halves), strict=True):
        assert torch.equal(x, y.float())


def test_modes_without_gradients() -> None:
    q, k, v = leaves(Case(1, 2, 2, 5, 5, 4, 4), torch.float32)
    expected = attention(q, k, v).detach()
    with torch.no_grad():
        out = attention(q, k, v)
    assert not out.requires_grad
    assert torch.equal(out, expected)
    with torch.inference_mode():
        assert torch.equal(attention(q, k, v), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_repeats_the_bits(use_reentrant: bool) -> None:
    """With dropout: the seed is drawn again."""
    inputs = leaves(Case(1, 2, 2, 40, 40, 8, 8), torch.float32)
    call = partial(attention, dropout_p=0.4)
    found = []
    for function in (call, partial(checkpoint, call, use_reentrant=use_reentrant)):
        torch.manual_seed(1)
        function(*inputs).sin().sum().backward()
        found.append([x.grad for x in inputs])
        for x in inputs:
            x.grad = None
    assert_equal(tuple(found[0]), tuple(found[1]))


@pytest.mark.parametrize("which", range(4))
def test_saved_tensors_changed_in_place_raise(which: int) -> None:
    qkv = [x.clone() for x in leaves(Case(1, 1, 1, 3, 3, 2, 2))]
    out = attention(*qkv)
    loss = out.sum()
    with torch.no_grad():
        (*qkv, out)[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
