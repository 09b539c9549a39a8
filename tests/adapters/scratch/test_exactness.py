"""Code that almost is attention: results, gradients and errors are those of the plain code."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pyattn.adapters import scratch

B, H, T, D = 2, 3, 6, 4
INF = math.inf
FUTURE = torch.ones(T, T).triu(1).bool()
FLOAT_FUTURE = FUTURE.double()

Code = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Counting(torch.Tensor):
    """A class of tensors with its own functions: the result is of that class, too."""


def without_gradients(step: Callable[[Tensor, Tensor], Tensor | None], q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """Scores, changed by a step of which no gradient is recorded."""
    scores = q @ k.mT
    with torch.no_grad():
        changed = step(scores, bias)
    return scores if changed is None else changed


def scores_without_gradients(q, k, v, bias):
    with torch.no_grad():
        scores = q @ k.mT
    return scores.softmax(-1) @ v


def detached_in_place(q, k, v, bias):
    scores = q @ k.mT * 2
    scores.detach_()
    return scores.softmax(-1) @ v


def a_gradient_of_scores_that_had_none(q, k, v, bias):
    scores = q.detach() @ k.detach().mT
    scores.requires_grad_()
    (scores.softmax(-1) @ v).sum().backward(retain_graph=True)
    return scores.grad + (q + k + v + bias[0, 0, 0]).sum()


def other_data(q, k, v, bias):
    scores = q.detach() @ k.detach().mT
    scores.data = torch.ones_like(scores)
    return scores.softmax(-1) @ v


def read_by_numpy_then_changed(q, k, v, bias):
    scores = q.detach() @ k.detach().mT
    shared = scores.numpy()
    scores.mul_(2)
    return scores.softmax(-1) @ v + float(shared.sum())


def of_another_class(q, k, v, bias):
    scores = q @ k.mT * (torch.ones(T, T).double() * 3).as_subclass(Counting)
    out = scores.softmax(-1) @ v
    assert type(out) is Counting
    return out.as_subclass(Tensor)


def a_parameter_changed(q, k, v, bias):
    added = nn.Parameter(bias.detach().clone())
    scores = q @ k.mT + added
    with torch.no_grad():
        added.zero_()
    return scores.softmax(-1) @ v


def data_of_a_parameter_changed(q, k, v, bias):
    added = nn.Parameter(bias.detach().clone())
    scores = q @ k.mT + added
    added.data.zero_()
    return scores.softmax(-1) @ v


def sixteen_bit_queries_changed(q, k, v, bias):
    with torch.autocast("cpu", torch.bfloat16):
        single = q[0].float() * 1
        scores = torch.bmm(single, k[0].float().mT).clamp(-1, 1)
        with torch.no_grad():
            single.mul_(2)
    return scores.double().softmax(-1) @ v[0]


def products_without_a_sum(q, k, v, bias):
    """In einsum, which multiplies them elementwise."""
    weights = torch.einsum("...id,...jd->...ij", q[..., :1, :1], k[..., :1, :1])
    weights += bias[:, :1, :1]
    return weights.softmax(-1) @ v[:, :, :1]


CODES: dict[str, Code] = {
    "a result changed in place": lambda q, k, v, b: ((q @ k.mT).softmax(-1) @ v).mul_(2).add_(q),
    "a fill of hidden keys": lambda q, k, v, b: (q @ k.mT).masked_fill(FUTURE, -INF).tril().softmax(-1) @ v,
    "a fill after a mask": lambda q, k, v, b: (q @ k.mT + FLOAT_FUTURE * -1e9).masked_fill(FUTURE, 5.0).softmax(-1) @ v,
    "a fill undone by a sum": lambda q, k, v, b: (
        ((q @ k.mT).masked_fill(FUTURE, 1e9) - 1e9 * FLOAT_FUTURE).softmax(-1) @ v
    ),
    "a triangle under a row of -1e9": lambda q, k, v, b: (
        ((q @ k.mT).tril() - 1e9 * (FLOAT_FUTURE.roll(1, 0))).softmax(-1) @ v
    ),
    "integers, whose product overflows": lambda q, k, v, b: (
        (((q.detach() * 90).to(torch.int8) @ (k.detach() * 90).to(torch.int8).mT).double() / 50).softmax(-1) @ v
    ),
    "scores in 8 bits": lambda q, k, v, b: (q @ k.mT).to(torch.float8_e4m3fn).double().softmax(-1) @ v,
    "weights in 8 bits": lambda q, k, v, b: (q @ k.mT).softmax(-1).to(torch.float8_e5m2).double() @ v,
    "times True": lambda q, k, v, b: (q @ k.mT * True).softmax(-1) @ v,
    "times a complex number": lambda q, k, v, b: (q @ k.mT * 1j).imag.softmax(-1) @ v,
    "plus a complex number": lambda q, k, v, b: (q @ k.mT + 1j).real.softmax(-1) @ v,
    "times a complex tensor": lambda q, k, v, b: (q @ k.mT * torch.tensor(1j)).imag.softmax(-1) @ v,
    "plus a huge number": lambda q, k, v, b: (q @ k.mT + 1e300).softmax(-1) @ v,
    "plus a sparse tensor": lambda q, k, v, b: (q[0, 0] @ k[0, 0].mT + b[0].detach().to_sparse()).softmax(-1) @ v[0, 0],
    "expanded weights": lambda q, k, v, b: (q @ k.mT).softmax(-1).expand(4, B, H, T, T) @ v,
    "no columns": lambda q, k, v, b: (q[..., :0] @ k[..., :0].mT).softmax(-1) @ v,
    "scores without gradients": scores_without_gradients,
    "a multiple without gradients": lambda q, k, v, b: (
        without_gradients(lambda s, b: s.mul_(0.5), q, k, b).softmax(-1) @ v
    ),
    "a sum without gradients": lambda q, k, v, b: without_gradients(lambda s, b: s + b, q, k, b).softmax(-1) @ v,
    "a sum in place without gradients": lambda q, k, v, b: (
        without_gradients(lambda s, b: s.add_(b), q, k, b).softmax(-1) @ v
    ),
    "weights without gradients": lambda q, k, v, b: without_gradients(lambda s, b: s.softmax(-1), q, k, b) @ v,
    "detached in place": detached_in_place,
    "a gradient of scores that had none": a_gradient_of_scores_that_had_none,
    "other data": other_data,
    "read by NumPy, then changed": read_by_numpy_then_changed,
    "of another class": of_another_class,
    "16-bit queries changed": sixteen_bit_queries_changed,
    "products without a sum": products_without_a_sum,
    "a parameter changed": a_parameter_changed,
    "the data of a parameter changed": data_of_a_parameter_changed,
}


def results(code: Code) -> list[Tensor | None]:
    """The result and the gradients of a weighted sum of it, None where there is none."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(B, H, T, D, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]
    inputs.append(torch.randn(H, T, T, dtype=torch.float64, generator=generator).requires_grad_())
    out = code(*inputs)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()
    return [out.detach() + 0, *torch.autograd.grad(loss, inputs, allow_unused=True)]


