"""Promise: derivatives are right in every way PyTorch asks for them, and those that nobody wrote raise."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import Case, run
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from pyattn import attention, reference
from pyattn.options import Options

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
    """Both results; lse is 0 where it is -inf, in rows that see nothing, for no finite differences exist there."""
    out, lse = function(q, k, v, return_lse=True, **case.options)
    return out, lse.masked_fill(lse == -torch.inf, 0.0)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradcheck(case: Case) -> None:
    assert gradcheck(partial(out_and_lse, attention, case), leaves(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradcheck_of_the_reference(case: Case) -> None:
    assert gradcheck(partial(out_and_lse, reference.attention, case), leaves(case))


def score_tensors(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """For a batch of 2, 4 heads, 4 queries and 5 keys; the bias broadcasts over heads."""
    return {
        "bias": torch.randn(2, 1, 4, 5, dtype=dtype).masked_fill(torch.rand(2, 1, 4, 5) < 0.2, -torch.inf),
        "alibi_slopes": torch.rand(4, dtype=dtype),
        "sinks": torch.randn(4, dtype=dtype),
    }


SCORES = Case(2, 4, 2, 4, 5, 3, 3)


@pytest.mark.parametrize("wanted", ["q", "bias", "alibi_slopes", "sinks", "bias sinks", "v alibi_slopes", "k bias"])
def test_gradients_of_some_tensors(wanted: str) -> None:
    q, k, v = SCORES.inputs(torch.float64)
    inputs = {"q": q, "k": k, "v": v, **score_tensors()}
    results = []
    for attend in (attention, reference.attention):
        leaves = {name: x.clone().requires_grad_(name in wanted.split()) for name, x in inputs.items()}
        attend(**leaves).sin().sum().backward()
        results.append({name: x.grad for name, x in leaves.items()})
    for name, grad in results[0].items():
        assert (grad is None) == (name not in wanted.split())
        if grad is not None:
            torch.testing.assert_close(grad, results[1][name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv"])
def test_gradients_of_some_inputs(wanted: str) -> None:
    case = Case(1, 2, 2, 5, 5, 4, 4)
    inputs = dict(zip("qkv", leaves(case), strict=True))
    everything = torch.autograd.grad(attention(**inputs).sum(), tuple(inputs.values()))
    some = {name: x.detach().requires_grad_(name in wanted) for name, x in inputs.items()}
    attention(**some).sum().backward()
    for (name, x), expected in zip(some.items(), everything, strict=True):
        assert x.grad is None if name not in wanted else torch.equal(x.grad, expected)


def test_gradient_into_lse_alone() -> None:
    case = Case(1, 2, 1, 5, 8, 4, 3)
    q, k, v = leaves(case)
    _, lse = attention(q, k, v, return_lse=True)
    _, expected = reference.attention(q, k, v, return_lse=True)
    weights = torch.randn_like(lse)
    ours = torch.autograd.grad((lse * weights).sum(), (q, k, v))
    truth = torch.autograd.grad((expected * weights).sum(), (q, k))
    torch.testing.assert_close(ours[:2], truth, rtol=0, atol=1e-12)
    assert torch.count_nonzero(ours[2]) == 0


def test_a_recorded_backward_gives_the_same_gradients() -> None:
    """The graph matters only to those who differentiate it: a penalty on another part of the model may need it."""
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offsets", [None, torch.tensor([1, -2])], ids=["offset", "offsets"])
@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.3, "dropout_seed": torch.tensor(5)}], ids=["", "dropout"])
def test_opcheck(dtype: torch.dtype, offsets: Tensor | None, dropout: dict[str, Any]) -> None:
    """Results are as the schemas and fake tensors promise, where lse has q's dtype and where it does not."""
    case = Case(2, 4, 2, 5, 7, 8, 6)
    q, k, v = case.inputs(dtype)
    dout, dlse = case.gradients(dtype)
    options = Options(0.5, True, 2, offsets, **dropout)
    out, lse, row_max, row_sum = torch.ops.pyattn.attention_forward(q, k, v, *options)
    torch.library.opcheck(torch.ops.pyattn.attention_forward, (q, k, v, *options))
    heads_inside = q.transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(torch.ops.pyattn.attention_forward, (heads_inside, k, v, *options))
    dlse = dlse.to(lse.dtype)
    torch.library.opcheck(torch.ops.pyattn.attention_backward, (dout, dlse, q, k, v, out, row_max, row_sum, *options))
    torch.library.opcheck(torch.ops.pyattn.attention_backward, (dout, None, q, k, v, out, row_max, row_sum, *options))


