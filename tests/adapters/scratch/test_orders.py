"""Scores whose dimensions are in another order than (*lead, queries, keys): keys first, heads last, transposed."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from support.adapters.compiled_graphs import replacing
from torch import Tensor
from torch.nn import functional

from pyattn.adapters import scratch

B, H, T, S, D = 2, 3, 5, 6, 4
INF = math.inf
FUTURE = torch.ones(T, S).triu(1).bool()
PADDED = torch.tensor([[0] * S, [0] * (S - 2) + [1] * 2]).bool()[:, None, None]
UNSEEN = torch.zeros(T, S).bool().index_fill(0, torch.tensor([1, 3]), True)
"""Two queries see no key."""

BIAS = torch.randn(H, T, S, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()

Code = Callable[[Tensor, Tensor, Tensor], Tensor | tuple[Tensor, ...]]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch.compiler.reset()


def with_dropout(weights: Tensor) -> tuple[Tensor, Tensor]:
    dropped = functional.dropout(weights, 0.5)
    return dropped, dropped.detach()


TAKEN: dict[str, Code] = {
    "softmax over the first operand": lambda q, k, v: (k @ q.mT / 2).softmax(-2).mT @ v,
    "values from the left": lambda q, k, v: v.mT @ (k @ q.mT / 2).softmax(2),
    "transposed scores": lambda q, k, v: (k @ q.mT).mT.softmax(-1) @ v,
    "log_softmax over the first operand": lambda q, k, v: functional.log_softmax(k @ q.mT, -2).exp().mT @ v,
    "a mask of keys first": lambda q, k, v: (k @ q.mT).masked_fill(FUTURE.T, -INF).softmax(-2).mT @ v,
    "biases before and after": lambda q, k, v: (
        ((k @ q.mT + BIAS.mT).mT / 2 + BIAS[:1]).masked_fill(PADDED, -1e9).softmax(-1) @ v
    ),
    "a bias of each key": lambda q, k, v: v.mT @ (k @ q.mT + BIAS[0, :1].mT).softmax(-2),
    "a bias of each query": lambda q, k, v: v.mT @ (k @ q.mT + BIAS[0, :, 0]).masked_fill(PADDED.mT, -INF).softmax(-2),
    "a triangle, then a mask": lambda q, k, v: (
        (k @ q.mT).triu().mT.masked_fill(FUTURE | (torch.ones(T, S).tril(-1) > 0), -1e9).softmax(-1) @ v
    ),
    "one head of keys": lambda q, k, v: (k[:, :1] @ q.mT).mT.softmax(-1) @ v[:, :1],
    "repeated heads": lambda q, k, v: (
        (k[:, :1].repeat_interleave(H, 1) @ q.mT).softmax(-2).mT @ v[:, :1].repeat_interleave(H, 1)
    ),
    "a cap": lambda q, k, v: (torch.tanh(k @ q.mT / 4) * 4 + BIAS.mT).mT.softmax(-1) @ v,
    "a temperature": lambda q, k, v: ((k @ q.mT) * BIAS[:, :1, :1].exp()).mT.softmax(-1) @ v,
    "a number of a tensor": lambda q, k, v: ((k @ q.mT).mT / BIAS[0, 0, 0].exp()).softmax(-1) @ v,
    "views before": lambda q, k, v: (
        (torch.bmm(k.flatten(0, 1), q.flatten(0, 1).mT).view(B, H, S, T) + BIAS.mT).transpose(2, 3).softmax(-1) @ v
    ),
    "a change in place before": lambda q, k, v: (k @ q.mT).mul_(2).add_(BIAS.mT).mT.softmax(-1) @ v,
    "NaN replaced": lambda q, k, v: (k @ q.mT).masked_fill(FUTURE.T, -INF).softmax(-2).nan_to_num().mT @ v,
    "rows without keys": lambda q, k, v: (k @ q.mT).masked_fill(UNSEEN.T, -1e4).softmax(-2).mT @ v,
    "rows without keys, filled with 0": lambda q, k, v: (
        (k @ q.mT).masked_fill(UNSEEN.T, -1e300).softmax(-2).masked_fill(UNSEEN.T, 0).mT @ v
    ),
    "heads last, by einsum": lambda q, k, v: torch.einsum(
        "bqkh,bhkd->bqhd",
        (torch.einsum("bhqd,bhkd->bqkh", q, k) + BIAS.permute(1, 2, 0))
        .masked_fill(FUTURE[:, :, None], -INF)
        .softmax(2),
        v,
    ),
    "heads last, keys first, by einsum": lambda q, k, v: torch.einsum(
        "bkqh,bhkd->bhqd", torch.einsum("bhkd,bhqd->bkqh", k, q).softmax(1), v
    ),
    "keys first, batch last": lambda q, k, v: torch.einsum(
        "kqb,bkd->bqd", (torch.einsum("bqd,bkd->kqb", q[:, 0], k[:, 0]) + BIAS[0].T[..., None]).softmax(0), v[:, 0]
    ),
    "heads last, by permute": lambda q, k, v: (
        ((q @ k.mT).permute(0, 2, 3, 1) + BIAS.permute(1, 2, 0)).softmax(2).permute(0, 3, 1, 2) @ v
    ),
    "batch and heads exchanged": lambda q, k, v: (
        ((q @ k.mT).transpose(0, 1) + BIAS[:, None]).softmax(-1) @ v.mT.mT[:, :].transpose(0, 1)
    ),
    "weights used as well": lambda q, k, v: (lambda w: (w.mT @ v, w, w.mT, w.sum(-2)))((k @ q.mT).softmax(-2)),
    "scores used as well": lambda q, k, v: (lambda s: (s.mT.softmax(-1) @ v, s, s.mT))(k @ q.mT + BIAS.mT),
    "two dimensions": lambda q, k, v: (k[0, 0] @ q[0, 0].T + BIAS[0].T).softmax(0).T @ v[0, 0],
}

LEFT: dict[str, Code] = {
    "softmax over heads": lambda q, k, v: (q @ k.mT).permute(0, 2, 3, 1).softmax(-1).permute(0, 3, 1, 2) @ v,
    "softmax over queries": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "softmax over queries, transposed": lambda q, k, v: q.mT @ (q @ k.mT).softmax(-1),
    "a triangle of transposed scores": lambda q, k, v: (k @ q.mT).mT.tril().softmax(-1) @ v,
    "a maximum of the first operand": lambda q, k, v: (
        (lambda s: (s - s.amax(-2, keepdim=True)).exp())(k @ q.mT).mT.softmax(-1) @ v
    ),
    "transposed scores less their maximum": lambda q, k, v: (
        (lambda s: s - s.amax(-1, keepdim=True))(k @ q.mT).softmax(-2).mT @ v
    ),
    "transposed scores, folded": lambda q, k, v: (k @ q.mT).mT.reshape(B * H, T, S).softmax(-1) @ v.flatten(0, 1),
    "a temperature of transposed scores": lambda q, k, v: (
        ((q @ k.mT).permute(2, 3, 0, 1) * BIAS[:, 0, 0].view(1, 1, 1, H).exp()).softmax(1).permute(2, 3, 0, 1) @ v
    ),
    "a change of a transposed view": lambda q, k, v: (k @ q.mT).mT.masked_fill_(FUTURE, -INF).softmax(-1) @ v,
}


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((B, H, n, D) for n in (T, S, S))
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def results(code: Code) -> list[Tensor | None]:
    """The results of ``code`` and the gradients of a weighted sum of them."""
    q, k, v = inputs()
    out = code(q, k, v)
    outs = out if isinstance(out, tuple) else (out,)
    loss = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in outs)
    assert isinstance(loss, Tensor)
    return [*(x.detach() + 0 for x in outs), *torch.autograd.grad(loss, (q, k, v, BIAS), allow_unused=True)]


@pytest.mark.parametrize("name", [*TAKEN, *LEFT])
def test_results(name):
    code = (TAKEN | LEFT)[name]
    plain = results(code)
    with scratch.enabled():
        ours = results(code)
    exact = {"rtol": 0, "atol": 0} if name in LEFT else {"rtol": 1e-11, "atol": 1e-12}
    torch.testing.assert_close(ours, plain, **exact)
    assert scratch.counts().taken == (name in TAKEN)


@pytest.mark.parametrize("name", [*TAKEN, *LEFT])
@torch.inference_mode()
def test_inference(name):
    code = (TAKEN | LEFT)[name]
    plain = code(*inputs())
    with scratch.enabled():
        ours = code(*inputs())
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)
    assert scratch.counts().taken == 1 or name in LEFT


def test_strides():
    """They are those of torch's own results."""

    def strides() -> list[tuple[int, ...]]:
        q, k, _ = inputs()
        scores = (k @ q.mT).mT
        made = [scores, scores * 2, scores + BIAS, scores.masked_fill(FUTURE, -INF), torch.where(FUTURE, -INF, scores)]
        made += [scores.softmax(-1), scores.softmax(-1).mT, scores.contiguous(), scores.clone(), scores.float()]
        made += [torch.einsum("bhqd,bhkd->bqkh", q, k), (scores * 2).mT, scores.double().tanh()]
        return [x.stride() for x in made]

    plain = strides()
    with scratch.enabled():
        assert strides() == plain


RESULTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "@": lambda w, v: w @ v,
    "from the left": lambda w, v: v.mT @ w.mT,
    "bmm": lambda w, v: torch.bmm(v.flatten(0, 1).mT, w.flatten(0, 1).permute(0, 2, 1)),
    "einsum": lambda w, v: torch.einsum("bhqk,bhkd->bhqd", w, v),
    "einsum, queries before heads": lambda w, v: torch.einsum("bhqk,bhkd->bqhd", w, v),
    "einsum, columns first": lambda w, v: torch.einsum("bhqk,bhkd->dbhq", w, v),
    "einsum, values first": lambda w, v: torch.einsum("bhkd,bhqk->bqhd", v, w),
    "einsum, a head of values for all": lambda w, v: torch.einsum("bhqk,bhkd->bqhd", w, v[:, :1]),
    "einsum, one head of values": lambda w, v: torch.einsum("bhqk,bkd->bdqh", w, v[:, 0]),
    "einsum with an ellipsis": lambda w, v: torch.einsum("...qk,...kd->...dq", w, v),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", RESULTS)
def test_strides_of_results(name, inference):
    """Views of a result work as in plain code, although q, like most people's, has its heads after its positions."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs())

    def result() -> Tensor:
        return RESULTS[name]((q @ k.mT).softmax(-1), v)

    with torch.inference_mode(inference):
        plain = result()
        with scratch.enabled():
            ours = result()
    assert scratch.counts() == (1, {})
    torch.testing.assert_close(ours, plain)
    assert ours.stride() == plain.stride()


@pytest.mark.parametrize("dim", [4, -5])
@pytest.mark.parametrize("scores", [lambda q, k: q @ k.mT, lambda q, k: torch.einsum("bhqd,bhkd->bqkh", q, k)])
def test_softmax_over_a_dimension_that_is_not_there(scores, dim):
    q, k, _ = inputs()
    with scratch.enabled(), pytest.raises(IndexError, match=f"got {dim}"):
        scores(q, k).softmax(dim)


DROPPED: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]] = {
    "keys first": lambda q, k: ((k @ q.mT).softmax(-2), lambda w: w.mT),
    "heads last": lambda q, k: ((q @ k.mT).permute(0, 2, 3, 1).softmax(2), lambda w: w.permute(0, 3, 1, 2)),
}


@pytest.mark.parametrize("name", DROPPED)
def test_dropout(name):
    """The weights that are read are those of the product."""
    q, k, v = inputs()
    with scratch.enabled():
        weights, in_order = DROPPED[name](q, k)
        dropped = functional.dropout(weights, 0.5)
        out = in_order(dropped) @ v
        ours = [out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))]
    assert scratch.counts().taken == 1
    plain = DROPPED[name](q, k)[0] * (dropped.detach() + 0 != 0) * 2
    out = in_order(plain) @ v
    torch.testing.assert_close(ours, [out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))])
    assert 0.3 < float((dropped == 0).double().mean()) < 0.7


COMPILED = ["softmax over the first operand", "a mask of keys first", "biases before and after", "repeated heads"]
COMPILED += ["a bias of each query", "heads last, by einsum", "heads last, by permute", "keys first, batch last"]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name):
    counts: list[int] = []
    plain = results(TAKEN[name])
    ours = results(torch.compile(TAKEN[name], backend=replacing(counts=counts), fullgraph=True))
    torch.testing.assert_close(ours, plain)
    assert counts == [1]