@pytest.mark.parametrize("name", CODES)
def test_results(name):
    plain = results(CODES[name])
    with scratch.enabled():
        ours = results(CODES[name])
    assert [x is None for x in ours] == [x is None for x in plain]
    for x, y in zip(ours, plain, strict=True):
        if y is not None:
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


ERRORS: dict[str, Code] = {
    "a fill beyond float16": lambda q, k, v, b: (q.half() @ k.half().mT).masked_fill(FUTURE, -1e9).softmax(-1) @ v,
    "a bound beyond float16": lambda q, k, v, b: (q.half() @ k.half().mT).clamp(min=-1e9).softmax(-1) @ v,
    "a fill with a vector": lambda q, k, v, b: (q @ k.mT).masked_fill(FUTURE, torch.tensor([-1e9])).softmax(-1) @ v,
    "a mask of another size": lambda q, k, v, b: (q @ k.mT).masked_fill(FUTURE[:2], -INF).softmax(-1) @ v,
    "queries of another dtype": lambda q, k, v, b: (q.float() @ k.mT).softmax(-1).double() @ v,
    "values of another dtype": lambda q, k, v, b: (q @ k.mT).softmax(-1) @ v.float(),
    "values of another size": lambda q, k, v, b: (q @ k.mT).softmax(-1) @ v[:, :, 1:],
    "a dimension too many": lambda q, k, v, b: (q @ k.mT).softmax(4) @ v,
    "scores changed after tanh": lambda q, k, v, b: (q @ k.mT).tanh().mul_(3).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    with pytest.raises((RuntimeError, IndexError)) as plain:
        results(ERRORS[name])
    with pytest.raises(type(plain.value)) as ours, scratch.enabled():
        results(ERRORS[name])
    assert str(ours.value).split(" at ")[0][:40] == str(plain.value).split(" at ")[0][:40]


def test_autocast_leaves_double_precision():
    q = torch.randn(B, H, T, D, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16), scratch.enabled():
        assert ((q @ q.mT).softmax(-1) @ q).dtype == torch.float64
    assert scratch.counts().taken == 1


@pytest.mark.parametrize("sizes", [(1, 3, 4, 2), (3, 1, 4, 2), (2, 3, 1, 2), (2, 3, 4, 1), (1, 1, 4, 1)])
@pytest.mark.parametrize("letters", ["bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd"])
def test_einsum_over_dimensions_of_size_one(sizes, letters):
    """Its bits, in gradients too, where the scores turn out to be none."""
    b, h, t, d = sizes
    generator = torch.Generator().manual_seed(3)
    shape = (b, h, t, t) if "qk," in letters else (b, h, t, d)
    inputs = [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in (shape, (b, h, t, d))]

    def code():
        out = torch.einsum(letters, *inputs).exp()
        return [out.detach() + 0, *torch.autograd.grad(out.sin().sum(), inputs)]

    plain = code()
    with scratch.enabled():
        torch.testing.assert_close(code(), plain, rtol=0, atol=0)
