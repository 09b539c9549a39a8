"""Attention in many spellings: what is taken equals the plain code, what is left is the plain code, bit for bit."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pyattn.adapters import scratch
from pyattn.adapters.scratch import native

B, H, T, D = 2, 3, 6, 4
INF = math.inf
FUTURE = torch.ones(T, T).triu(1).bool()
ALL_FUTURE = torch.ones(T, T).bool().triu(0)
"""Row 0 sees no key."""

PADDED = torch.tensor([[0] * T, [0] * (T - 2) + [1] * 2]).bool()[:, None, None]
UNSEEN = FUTURE | PADDED.flip(-1)
"""Rows 0 and 1 of the second sequence see no key."""

BIAS = torch.randn(H, T, T, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
LEAST = torch.finfo(torch.float64).min


def float_mask(value: float, hidden: Tensor = FUTURE) -> Tensor:
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, value)


def folded(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-2:])


class Softmax(torch.autograd.Function):
    """With three times its gradient, so that another function in its place shows."""

    @staticmethod
    def forward(ctx, x):
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return 3 * y * (g - (g * y).sum(-1, keepdim=True))


class Doubled(torch.autograd.Function):
    """The identity with twice its gradient."""

    @staticmethod
    def forward(ctx, x, as_view):
        return x.view_as(x) if as_view else x

    @staticmethod
    def backward(ctx, g):
        return 2 * g, None


Code = Callable[[Tensor, Tensor, Tensor], Tensor]

TAKEN: dict[str, Code] = {
    "book": lambda q, k, v: ((q @ k.transpose(2, 3)).masked_fill(FUTURE, -INF) / D**0.5).softmax(-1) @ v,
    "nanogpt": lambda q, k, v: (
        functional.softmax(
            ((q @ k.transpose(-2, -1)) * (1 / math.sqrt(D))).masked_fill(FUTURE[None, None] == 1, -INF), dim=-1
        )
        @ v
    ),
    "fill of -1e9": lambda q, k, v: (torch.matmul(q, k.mT) / 2).masked_fill(FUTURE, -1e9).softmax(-1) @ v,
    "sum with the least number": lambda q, k, v: (torch.matmul(q, k.mT) / 2 + float_mask(LEAST)).softmax(-1) @ v,
    "sum with -inf": lambda q, k, v: (torch.matmul(q, k.mT) / 2 + float_mask(-INF)).softmax(-1) @ v,
    "sum with -100": lambda q, k, v: (torch.matmul(q, k.mT) / 2 + FUTURE.double() * -100).softmax(-1) @ v,
    "a float mask times -1e4": lambda q, k, v: (
        (torch.matmul(q, k.mT) / 2 + (1 - (~FUTURE).double()) * -10000.0).softmax(-1) @ v
    ),
    "a difference": lambda q, k, v: (torch.matmul(q, k.mT) / 2 - 1e9 * FUTURE.double()).softmax(-1) @ v,
    "opt's and xglm's, every query sees a key": lambda q, k, v: (
        torch.max(q @ k.mT + float_mask(LEAST), torch.tensor(LEAST, dtype=torch.float64)).softmax(-1) @ v
    ),
    "a lower bound before a mask": lambda q, k, v: (
        torch.max(q @ k.mT, torch.tensor(-1e9).double()).masked_fill(FUTURE, -INF).softmax(-1) @ v
    ),
    "clamp before a mask": lambda q, k, v: (q @ k.mT).clamp(min=-1e9).masked_fill(FUTURE, -INF).softmax(-1) @ v,
    "clamp_min of a mask, in place": lambda q, k, v: (
        (q @ k.mT).masked_fill(FUTURE, -INF).clamp_min_(LEAST).softmax(-1) @ v
    ),
    "xlnet's sum with 0": lambda q, k, v: (q @ k.mT + BIAS + 0).softmax(-1) @ v,
    "a fill that overflows in a scale": lambda q, k, v: (
        ((q @ k.mT).masked_fill(FUTURE, LEAST) * 3 + float_mask(LEAST, UNSEEN)).softmax(-1) @ v
    ),
    "two masks": lambda q, k, v: (q @ k.mT).masked_fill(FUTURE, -INF).masked_fill(PADDED, -INF).softmax(-1) @ v,
    "bias": lambda q, k, v: (q @ k.mT * 0.3 + BIAS).softmax(-1) @ v,
    "bias then scale": lambda q, k, v: ((q @ k.mT + BIAS) / 3).softmax(-1) @ v,
    "bias first operand": lambda q, k, v: (BIAS + q @ k.mT).softmax(-1) @ v,
    "times -1": lambda q, k, v: (-(q @ k.mT) + BIAS).masked_fill(FUTURE, -INF).softmax(-1) @ v,
    "divided by -2, capped by -5": lambda q, k, v: (
        ((q @ k.mT / -2).tanh() * -5).masked_fill(FUTURE, -1e9).softmax(-1) @ v
    ),
    "softcap": lambda q, k, v: (torch.tanh(q @ k.mT / 5) * 5).masked_fill(FUTURE, -INF).softmax(-1) @ v,
    "where": lambda q, k, v: torch.where(~FUTURE, q @ k.mT, -INF).softmax(-1) @ v,
    "where with a tensor first": lambda q, k, v: (
        torch.where(FUTURE, torch.tensor(-1e9, dtype=torch.float64), q @ k.mT).softmax(-1) @ v
    ),
    "where with a number first": lambda q, k, v: torch.where(FUTURE, -INF, q @ k.mT).softmax(-1) @ v,
    "where with 0, then a mask": lambda q, k, v: (
        torch.where(FUTURE, 0.0, q @ k.mT).masked_fill(FUTURE, -INF).softmax(-1) @ v
    ),
    "where with a full tensor": lambda q, k, v: (
        torch.where(~FUTURE, q @ k.mT, torch.full((T, T), -INF).double()).softmax(-1) @ v
    ),
    "where with full_like": lambda q, k, v: (
        (lambda s: torch.where(~FUTURE, s, torch.full_like(s, -1e9)))(q @ k.mT).softmax(-1) @ v
    ),
    "where with ones_like first": lambda q, k, v: (
        (lambda s: torch.where(FUTURE, -9e15 * torch.ones_like(s), s))(q @ k.mT).softmax(-1) @ v
    ),
    "a bias of zeros_like": lambda q, k, v: (
        (lambda s: s + torch.zeros_like(s).masked_fill(FUTURE, -INF))(q @ k.mT + BIAS).softmax(-1) @ v
    ),
    "a bias of new_zeros": lambda q, k, v: (
        (lambda s: s + s.new_zeros(T, T).masked_fill(FUTURE, -INF))(q @ k.mT + BIAS).softmax(-1) @ v
    ),
    "tril then a mask": lambda q, k, v: (q @ k.mT).tril().masked_fill(FUTURE, -INF).softmax(-1) @ v,
    "bmm": lambda q, k, v: torch.bmm(torch.bmm(folded(q), folded(k).mT).softmax(-1), folded(v)).view(B, H, T, D),
    "baddbmm": lambda q, k, v: torch.bmm(
        torch.baddbmm(BIAS.repeat(B, 1, 1), folded(q), folded(k).mT, beta=0.5, alpha=0.25)
        .view(B, H, T, T)
        .masked_fill(FUTURE, -INF)
        .softmax(-1)
        .view(B * H, T, T),
        folded(v),
    ).view(B, H, T, D),
    "folded and unfolded": lambda q, k, v: torch.bmm(
        ((torch.bmm(folded(q), folded(k).mT)).view(B, H, T, T) + BIAS).view(B * H, T, T).softmax(-1), folded(v)
    ).view(B, H, T, D),
    "einsum": lambda q, k, v: torch.einsum(
        "bhqk,bhkd->bqhd", (torch.einsum("bhqd,bhkd->bhqk", q, k) / 2).softmax(-1), v
    ),
    "einsum bqhd": lambda q, k, v: torch.einsum(
        "bhqk,bkhd->bqhd",
        (torch.einsum("bqhd,bkhd->bhqk", q.transpose(1, 2), k.transpose(1, 2)) / 2).softmax(-1),
        v.transpose(1, 2),
    ),
    "einsum swapped": lambda q, k, v: torch.einsum(
        "bkhd,bhqk->bqhd",
        v.transpose(1, 2),
        (torch.einsum("bkhd,bqhd->bhqk", k.transpose(1, 2), q.transpose(1, 2)) / 2).softmax(-1),
    ),
    "einsum of lists": lambda q, k, v: torch.einsum(
        "nhql,nlhd->nqhd",
        [
            torch.einsum("nqhd,nkhd->nhqk", [q.transpose(1, 2), k.transpose(1, 2)])
            .masked_fill(FUTURE == 1, float("-1e20"))
            .softmax(3),
            v.transpose(1, 2),
        ],
    ),
    "einsum without an arrow": lambda q, k, v: torch.einsum(
        "...ij,...jz", torch.einsum("...id, ...jd", q, k).softmax(-1), v
    ),
    "einsum ellipsis": lambda q, k, v: torch.einsum(
        "...ij,...jd->...id", torch.einsum("...id,...jd->...ij", q, k).softmax(-1), v
    ),
    "xlnet": lambda q, k, v: torch.einsum(
        "bnij,jbnd->ibnd",
        torch.einsum("ibnd,jbnd->bnij", q.permute(2, 0, 1, 3), k.permute(2, 0, 1, 3)).softmax(-1),
        v.permute(2, 0, 1, 3),
    ),
    "softmax with a dtype": lambda q, k, v: functional.softmax(q @ k.mT, dim=-1, dtype=torch.float64) @ v,
    "nn.Softmax": lambda q, k, v: nn.Softmax(dim=3)(q @ k.mT) @ v,
    "grouped heads in a fifth dimension": lambda q, k, v: (
        (q.view(B, 1, 3, T, D) @ k[:, :1].unsqueeze(2).mT).softmax(-1) @ v[:, :1].unsqueeze(2)
    ).view(B, H, T, D),
    "one head of keys": lambda q, k, v: (q @ k[:, :1].mT).masked_fill(PADDED, -INF).softmax(-1) @ v[:, :1],
    "two dimensions": lambda q, k, v: (q[0, 0] @ k[0, 0].T / 2).softmax(-1) @ v[0, 0],
    "three dimensions": lambda q, k, v: (q[0] @ k[0].mT / 2).softmax(-1) @ v[0],
    "repeat_interleave": lambda q, k, v: (
        (q @ k[:, :1].repeat_interleave(3, 1).mT).softmax(-1) @ v[:, :1].repeat_interleave(3, 1)
    ),
    "a temperature of each head": lambda q, k, v: (q @ k.mT * BIAS[:, :1, :1].exp()).softmax(-1) @ v,
    "divided by a temperature of each head": lambda q, k, v: (q @ k.mT / BIAS[:, :1, :1].exp()).softmax(-1) @ v,
    "divided by a learned temperature": lambda q, k, v: (
        (q @ k.mT / BIAS[0, 0, 0].exp()).masked_fill(FUTURE, -INF).softmax(-1) @ v
    ),
    "divided by a tensor of an integer": lambda q, k, v: (q @ k.mT / torch.tensor(3)).softmax(-1) @ v,
    "divided by a tensor": lambda q, k, v: (q @ k.mT / torch.tensor(D).double().sqrt()).softmax(-1) @ v,
    "divided in place": lambda q, k, v: (q @ k.mT).div_(torch.full((1,), 3.0).double()).softmax(-1) @ v,
    "a learned temperature": lambda q, k, v: (q @ k.mT * BIAS[0, 0, 0].exp()).softmax(-1) @ v,
    "weights used twice": lambda q, k, v: (lambda w: w @ v + w.mean() * 3)((q @ k.mT).softmax(-1)),
    "weights used before": lambda q, k, v: (lambda w: w.pow(2).sum() + (w @ v))((q @ k.mT).softmax(-1)),
    "weights printed": lambda q, k, v: (lambda w: (str(w), w @ v)[1])((q @ k.mT).softmax(-1)),
    "a row of least numbers": lambda q, k, v: (q @ k.mT + float_mask(LEAST, ALL_FUTURE)).softmax(-1) @ v,
    "shifted windows": lambda q, k, v: (
        (
            ((q @ k.mT + BIAS).view(1, B, H, T, T) + torch.stack([float_mask(-100.0), float_mask(0.0)])[None, :, None])
            .view(-1, H, T, T)
            .softmax(-1)
        )
        @ v
    ),
    "a fill and a sum of least numbers": lambda q, k, v: (
        ((q @ k.mT).masked_fill(FUTURE, LEAST) + float_mask(LEAST, UNSEEN)).softmax(-1) @ v
    ),
    "the first gpt's": lambda q, k, v: (
        ((q @ k.mT) * (~FUTURE).double() - 1e4 * (1 - (~FUTURE).double())).softmax(-1) @ v
    ),
    "a row of -1e9": lambda q, k, v: (q @ k.mT).masked_fill(ALL_FUTURE, -1e9).softmax(-1) @ v,
    "rows of -1e4, heads repeated": lambda q, k, v: (
        (q @ k[:, :1].repeat_interleave(3, 1).mT).masked_fill(FUTURE, -1e4).masked_fill(UNSEEN, -1e4).softmax(-1)
        @ v[:, :1].repeat_interleave(3, 1)
    ),
    "rows filled with least numbers": lambda q, k, v: (q @ k.mT + BIAS).masked_fill(UNSEEN, LEAST).softmax(-1) @ v,
    "rows of the least number, divided": lambda q, k, v: (
        ((q @ k[:, :1].mT).masked_fill(UNSEEN, LEAST) / 2).softmax(-1) @ v[:, :1]
    ),
    "weights filled with 0": lambda q, k, v: (
        (q @ k.mT).masked_fill(UNSEEN, LEAST).softmax(-1).masked_fill(UNSEEN, 0) @ v
    ),
    "values from the left, as in VQGAN": lambda q, k, v: torch.bmm(
        folded(v).mT.contiguous(), torch.bmm(folded(q), folded(k).mT).softmax(2).permute(0, 2, 1)
    ),
    "values from the left, as in SAGAN": lambda q, k, v: (
        v.mT @ (q @ k.mT + BIAS).masked_fill(FUTURE, -INF).softmax(-1).transpose(2, 3)
    ),
    "values from the left, one head of keys": lambda q, k, v: v[:, :1].mT @ (q @ k[:, :1].mT).softmax(-1).mT,
    "values from the left by einsum": lambda q, k, v: torch.einsum(
        "...dk,...kq->...qd", v.mT, (q @ k.mT).softmax(-1).mT
    ),
    "values from the left in two dimensions": lambda q, k, v: v[0, 0].T @ (q[0, 0] @ k[0, 0].T).softmax(-1).t(),
    "transposed twice": lambda q, k, v: (q @ k.mT).softmax(-1).mT.mT @ v,
    "bmm by names": lambda q, k, v: torch.bmm(
        torch.baddbmm(batch1=folded(q), batch2=folded(k).mT, input=BIAS.repeat(B, 1, 1)).softmax(-1), mat2=folded(v)
    ).view(B, H, T, D),
    "dropout in evaluation": lambda q, k, v: functional.dropout((q @ k.mT).softmax(-1), 0.3, training=False) @ v,
}

LEFT: dict[str, Code] = {
    "a bias of filled rows": lambda q, k, v: (
        ((q @ k.mT).masked_fill(ALL_FUTURE, -1e4) + BIAS).masked_fill(PADDED, -1e4).softmax(-1) @ v
    ),
    "rows filled with two numbers": lambda q, k, v: (
        (q @ k.mT).masked_fill(ALL_FUTURE, -1e4).masked_fill(PADDED, -1e5).softmax(-1) @ v
    ),
    "a bias times -1": lambda q, k, v: (-(q @ k.mT + BIAS)).softmax(-1) @ v,
    "times 0": lambda q, k, v: (q @ k.mT * 0.0 + BIAS).softmax(-1) @ v,
    "scores times ones and zeros": lambda q, k, v: ((q @ k.mT) * (~FUTURE).double()).softmax(-1) @ v,
    "scores of at least -1": lambda q, k, v: torch.max(q @ k.mT, torch.tensor(-1.0).double()).softmax(-1) @ v,
    "visible weights filled with 0": lambda q, k, v: (
        (q @ k.mT).masked_fill(FUTURE, LEAST).softmax(-1).masked_fill(UNSEEN, 0) @ v
    ),
    "a part of a row filled with 0": lambda q, k, v: (
        (q @ k.mT).masked_fill(UNSEEN, LEAST).softmax(-1).masked_fill(FUTURE, 0) @ v
    ),
    "a mask that a triangle of 0 undoes": lambda q, k, v: (q @ k.mT).masked_fill(FUTURE, -INF).tril().softmax(-1) @ v,
    "a fill beside a bias of large numbers": lambda q, k, v: (
        (q @ k.mT + BIAS.detach() * 1e30 + float_mask(-INF, PADDED[1, 0])).masked_fill(FUTURE, -1e4).softmax(-1) @ v
    ),
    "a row of least numbers in a narrower dtype": lambda q, k, v: (
        (q @ k.mT + float_mask(LEAST, ALL_FUTURE)).float().softmax(-1).double() @ v
    ),
    "scores divided after a bias": lambda q, k, v: ((q @ k.mT + BIAS) / BIAS[0, 0, 0].exp()).softmax(-1) @ v,
    "a number divided by scores": lambda q, k, v: (1 / (q @ k.mT).exp()).softmax(-1) @ v,
    "scores divided by keys' numbers": lambda q, k, v: (q @ k.mT / BIAS[0, 0].exp()).softmax(-1) @ v,
    "rounded quotients": lambda q, k, v: torch.div(q @ k.mT, 2, rounding_mode="floor").softmax(-1) @ v,
    "divided by 0": lambda q, k, v: (q @ k.mT / 0.0).softmax(-1) @ v,
    "einsum without an arrow, a sum over heads": lambda q, k, v: torch.einsum("bhqk,bhkd", (q @ k.mT).softmax(-1), v),
    "where with another tensor": lambda q, k, v: torch.where(FUTURE, BIAS, q @ k.mT).softmax(-1) @ v,
    "where with numbers and NaN": lambda q, k, v: (
        torch.where(FUTURE, BIAS.detach() * math.nan, q @ k.mT).softmax(-1) @ v
    ),
    "tril alone": lambda q, k, v: (q @ k.mT).tril().softmax(-1) @ v,
    "softmax over queries": lambda q, k, v: torch.softmax(q @ k.mT, 2) @ v,
    "clamp": lambda q, k, v: (q @ k.mT).clamp(-1, 1).softmax(-1) @ v,
    "scores clamped to at least -1": lambda q, k, v: (q @ k.mT).clamp(min=-1).softmax(-1) @ v,
    "scores clamped to at least a tensor": lambda q, k, v: (q @ k.mT).clamp_min(BIAS.detach() - 1e9).softmax(-1) @ v,
    "scores clamped to at most a number": lambda q, k, v: (q @ k.mT).clamp(max=1e3).softmax(-1) @ v,
    "scores of at least 0": lambda q, k, v: (q @ k.mT).clamp_min(0).softmax(-1) @ v,
    "linear attention": lambda q, k, v: (q @ k.mT) @ v,
    "weights times a gate of each head": lambda q, k, v: ((q @ k.mT).softmax(-1) * BIAS[:, :1, :1].sigmoid()) @ v,
    "weights times a learned number, with a cast": lambda q, k, v: (
        (q @ k.mT).softmax(-1, dtype=torch.float64).mul(BIAS[0, 0, 0].exp()) @ v
    ),
    "sinks times a temperature": lambda q, k, v: (
        (torch.cat([q @ k.mT, BIAS[:, :, :1].expand(B, H, T, 1)], -1) * BIAS[:, :1, :1].exp()).softmax(-1)[..., :-1] @ v
    ),
    "weights divided by a learned number": lambda q, k, v: ((q @ k.mT).softmax(-1) / BIAS[0, 0, 0].exp()) @ v,
    "another normalization": lambda q, k, v: (
        (lambda w: (w * (~FUTURE)) / (w * (~FUTURE)).sum(-1, keepdim=True))((q @ k.mT).softmax(-1)) @ v
    ),
    "softmax by a Function": lambda q, k, v: Softmax.apply(q @ k.mT) @ v,
    "a Function that returns its argument": lambda q, k, v: Doubled.apply(q @ k.mT, False).softmax(-1) @ v,
    "a Function that returns a view": lambda q, k, v: Doubled.apply((q @ k.mT).softmax(-1), True) @ v,
    "a row of -inf": lambda q, k, v: (q @ k.mT).masked_fill(ALL_FUTURE, -INF).softmax(-1).nan_to_num(7.0) @ v,
    "a fill of -5": lambda q, k, v: (q @ k.mT).masked_fill(FUTURE, -5.0).softmax(-1) @ v,
    "a sum of two products": lambda q, k, v: (q @ k.mT + k @ q.mT).softmax(-1) @ v,
    "detach": lambda q, k, v: (q @ k.mT).detach().softmax(-1) @ v,
    "heads after queries": lambda q, k, v: (q @ k.mT).softmax(-1).transpose(1, 2) @ v[:, :1],
    "transposed weights of few queries": lambda q, k, v: (
        v[..., :1].mT @ (q[:, :, :1] @ k.mT).softmax(-1).mT.masked_fill(FUTURE[:, :1], 0)
    ),
    "values from the left, not transposed": lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1),
    "transposed weights, then a view": lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1).mT.reshape(B, H, T, T),
    "transposed weights": lambda q, k, v: (q @ k.mT).softmax(-1).mT @ v,
}

WITHOUT_GRADIENTS: dict[str, Code] = {
    "opt's and xglm's": lambda q, k, v: (
        torch.max(q @ k.mT + float_mask(LEAST, UNSEEN), torch.tensor(LEAST, dtype=torch.float64)).softmax(-1) @ v
    ),
    "clamped rows without keys": lambda q, k, v: (q @ k.mT + float_mask(LEAST, UNSEEN)).clamp(LEAST).softmax(-1) @ v,
    "the least number instead of -inf": lambda q, k, v: (
        torch.max(q @ k.mT + float_mask(-INF, UNSEEN), torch.tensor(LEAST, dtype=torch.float64)).softmax(-1) @ v
    ),
}
"""Queries that see no key: taken in inference, left if gradients are wanted, which fills and sums have others of."""


def in_place(q, k, v):
    scores = q @ k.mT
    scores.masked_fill_(FUTURE, -INF)
    scores /= 2
    return functional.softmax(scores, dim=-1) @ v


def in_place_through_a_view(q, k, v):
    scores = q @ k.mT
    scores.view(B * H, T, T).masked_fill_(FUTURE, -1e9)
    return scores.softmax(-1) @ v


def a_mask_made_from_the_scores(q, k, v):
    scores = q @ k.mT
    return scores.masked_fill(scores < scores.topk(3, -1)[0][..., -1:], -INF).softmax(-1) @ v


def one_key_set(q, k, v):
    scores = q @ k.mT
    scores[:, :, 0] = 0
    return scores.softmax(-1) @ v


def hook_on_scores(q, k, v):
    scores = q @ k.mT
    scores.register_hook(lambda g: 2 * g)
    return scores.softmax(-1) @ v


def hook_on_scores_after_the_weights(q, k, v):
    scores = q @ k.mT
    weights = scores.softmax(-1)
    scores.register_hook(lambda g: 2 * g)
    return weights @ v


def hook_on_a_module(q, k, v):
    softmax = nn.Softmax(-1)
    softmax.register_full_backward_hook(lambda module, gi, go: (gi[0] * 2,))
    return softmax(q @ k.mT) @ v


def gradient_of_scores(q, k, v):
    scores = q @ k.mT
    scores.retain_grad()
    (scores.softmax(-1) @ v).sum().backward(retain_graph=True)
    return scores.grad * 2 + scores


def in_place_after_an_einsum_of_one_head(q, k, v):
    """longt5's: without sums over heads, einsum's result is a view."""
    scores = torch.einsum("...qhd,...khd->...hqk", *(x[:, :1].transpose(1, 2) for x in (q, k)))
    scores += BIAS[:1]
    return torch.einsum("...hqk,...khd->...qhd", scores.softmax(-1), v[:, :1].transpose(1, 2))


TAKEN |= {"in place after an einsum of one head": in_place_after_an_einsum_of_one_head}
TAKEN |= {"in place": in_place, "a mask made from the scores": a_mask_made_from_the_scores}
FUNCTIONS = (
    *(in_place_through_a_view, one_key_set, hook_on_scores, hook_on_scores_after_the_weights),
    *(hook_on_a_module, gradient_of_scores),
)
LEFT |= {function.__name__.replace("_", " "): function for function in FUNCTIONS}


def results(code: Code) -> list[Tensor]:
    """The result, and the gradients of a weighted sum of it."""
    q, k, v = torch.randn(3, B, H, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind()
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = code(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    grads = torch.autograd.grad((out * weights).sum(), [*inputs, BIAS], allow_unused=True)
    return [out.detach() + 0, *(torch.zeros(()) if g is None else g for g in grads)]


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name):
    plain = results(TAKEN[name])
    with scratch.enabled():
        ours = results(TAKEN[name])
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)
    assert scratch.counts() == (1, {})


@pytest.mark.parametrize("name", [*LEFT, *WITHOUT_GRADIENTS])
def test_left(name):
    code = (LEFT | WITHOUT_GRADIENTS)[name]
    plain = results(code)
    with scratch.enabled():
        ours = results(code)
    torch.testing.assert_close(ours, plain, rtol=0, atol=0, equal_nan=True)
    assert scratch.counts().taken == 0
    assert sum(scratch.counts().left.values()) >= 1


@pytest.mark.parametrize("name", [*TAKEN, *WITHOUT_GRADIENTS])
def test_inference(name):
    code = (TAKEN | WITHOUT_GRADIENTS)[name]
    inputs = torch.randn(3, B, H, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind()
    with torch.inference_mode():
        plain = code(*inputs)
        with scratch.enabled():
            ours = code(*inputs)
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)
    assert scratch.counts() == (1, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    q, k, v = torch.randn(3, B, H, T, D).to(dtype).unbind()

    def code():
        weights = functional.softmax(q @ k.mT / 2 + float_mask(-1e4).to(dtype), dim=-1, dtype=torch.float32).to(dtype)
        return weights @ v

    exact = functional.softmax((q.double() @ k.double().mT / 2).masked_fill(FUTURE, -INF), dim=-1) @ v.double()
    with scratch.enabled():
        out = code()
    assert out.dtype == dtype
    error, plain = ((x.double() - exact).abs().max() for x in (out, code()))
    assert error <= 2 * plain + 4 * torch.finfo(dtype).eps * exact.abs().max()
    assert scratch.counts() == (1, {})


def test_weights_outlive_their_inputs():
    q, k, v = torch.randn(3, B, H, T, D).unbind()
    with scratch.enabled():
        weights = (q @ k.mT).softmax(-1)
        out = weights @ v
    plain = (q @ k.mT).softmax(-1)
    q.zero_()
    assert torch.equal(weights, plain)
    torch.testing.assert_close(out, plain @ v)
    assert weights.tolist() == plain.tolist()
    assert weights.numpy().shape == plain.shape
    assert repr(weights).startswith("tensor(")


def test_gradient_of_weights_after_the_product_is_refused():
    q, k, v = torch.randn(3, B, H, T, D, requires_grad=True).unbind()
    with scratch.enabled():
        weights = (q @ k.mT).softmax(-1)
        out = weights @ v
        with pytest.raises(RuntimeError, match="before the product with the values"):
            torch.autograd.grad(out.sum(), weights)


def test_dropout_of_both_uses_is_one():
    q, k, v = torch.randn(3, B, H, T, T, dtype=torch.float64, requires_grad=True).unbind()
    with scratch.enabled():
        weights = functional.dropout((q @ k.mT).softmax(-1), 0.5)
        out = weights @ v
        dropped = weights * 1
    torch.testing.assert_close(out, dropped @ v, rtol=1e-12, atol=1e-12)
    ours, plain = (torch.autograd.grad(x.square().sum(), (q, k, v), retain_graph=True) for x in (out, dropped @ v))
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)
    share = (dropped == 0).double().mean()
    assert 0.3 < share < 0.7
    assert scratch.counts().taken == 1


def test_second_derivatives():
    inputs = torch.randn(3, 1, 2, 3, 2, dtype=torch.float64).unbind()
    inputs = [x.clone().requires_grad_() for x in inputs]
    with scratch.enabled():
        assert torch.autograd.gradgradcheck(lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v, inputs)
    assert scratch.counts().taken > 0


def test_second_derivatives_of_rows_without_keys():
    inputs = [x.clone().requires_grad_() for x in torch.randn(3, 1, 2, 3, 2, dtype=torch.float64)]
    hidden = torch.ones(3, 3).triu(0).bool()
    with scratch.enabled():
        assert torch.autograd.gradgradcheck(
            lambda q, k, v: (q @ k.mT).masked_fill(hidden, -1e9).softmax(-1) @ v, inputs
        )
    assert scratch.counts().left == {}


def test_autocast():
    q, k, v = torch.randn(3, B, H, T, D).unbind()
    with torch.autocast("cpu", torch.bfloat16):
        plain = (q @ k.mT).softmax(-1) @ v
        with scratch.enabled():
            ours = (q @ k.mT).softmax(-1) @ v
    assert ours.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(ours, plain, rtol=0.05, atol=0.05)
    assert scratch.counts() == (1, {})


def test_enable_and_disable():
    q = torch.randn(B, H, T, D)
    scratch.enable()
    scratch.enable()
    (q @ q.mT).softmax(-1) @ q
    scratch.disable()
    (q @ q.mT).softmax(-1) @ q
    assert scratch.counts() == (1, {})


def test_few_scores_are_left(monkeypatch):
    monkeypatch.undo()
    q = torch.randn(B, H, T, D)
    with scratch.enabled():
        (q @ q.mT).softmax(-1) @ q
    assert scratch.counts() == (0, {"fewer than 524288 scores": 1})


def test_few_scores_that_were_read_are_left(monkeypatch):
    """In training native code gains anyway; tests/tools/scratch_speed.py."""
    monkeypatch.setattr(native, "MIN_SCORES_READ", B * H * T * T + 1)
    q, k, v = torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(1)).unbind()
    with torch.no_grad():
        plain = a_mask_made_from_the_scores(q, k, v)
        with scratch.enabled():
            assert torch.equal(a_mask_made_from_the_scores(q, k, v), plain)
            assert scratch.counts().taken == 0
            monkeypatch.setattr(native, "MIN_SCORES_READ", B * H * T * T)
            a_mask_made_from_the_scores(q, k, v)
    assert scratch.counts().taken == 1
    with scratch.enabled():
        a_mask_made_from_the_scores(q.requires_grad_(), k, v)
    assert scratch.counts().taken == 2


@pytest.mark.parametrize("value", [-103.0, -1.0, 1.0])
def test_a_module_whose_fills_hide_no_key_is_not_watched(value):
    class Filled(nn.Module):
        def forward(self, q, k, v):
            return (q @ k.mT).masked_fill(FUTURE, value).softmax(-1) @ v

    model = scratch.convert(Filled())
    inputs = torch.randn(3, B, H, T, D).unbind()
    assert torch.equal(model(*inputs), Filled()(*inputs))
    assert scratch.counts() == (0, {f"a fill with {value}, which hides no key": 1})
    assert not model._forward_pre_hooks


def test_rows_without_keys_that_round_their_scores_are_left():
    """-1e9 in float32 rounds scores to multiples of 64: what is left of them is the plain code's own."""
    q, k, v = (40 * torch.randn(3, B, H, T, D)).unbind()

    def code():
        return (q @ k.mT + float_mask(-1e9, ALL_FUTURE).float()).softmax(-1) @ v

    with scratch.enabled():
        out = code()
    assert torch.equal(out, code())
    assert scratch.counts() == (0, {"a query that sees no key": 1})
