"""Random masks, biases, triangles, bounds, maxima, sinks, gates, keys first: what is taken equals the plain code."""

import math
import random

import pytest
import torch
from torch import Tensor

from pyattn.adapters import scratch

B, H, T, D = 2, 2, 5, 3
LEAST = torch.finfo(torch.float64).min
VALUES = (-math.inf, -math.inf, LEAST, LEAST, -1e9, -1e4, -1e30, -1000.0, -100.0, -5.0, 0.0)


class Code:
    """Attention with up to four operations on its scores, perhaps two on its weights."""

    def __init__(self, seed: int) -> None:
        self.choices = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(3, B, H, T, D, generator=self.numbers, dtype=torch.float64)
        self.biases: list[Tensor] = []
        self.operations = [self.operation() for _ in range(self.choices.randrange(5))]
        self.cleared = self.mask() if self.choices.random() < 0.2 else None
        self.sinks = self.sink() if self.choices.random() < 0.3 else None
        self.gradients = self.choices.random() < 0.6
        self.clean = self.choices.random() < 0.3
        self.gate = self.gates() if self.choices.random() < 0.3 else None
        self.keys_first = self.sinks is None and self.choices.random() < 0.3

    def mask(self) -> Tensor:
        """True = hidden, also whole rows of it."""
        shape = self.choices.choice([(T, T), (B, 1, 1, T), (B, 1, T, T), (H, T, T)])
        drawn = torch.rand(shape, generator=self.numbers) < self.choices.choice([0.2, 0.5, 0.9])
        return self.choices.choice([torch.ones(T, T).triu(1).bool(), torch.ones(T, T).triu(0).bool(), drawn, drawn])

    def sink(self) -> Tensor:
        """One more column of scores, perhaps with large numbers."""
        size = self.choices.choice([1.0, 1.0, 100.0, 1e4])
        drawn = torch.randn(self.choices.choice([(1, H, 1, 1), (B, H, T, 1)]), generator=self.numbers) * size
        self.biases.append(drawn.double().requires_grad_())
        return self.biases[-1]

    def gates(self) -> Tensor:
        """Numbers of heads, or of queries, that weights are multiplied by."""
        drawn = torch.randn(self.choices.choice([(H, 1, 1), (B, H, T, 1)]), generator=self.numbers)
        self.biases.append(drawn.double().requires_grad_())
        return self.biases[-1]

    def operation(self):
        """Scores to scores."""
        mask, value, c = self.mask(), self.choices.choice(VALUES), self.choices.choice([0.5, 1.0, 3.0])
        summand = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, value)
        bias = torch.randn(H, T, T, generator=self.numbers, dtype=torch.float64).requires_grad_()
        kinds = ["fill", "where", "data", "sum", "sum", "bias", "split", "scale", "bound", "triangle", "ones", "most"]
        kind = self.choices.choice(kinds)
        if kind in ("bias", "split"):
            self.biases.append(bias)

        def data(s: Tensor) -> Tensor:
            s.data.masked_fill_(mask, value)
            return s

        return {
            "fill": lambda s: s.masked_fill(mask, value),
            "where": lambda s: torch.where(mask, value, s),
            "sum": lambda s: s + summand,
            "data": data,
            "bias": lambda s: s + bias,
            "split": lambda s: (s.view(B, H * T, T) + bias.view(H * T, T)).view(B, H, T, T),
            "scale": lambda s: s * c,
            "bound": lambda s: torch.max(s, torch.tensor(value or -1e9, dtype=s.dtype)),
            "triangle": lambda s: s.tril(),
            "most": lambda s: s - s.amax(-1, keepdim=True),
            "ones": lambda s: s * (~mask).to(s.dtype),
        }[kind]

    def __call__(self) -> list[Tensor]:
        q, k, v = inputs = [x.clone().requires_grad_(self.gradients) for x in self.inputs]
        scores = (k @ q.mT if self.keys_first else q @ k.mT) / D**0.5
        for operation in self.operations:
            scores = operation(scores)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.expand(B, H, T, 1)], -1)
            scores = scores - scores.max(-1, keepdim=True).values
        weights = scores.softmax(-2).mT if self.keys_first else scores.softmax(-1)
        weights = weights if self.sinks is None else weights[..., :-1]
        if self.cleared is not None:
            weights = weights.masked_fill(self.cleared, 0)
        weights = weights.nan_to_num() if self.clean else weights
        out = (weights if self.gate is None else weights * self.gate) @ v
        if not self.gradients:
            return [out.detach() + 0]
        total = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()
        found = torch.autograd.grad(total, [*inputs, *self.biases], allow_unused=True)
        return [out.detach() + 0, *(torch.zeros(()) if x is None else x for x in found)]


@pytest.mark.parametrize("seed", range(120))
def test_orders(seed):
    code = Code(seed)
    with torch.set_grad_enabled(code.gradients):
        plain = code()
        with scratch.enabled():
            ours = code()
    taken = scratch.counts().taken
    torch.testing.assert_close(ours, plain, rtol=1e-9 * taken, atol=1e-9 * taken, equal_nan=not taken)


def test_most_kinds_are_taken():
    """A third of the cases above, so that the comparison means something."""
    for seed in range(120):
        code = Code(seed)
        code.gradients = code.clean = False
        with torch.no_grad(), scratch.enabled():
            code()
    assert scratch.counts().taken >= 40
