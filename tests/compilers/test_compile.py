"""Promise: torch.compile gives the same results and gradients, in one graph for all lengths."""

from functools import partial
from typing import Any

import pytest
import torch
from support.assertions import assert_close, graph_of
from support.calls import MASKS, SCORES, leaves_of, score_tensors
from support.cases import Case, run
from torch import Tensor
from torch.autograd import forward_ad

from pyattn import attention, attention_varlen
from pyattn.options import LEARNED
from pyattn.options.checks import check_names

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("names", [(), ("bias",), ("alibi_slopes", "sinks", "relative_bias"), LEARNED])
def test_compile_masks_and_scores(names: tuple[str, ...]) -> None:
    inputs = (*SCORES.inputs(torch.float64), *(score_tensors()[name] for name in names))

    def call(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        return attention(q, k, v, **MASKS, softcap=1.5, **dict(zip(names, tensors, strict=True)))

    compiled = graph_of(call)
    leaves = leaves_of(*inputs)
    assert torch.equal(compiled(*leaves), call(*leaves))
    ours, plain = (torch.autograd.grad(f(*leaves).sin().sum(), leaves) for f in (compiled, call))
    assert_close(ours, plain, 1e-14)
    some = (*inputs[:-1], inputs[-1].requires_grad_())
    ours, plain = (torch.autograd.grad(f(*some).sin().sum(), some[-1]) for f in (compiled, call))
    assert_close(ours, plain, 1e-14)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    compiled = graph_of(partial(attention, return_lse=True), dynamic=dynamic)
    for seqlen in (8, 13):
        case = Case(2, 4, 2, seqlen, seqlen + 2, 8, 6)
        qkv, dout, dlse = case.drawn(torch.float32)
        ours = run(lambda q, k, v, return_lse: compiled(q, k, v), qkv, dout, dlse)
        for x, y in zip(ours, run(attention, qkv, dout, dlse), strict=True):
            assert torch.equal(x, y)
            assert x.stride() == y.stride()


def test_compile_one_tensor_as_several_arguments() -> None:
    slopes = torch.rand(2)
    both = partial(attention, *torch.randn(3, 1, 2, 7, 8), alibi_slopes=slopes, sinks=slopes)
    assert torch.equal(graph_of(both)(), both())
    x, y = leaves_of(*torch.randn(2, 1, 2, 7, 8))
    for function in (lambda x, y: attention(x, x, x), lambda x, y: attention(x, y, y), lambda x, y: attention(y, x, y)):
        compiled = graph_of(function)
        assert torch.equal(compiled(x, y), function(x, y))
        expected = torch.func.grad(lambda x, function=function: function(x, y.detach()).sin().sum())(x.detach())
        grad = torch.autograd.grad(compiled(x, y.detach()).sin().sum(), x)[0]
        torch.testing.assert_close(grad, expected, rtol=0, atol=8 * torch.finfo(torch.float32).eps)


OPTIONS = {"window": (5, -1), "softcap": 2.0, "dropout_p": 0.3}


def every_option(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor, sinks: Tensor, seed: Tensor
) -> tuple[Tensor, Tensor]:
    more = {"bias": bias, "alibi_slopes": slopes, "sinks": sinks, "dropout_seed": seed}
    return attention(q, k, v, **OPTIONS, **more, return_lse=True)


def test_one_graph_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default backend, every option: ten lengths compile once, and 0, which torch specializes on, once more."""
    monkeypatch.setenv("CI", "true")  # Inductor checks more there
    compiled = torch.compile(every_option, fullgraph=True, dynamic=True)

    def check(seqlen: int) -> None:
        qkv = (torch.randn(2, heads, seqlen, 8) for heads in (4, 2, 2))
        leaves = leaves_of(*qkv, torch.randn(4, 1, seqlen), torch.rand(4), torch.randn(4))
        results = []
        for function in (compiled, every_option):
            out, lse = function(*leaves, torch.tensor(7))
            results.append((out, lse, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves)))
        torch.testing.assert_close(*results)

    check(5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seqlen in (6, 7, 9, 12, 20, 33, 64, 100, 130):
            check(seqlen)
    check(0)


def test_packed_sequences_compile_once() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        return attention_varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, softcap=2.0)

    compiled = graph_of(call, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([3, 2, 4], [1, 1, 2], [7, 0, 5]):
            cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
            leaves = leaves_of(*(torch.randn(sum(lengths), heads, 8) for heads in (4, 2, 2)))
            results = [function(*leaves, cu_seqlens, max(lengths)) for function in (compiled, call)]
            torch.testing.assert_close(*results)
            torch.testing.assert_close(*(torch.autograd.grad(x.sin().sum(), leaves) for x in results))


def first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.func.grad(lambda q: attention(q, k, v).sin().sum())(q)


def second(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.func.grad(lambda q: first(q, k, v).sin().sum())(q)


def mapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.vmap(lambda *x: attention(*(t[None] for t in x)))(q, k, v)


@pytest.mark.parametrize("function", [first, second, mapped])
def test_transforms_in_compiled_functions(function: Any) -> None:
    """They run outside of graphs, because a graph lacks their derivatives."""
    inputs = Case(2, 4, 2, 5, 6, 3, 3).inputs(torch.float64)
    torch.testing.assert_close(torch.compile(function, backend="aot_eager")(*inputs), function(*inputs))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        graph_of(function)(*inputs)


def test_compiled_second_derivatives() -> None:
    """torch itself has no double backward of compiled functions.

    Until torch 2.14 a dual tensor reaches the raw operator, which refuses it; later ones run it outside of the graph.
    """
    leaves = leaves_of(*Case(1, 2, 2, 5, 6, 3, 3).inputs(torch.float64))
    compiled = torch.compile(attention, backend="aot_eager")
    grad = torch.autograd.grad(compiled(*leaves).sin().sum(), leaves[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in leaves)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q.sin())
        refusal = "forward AD"
        try:
            out = torch.compile(attention, backend="aot_eager")(dual, k, v)
        except NotImplementedError as error:
            refusal = str(error)
        else:
            torch.testing.assert_close(*(forward_ad.unpack_dual(x).tangent for x in (out, attention(dual, k, v))))
        assert "forward AD" in refusal


def test_classes_have_graphs_apart() -> None:
    """torch keeps eight graphs of a code object, so classes must not share the one that checks names."""
    x = torch.ones(2)
    for factor in range(torch._dynamo.config.recompile_limit + 2):

        class Times(torch.nn.Module):
            @check_names
            def forward(self, x: Tensor, factor: int = factor) -> Tensor:
                return factor * x

        assert torch.compile(Times(), fullgraph=True, backend="eager")(x).tolist() == [factor, factor]