MASKS = {"window": (2, 1), "key_ranges": torch.tensor([[[0, 5], [1, 4], [2, 2], [0, 3]]])}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("names", [(), ("bias",), ("alibi_slopes", "sinks"), ("bias", "alibi_slopes", "sinks")])
def test_opcheck_of_masks_and_scores(dtype: torch.dtype, names: tuple[str, ...]) -> None:
    q, k, v = SCORES.inputs(dtype)
    options = MASKS | {"softcap": 1.5} | {name: x for name, x in score_tensors(dtype).items() if name in names}
    out, _, row_max, row_sum = torch.ops.pyattn.attention_forward(q, k, v, **options)
    torch.library.opcheck(torch.ops.pyattn.attention_forward, (q, k, v), options)
    for wanted in (False, True):
        options["output_mask"] = [wanted and name in names for name in ("bias", "alibi_slopes", "sinks")]
        tensors = (torch.randn_like(out), None, q, k, v, out, row_max, row_sum)
        torch.library.opcheck(torch.ops.pyattn.attention_backward, tensors, options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("names", [(), ("bias",), ("alibi_slopes", "sinks"), ("bias", "alibi_slopes", "sinks")])
def test_compile_masks_and_scores(names: tuple[str, ...]) -> None:
    torch._dynamo.reset()
    inputs = (*SCORES.inputs(torch.float64), *(score_tensors()[name] for name in names))

    def call(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        return attention(q, k, v, **MASKS, softcap=1.5, **dict(zip(names, tensors, strict=True)))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    leaves = leaves_of(*inputs)
    assert torch.equal(compiled(*leaves), call(*leaves))
    ours, plain = (torch.autograd.grad(f(*leaves).sin().sum(), leaves) for f in (compiled, call))
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-14)
    some = (*inputs[:-1], inputs[-1].requires_grad_())
    ours, plain = (torch.autograd.grad(f(*some).sin().sum(), some[-1]) for f in (compiled, call))
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-14)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, return_lse=True), fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for seqlen in (8, 13):
        case = Case(2, 4, 2, seqlen, seqlen + 2, 8, 6)
        qkv, (dout, dlse) = case.inputs(torch.float32), case.gradients(torch.float32)
        ours = run(lambda q, k, v, return_lse: compiled(q, k, v), qkv, dout, dlse)
        for x, y in zip(ours, run(attention, qkv, dout, dlse), strict=True):
            assert torch.equal(x, y)
            assert x.stride() == y.stride()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compile_one_tensor_as_several_arguments() -> None:
    torch._dynamo.reset()
    slopes = torch.rand(2)
    both = partial(attention, *torch.randn(3, 1, 2, 7, 8), alibi_slopes=slopes, sinks=slopes)
    assert torch.equal(torch.compile(both, fullgraph=True, backend="aot_eager")(), both())
    x, y = leaves_of(*torch.randn(2, 1, 2, 7, 8))
    for function in (lambda x, y: attention(x, x, x), lambda x, y: attention(x, y, y), lambda x, y: attention(y, x, y)):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, y), function(x, y))
        expected = torch.func.grad(lambda x, function=function: function(x, y.detach()).sin().sum())(x.detach())
        grad = torch.autograd.grad(compiled(x, y.detach()).sin().sum(), x)[0]
        torch.testing.assert_close(grad, expected, rtol=0, atol=8 * torch.finfo(torch.float32).eps)


def test_meta_tensors() -> None:
    q, k, v = (t.to("meta") for t in Case(2, 4, 2, 5, 7, 8, 6).inputs(torch.float32))
    out, lse, dq, dk, dv = run(attention, (q, k, v), torch.empty(2, 4, 5, 6, device="meta"))
    assert out.shape == (2, 4, 5, 6)
    assert lse.shape == (2, 4, 5)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)


def test_functional_transforms() -> None:
    case = Case(2, 2, 1, 4, 5, 3, 3)
    q, k, v = case.inputs(torch.float64)

    def loss(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = function(q, k, v, return_lse=True)
        return (out.sin().sum() + lse.cos().sum()) / 2

    inputs = leaves_of(q, k, v)
    expected = torch.autograd.grad(loss(reference.attention, *inputs), inputs)
    grads = torch.func.grad(partial(loss, attention), (0, 1, 2))(q, k, v)
    torch.testing.assert_close(grads, expected, rtol=0, atol=1e-12)
    jacobian = torch.func.jacrev(attention, argnums=1)(q, k, v)
    plain = torch.autograd.functional.jacobian(lambda k: reference.attention(q, k, v), k)
    torch.testing.assert_close(jacobian, plain, rtol=0, atol=1e-12)


def leaves_of(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.detach().requires_grad_() for t in tensors)


def test_vmap_over_nothing() -> None:
    assert torch.vmap(attention)(*torch.randn(3, 0, 1, 2, 3, 4)).shape == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 2, 0), (1, 1, None)])
