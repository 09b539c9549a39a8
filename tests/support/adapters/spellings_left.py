"""Spellings of attention that are left, and code that almost is attention."""

import math

import torch
from support.adapters.spellings import ALL_FUTURE, BIAS, FUTURE, INF, LEAST, PADDED, UNSEEN, B, Code, H, T, float_mask
from torch import nn


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


def in_place_through_a_view(q, k, v):
    scores = q @ k.mT
    scores.view(B * H, T, T).masked_fill_(FUTURE, -1e9)
    return scores.softmax(-1) @ v


def assigned_through_a_view(q, k, v):
    scores = q @ k.mT
    scores.view(B * H, T, T)[:, FUTURE] = -1e9
    return scores.softmax(-1) @ v


def assigned_numbers(q, k, v):
    scores = q @ k.mT
    scores[..., FUTURE] = BIAS[0][FUTURE].detach() - 1e9
    return scores.softmax(-1) @ v


def assigned_a_learned_number(q, k, v):
    scores = q @ k.mT
    scores[..., FUTURE] = BIAS[0, 0, 0]
    return scores.softmax(-1) @ v


def assigned_at_two_masks(q, k, v):
    scores = q @ k.mT
    scores[FUTURE[0, :B], :, FUTURE[0]] = -1e9
    return scores.softmax(-1) @ v


def added_at_an_index(q, k, v):
    index, number = (FUTURE.expand(B, H, T, T),), torch.tensor(-1e9, dtype=torch.float64)
    return (q @ k.mT).index_put(index, number, accumulate=True).softmax(-1) @ v


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
    "scores clamped from both sides": lambda q, k, v: (q @ k.mT).clamp(-1e9, 0.5).softmax(-1) @ v,
    "scores of at least 0": lambda q, k, v: (q @ k.mT).clamp_min(0).softmax(-1) @ v,
    "linear attention": lambda q, k, v: (q @ k.mT) @ v,
    "sinks times a temperature": lambda q, k, v: (
        (torch.cat([q @ k.mT, BIAS[:, :, :1].expand(B, H, T, 1)], -1) * BIAS[:, :1, :1].exp()).softmax(-1)[..., :-1] @ v
    ),
    "weights times numbers of keys": lambda q, k, v: ((q @ k.mT).softmax(-1) * BIAS[:, :1].sigmoid()) @ v,
    "weights times ones and zeros": lambda q, k, v: ((q @ k.mT).softmax(-1) * (~FUTURE).double()) @ v,
    "a fill of gated weights": lambda q, k, v: (
        ((q @ k.mT).masked_fill(UNSEEN, LEAST).softmax(-1) * BIAS[:, :1, :1]).masked_fill(UNSEEN, 0) @ v
    ),
    "nan_to_num of gated weights": lambda q, k, v: ((q @ k.mT).softmax(-1) * BIAS[:, :1, :1]).nan_to_num() @ v,
    "weights divided by 0": lambda q, k, v: ((q @ k.mT).softmax(-1) / 0.0).sign() @ v,
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

FUNCTIONS = (
    *(in_place_through_a_view, one_key_set, hook_on_scores, hook_on_scores_after_the_weights),
    *(assigned_through_a_view, assigned_numbers, assigned_a_learned_number, assigned_at_two_masks, added_at_an_index),
    *(hook_on_a_module, gradient_of_scores),
)
LEFT |= {function.__name__.replace("_", " "): function for function in FUNCTIONS}
