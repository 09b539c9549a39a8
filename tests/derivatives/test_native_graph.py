"""Promise: the graph that the native operator records behaves like any of torch's, and silence never replaces one."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.assertions import assert_close
from support.calls import SCORES, leaves_of, score_tensors
from support.cases import Case, assert_equal
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from pyattn import attention, attention_varlen, reference, set_deterministic
from pyattn.derivatives.autograd import Attention
from pyattn.derivatives.tangents import DENSE
from pyattn.options import LEARNED, Options

OPTIONS = {"q_offset": torch.tensor([1, 0]), "window": (3, 1), "softcap": 2.0, "dropout_p": 0.3, "dropout_seed": 3}


def leaves() -> list[Tensor]:
    return list(leaves_of(*Case(2, 4, 2, 5, 7, 3, 4).inputs(torch.float64)))


def by_python(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The same call by the Function in Python, which compiled graphs run."""
    results: tuple[Tensor, ...] = Attention.apply(DENSE, q, k, v, *Options(**options))  # type: ignore[no-untyped-call]
    return results[0]


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_have_the_bits_of_the_function_in_python(create_graph: bool) -> None:
    """With every option that has a gradient, and all kinds of the others: numbers, lists, tensors."""
    tensors = [*SCORES.inputs(torch.float64), *score_tensors().values()]
    others = {"window": (4, 1), "softcap": 1.5, "softmax_scale": 0.3, "dropout_p": 0.25}
    others |= {"dropout_seed": torch.tensor(7), "mask": torch.rand(tensors[0].shape[2], tensors[1].shape[2]) < 0.8}
    found = []
    for attend in (attention, by_python):
        own = leaves_of(*tensors)
        out = attend(*own[:3], **dict(zip(LEARNED, own[3:], strict=True)), **others)
        found.append(torch.autograd.grad(out.sin().sum(), own, create_graph=create_graph))
    assert_equal(*found)
    assert all(x.requires_grad == create_graph for x in found[0])


def test_second_derivatives_through_is_grads_batched() -> None:
    """A mapped backward, recorded or not, gives what a loop gives."""
    inputs, douts = leaves(), torch.randn(3, 2, 4, 5, 4, dtype=torch.float64)
    out = attention(*inputs, softcap=2.0)
    for create_graph in (False, True):
        how = {"create_graph": create_graph, "retain_graph": True}
        mapped = torch.autograd.grad(out, inputs, douts, is_grads_batched=True, **how)
        each = [torch.autograd.grad(out, inputs, dout, **how) for dout in douts]
        looped = tuple(map(torch.stack, zip(*each, strict=True)))
        assert_close(mapped, looped)
        if create_graph:
            again = [torch.autograd.grad(sum(x.sin().sum() for x in y), inputs) for y in (mapped, looped)]
            assert_close(*again)


def test_forward_mode_over_a_recorded_graph() -> None:
    """The graph was recorded before the dual level began; the gradients' tangents are not silently zero."""
    inputs, dout, moved = leaves(), *torch.randn(2, 2, 4, 5, 4, dtype=torch.float64)
    out = attention(*inputs)
    with forward_ad.dual_level():
        gradients = torch.autograd.grad(out, inputs, forward_ad.make_dual(dout, moved), retain_graph=True)
        tangents = [forward_ad.unpack_dual(x).tangent for x in gradients]
    assert_close(tangents, torch.autograd.grad(out, inputs, moved))  # gradients are linear in dout


def test_the_operator_itself_is_not_silent_under_transforms() -> None:
    """Called directly; pyattn's functions decide before it is called."""
    operator = torch.ops.pyattn.attention
    q, k, v = (x.detach() for x in leaves())
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: operator(x, k, v)[0].sum())(q)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.func.jvp(lambda x: operator(x, k, v)[0], (q,), (q,))
    with forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError)):
        operator(forward_ad.make_dual(q, q), k, v)