def test_vmap(in_dims: tuple[int | None, ...]) -> None:
    case = Case(2, 2, 1, 4, 5, 3, 3)
    stacks = [
        x if dim is None else torch.stack([x, x.sin(), 2 * x], dim)
        for x, dim in zip(case.inputs(torch.float64), in_dims, strict=True)
    ]

    def slices(i: int) -> list[Tensor]:
        return [x if dim is None else x.select(dim, i) for x, dim in zip(stacks, in_dims, strict=True)]

    def grad(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        grads: tuple[Tensor, ...] = torch.func.grad(lambda *qkv: attention(*qkv).sin().sum(), (0, 1, 2))(q, k, v)
        return grads

    out, lse = torch.vmap(partial(attention, return_lse=True), in_dims)(*stacks)
    grads = torch.vmap(grad, in_dims)(*stacks)
    for i in range(3):
        torch.testing.assert_close((out[i], lse[i]), attention(*slices(i), return_lse=True), rtol=0, atol=1e-12)
        torch.testing.assert_close(tuple(g[i] for g in grads), grad(*slices(i)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mapped", ["", "q", "bias", "alibi_slopes", "sinks", "key_ranges", "q bias alibi_slopes"])
@pytest.mark.parametrize("size", [0, 3])
@pytest.mark.parametrize("full", [False, True])
def test_vmap_over_masks_and_scores(mapped: str, size: int, full: bool) -> None:
    """``full``: what may be shared by all sequences has a batch dimension of its own."""
    q, k, v = SCORES.inputs(torch.float64)
    inputs = {"q": q, "k": k, "v": v, "key_ranges": MASKS["key_ranges"], **score_tensors()}
    if full:
        inputs |= {"key_ranges": inputs["key_ranges"].expand(2, 4, 2), "alibi_slopes": torch.rand(2, 4).double()}
    else:
        inputs["bias"] = inputs["bias"][0, 0]
    dims = {name: (0 if i % 2 else -1) if name in mapped.split() else None for i, name in enumerate(inputs)}
    stacks = {
        name: x if dims[name] is None else torch.stack([x, x.flip(-1).sort().values, x] if size else [x], dims[name])
        for name, x in inputs.items()
    }
    if size == 0:
        stacks = {name: x if dims[name] is None else x.narrow(dims[name], 0, 0) for name, x in stacks.items()}
    learned = [name for name in inputs if name != "key_ranges"]

    def call(**tensors: Tensor) -> tuple[Tensor, Tensor]:
        return attention(**tensors, window=(3, -1), return_lse=True)

    def grads(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        rest = {name: x for name, x in tensors.items() if name not in learned}

        def loss(some: dict[str, Tensor]) -> Tensor:
            out, lse = call(**some, **rest)
            return out.sin().sum() + lse.cos().sum()

        return torch.func.grad(loss)({name: tensors[name] for name in learned})

    if not mapped:
        stacks |= {"q": torch.stack([q] * size) if size else q[None][:0]}
        dims |= {"q": 0}
    out, lse = torch.vmap(lambda tensors: call(**tensors), (dims,))(stacks)
    found = torch.vmap(grads, (dims,))(stacks)
    assert out.shape[0] == lse.shape[0] == size
    assert all(x.shape == (size, *inputs[name].shape) for name, x in found.items())
    for i in range(size):
        one = {name: x if dims[name] is None else x.select(dims[name], i) for name, x in stacks.items()}
        torch.testing.assert_close((out[i], lse[i]), call(**one), rtol=0, atol=1e-12)
        torch.testing.assert_close({name: x[i] for name, x in found.items()}, grads(one), rtol=0, atol=1e-12)


def test_per_sample_offsets_under_vmap() -> None:
    q, k, v = (torch.stack([x, 2 * x]) for x in Case(2, 1, 1, 4, 5, 3, 3).inputs(torch.float64))
    offsets = torch.tensor([[0, 1], [-2, 3]])
    out = torch.vmap(lambda q, k, v, o: attention(q, k, v, q_offset=o))(q, k, v, offsets)
    for i in range(2):
        torch.testing.assert_close(out[i], attention(q[i], k[i], v[i], q_offset=offsets[i]), rtol=0, atol=1e-12)


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
    assert [g.dtype for g in grads] == [torch.float32] * 3
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


def test_checkpointing_repeats_the_bits() -> None:
    q, k, v = leaves(Case(1, 2, 2, 40, 40, 8, 8), torch.float32)
    direct = torch.autograd.grad(attention(q, k, v).sin().sum(), (q, k, v))
    again = torch.autograd.grad(checkpoint(attention, q, k, v, use_reentrant=False).sin().sum(), (q, k, v))
    for x, y in zip(direct, again, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("which", range(4))
def test_saved_tensors_changed_in_place_raise(which: int) -> None:
    qkv = [x.clone() for x in leaves(Case(1, 1, 1, 3, 3, 2, 2))]
    out = attention(*qkv)
    loss = out.sum()
    with torch.no_grad():
        (*qkv, out)[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
