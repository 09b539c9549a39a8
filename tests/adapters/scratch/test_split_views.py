"""Biases that are added to views of scores whose queries or keys are split or joined: sums over height and width."""

import pytest
import torch
from support.adapters.compiled_graphs import replacing
from support.adapters.gradients import of_weighted_sum
from support.adapters.spellings import BIAS, FUTURE, INF, B, Code, D, H, T
from torch import Tensor, nn

from pyattn.adapters import scratch

HEIGHT, WIDTH = 2, 3
GRID = (B * H, HEIGHT, WIDTH, HEIGHT, WIDTH)


def by_height_and_width(q, k, v):
    """A score has one bias for the distance in height, one for that in width."""
    scores = (q / 2) @ k.mT
    rows, columns = (q.unflatten(2, (HEIGHT, WIDTH)) @ BIAS[0, :D, :n] for n in (HEIGHT, WIDTH))
    scores = scores.view(B, H, HEIGHT, WIDTH, HEIGHT, WIDTH) + rows[..., None] + columns[..., None, :]
    return scores.view(B, H, T, T).softmax(-1) @ v


def heads_folded(q, k, v):
    scores = (q.flatten(0, 1) @ k.flatten(0, 1).mT).view(GRID)
    scores = scores + BIAS[0, :HEIGHT, :WIDTH, None, None].sin() + BIAS[0, 0, :WIDTH]
    weights = (scores.view(B * H, T, T) / 2).masked_fill(FUTURE, -INF).softmax(-1)
    return (weights @ v.flatten(0, 1)).view(B, H, T, D)


def in_place(q, k, v):
    scores = (q @ k.mT * 1).view(B, H, HEIGHT, WIDTH, T) * 1
    scores += BIAS[:, None, :WIDTH]
    return scores.view(B, H, T, T).softmax(-1) @ v


VIEWED: dict[str, Code] = {
    "by height and width": by_height_and_width,
    "heads folded": heads_folded,
    "in place": in_place,
    "queries joined with heads": lambda q, k, v: (
        ((q @ k.mT).view(B, H * T, T) - BIAS.view(H * T, T)).view(B, H, T, T).masked_fill(FUTURE, -INF).softmax(-1) @ v
    ),
    "all in one dimension": lambda q, k, v: (
        ((q @ k.mT).view(-1) + BIAS.repeat(B, 1, 1).view(-1)).view(B, H, T, T).softmax(-1) @ v
    ),
    "a softcap and a number": lambda q, k, v: (
        ((q @ k.mT).view(B, H, HEIGHT, WIDTH, T).tanh() * 3 + BIAS[:, :HEIGHT, None]).view(B, H, T, T).softmax(-1) @ v
    ),
    "twice": lambda q, k, v: (
        (
            ((q @ k.mT).view(B, H, HEIGHT, WIDTH, T) + BIAS[:, :HEIGHT, None]).view(B * H, T, HEIGHT, WIDTH)
            + BIAS[0, :HEIGHT, :WIDTH]
        )
        .view(B, H, T, T)
        .softmax(-1)
        @ v
    ),
    "a mask of -inf": lambda q, k, v: (
        ((q @ k.mT).view(B, H, HEIGHT, WIDTH, T) + torch.zeros(WIDTH, T).double().masked_fill(FUTURE[3:], -INF))
        .view(B, H, T, T)
        .softmax(-1)
        @ v
    ),
    "heads repeated": lambda q, k, v: (
        ((q @ k[:, :1].repeat_interleave(3, 1).mT).view(B, H, HEIGHT, WIDTH, T) + BIAS[:, :HEIGHT, None])
        .view(B, H, T, T)
        .softmax(-1)
        @ v[:, :1].repeat_interleave(3, 1)
    ),
    "keys first": lambda q, k, v: (
        ((k @ q.mT).view(B, H, HEIGHT, WIDTH, T) + BIAS[:, :HEIGHT, None]).view(B, H, T, T).softmax(-2).mT @ v
    ),
    "keys first, transposed before the softmax": lambda q, k, v: (
        ((k @ q.mT).view(B, H, HEIGHT, WIDTH, T) + BIAS[:, :HEIGHT, None]).view(B, H, T, T).mT.softmax(-1) @ v
    ),
}

LEFT: dict[str, Code] = {
    "a fill": lambda q, k, v: (
        (q @ k.mT).view(B, H, HEIGHT, WIDTH, T).masked_fill(FUTURE[3:], -INF).view(B, H, T, T).softmax(-1) @ v
    ),
    "softmax over a part of the keys": lambda q, k, v: (
        (q @ k.mT).view(B, H, T, HEIGHT, WIDTH).softmax(-1).view(B, H, T, T) @ v
    ),
    "softmax of joined queries": lambda q, k, v: (q @ k.mT).view(-1, T).softmax(-1).view(B, H, T, T) @ v,
    "a transposed view": lambda q, k, v: (
        (q @ k.mT).view(B, H, HEIGHT, WIDTH, T).transpose(2, 3).reshape(B, H, T, T).softmax(-1) @ v
    ),
    "a temperature of each row": lambda q, k, v: (
        ((q @ k.mT).view(B, H, HEIGHT, WIDTH, T) * BIAS[:, :HEIGHT, :1, None].exp()).view(B, H, T, T).softmax(-1) @ v
    ),
    "a temperature in the place of a head's": lambda q, k, v: (
        ((q @ k.mT).view(B, H, HEIGHT, WIDTH, T) * BIAS[0, :HEIGHT, :1, None].exp()).view(B, H, T, T).softmax(-1) @ v
    ),
    "a split view of weights": lambda q, k, v: (
        ((q @ k.mT).softmax(-1).view(B, H, T, HEIGHT, WIDTH) + 0.1).view(B, H, T, T) @ v
    ),
}


def results(code: Code) -> list[Tensor]:
    inputs = torch.randn(3, B, H, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return of_weighted_sum(code, [x.requires_grad_() for x in inputs.clone().unbind()], BIAS)


@pytest.mark.parametrize("name", [*VIEWED, *LEFT])
def test_eager(name):
    code, taken = (VIEWED | LEFT)[name], name in VIEWED
    plain = results(code)
    with scratch.enabled():
        ours = results(code)
    torch.testing.assert_close(ours, plain, rtol=1e-11 * taken, atol=1e-12 * taken)
    assert scratch.counts().taken == taken


@pytest.mark.parametrize("name", [*VIEWED, *LEFT])
@pytest.mark.usefixtures("fresh")
def test_compiled(name, found):
    code = (VIEWED | LEFT)[name]
    ours = results(torch.compile(code, backend=replacing(counts=found), fullgraph=True))
    torch.testing.assert_close(ours, results(code), rtol=1e-11, atol=1e-12)
    assert found == [name in VIEWED]


@pytest.mark.usefixtures("fresh")
def test_compiled_for_other_sizes(found):
    """A view is bound to the sizes of its graph: with symbols it stays plain code."""

    class Grid(nn.Module):
        def forward(self, q, k, v):
            scores = (q @ k.mT).view(*q.shape[:2], HEIGHT, WIDTH, T) + BIAS[:, :HEIGHT, None]
            return scores.view(*q.shape[:2], T, T).softmax(-1) @ v

    compiled = torch.compile(Grid(), backend=replacing(counts=found), dynamic=True)
    for batch in (2, 3, 5):
        q, k, v = torch.randn(3, batch, H, T, D, dtype=torch.float64).unbind()
        torch.testing.assert_close(compiled(q, k, v), Grid()(q, k, v), rtol=1e-11, atol=1e-12)
    assert set(found) == {0}