def test_saved_tensors() -> None:
    """Hooks see every tensor that is saved; changes in place and a second backward raise."""
    q, k, v = leaves()
    packed: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = attention(q, k, v, q_offset=OPTIONS["q_offset"])
    assert len(packed) == 7  # q, k, v, out, two row statistics, q_offset
    expected = torch.autograd.grad(attention(q, k, v, q_offset=OPTIONS["q_offset"]).sum(), (q, k, v))
    assert_equal(torch.autograd.grad(out.sum(), (q, k, v)), expected)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), (q, k, v))
    scaled = q * 1
    out = attention(scaled, k, v)
    scaled.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    out = attention(q, k, v)
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool) -> None:
    inputs = leaves()
    expected = torch.autograd.grad(attention(*inputs, **OPTIONS).sin().sum(), inputs)
    out: Any = checkpoint(lambda *x: attention(*x, **OPTIONS), *inputs, use_reentrant=use_reentrant)
    out.sin().sum().backward()
    assert_equal(tuple(x.grad for x in inputs), expected)


def test_hooks_and_results_that_are_views() -> None:
    inputs, seen = leaves(), []
    out, lse = attention(*inputs, return_lse=True)
    assert out.grad_fn is lse.grad_fn is not None
    out.register_hook(lambda x: seen.append("out") or 2 * x)
    out.grad_fn.register_prehook(lambda x: seen.append("node"))
    found = torch.autograd.grad(out[:, :1].sum(), inputs)
    assert seen == ["out", "node"]
    expected = torch.autograd.grad(2 * attention(*inputs)[:, :1].sum(), inputs)
    assert_equal(found, expected)


def test_max_score_has_no_gradient() -> None:
    out, largest = attention(*leaves(), return_max_score=True)
    assert out.requires_grad
    assert not largest.requires_grad


def test_no_cycle_keeps_memory() -> None:
    """A result that is dropped frees its graph at once, without the garbage collector."""
    inputs = leaves()
    scaled = inputs[0] * 1
    gone = weakref.ref(scaled)
    out = attention(scaled, *inputs[1:])
    del scaled, out
    assert gone() is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_where_autograd_is_off(mode: Callable[[], Any]) -> None:
    with mode():
        assert attention(*leaves()).grad_fn is None
    plain = [x.detach() for x in leaves()]
    assert attention(*plain).grad_fn is None


def test_a_parameter_and_a_subclass() -> None:
    """A subclass with __torch_function__ keeps its type, as it does through torch's own functions."""

    class Named(torch.Tensor):
        pass

    q, k, v = leaves()
    out = attention(torch.nn.Parameter(q.detach()), k, v)
    assert type(out) is Tensor
    named = q.detach().as_subclass(Named).requires_grad_()
    out = attention(named, k, v)
    assert type(out) is Named
    (found,) = torch.autograd.grad(out.sum(), named)
    (expected,) = torch.autograd.grad(attention(q, k, v).sum(), q)
    assert torch.equal(found, expected)


def test_packed_sequences() -> None:
    q, k, v = leaves_of(*torch.randn(3, 7, 2, 3, dtype=torch.float64))
    ends = torch.tensor([0, 3, 7])
    packing = ends, ends, 4, 4
    out = attention_varlen(q, k, v, *packing, seqused_k=torch.tensor([2, 4]))
    first = torch.autograd.grad(out.sin().sum(), (q, k, v), create_graph=True)
    again = torch.autograd.grad(sum(x.sin().sum() for x in first), (q, k, v))
    parts = [tuple(x[a:b].transpose(0, 1)[None] for x in (q, k, v)) for a, b in ((0, 3), (3, 7))]
    parts[0] = parts[0][0], parts[0][1][:, :, :2], parts[0][2][:, :, :2]
    whole = [reference.attention(*parts[0], q_offset=-1), reference.attention(*parts[1])]
    expected = torch.autograd.grad(sum(x.sin().sum() for x in whole), (q, k, v), create_graph=True)
    assert_close(first, expected)
    assert_close(again, torch.autograd.grad(sum(x.sin().sum() for x in expected), (q, k, v)))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at that of out, which is saved
def test_compiled_autograd() -> None:
    inputs = leaves()
    expected = torch.autograd.grad(attention(*inputs, **OPTIONS).sin().sum(), inputs)
    loss = attention(*inputs, **OPTIONS).sin().sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    assert_close(tuple(x.grad for x in inputs), expected)


def test_deterministic_is_read_by_backward() -> None:
    """On a CPU it changes nothing; both answers run."""
    inputs = leaves()
    out = attention(*inputs)
    try:
        set_deterministic(False)
        found = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    finally:
        set_deterministic(True)
    assert_equal(found, torch.autograd.grad(out.sum(), inputs))
