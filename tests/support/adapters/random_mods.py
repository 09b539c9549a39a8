"""Random mask_mods and score_mods, of arithmetic in every type: where a rule of integers may be false."""

from __future__ import annotations

import functools
from collections.abc import Callable
from random import Random

import torch
from torch import Tensor
from torch.nn.functional import relu

Expression = Callable[..., Tensor]
"""A function of b, h, q_idx and kv_idx; of score, b, h, q_idx and kv_idx where it is one of a score."""

DTYPES = [
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
]
NUMBERS = [dtype for dtype in DTYPES if dtype != torch.bool]
INTEGERS = [0, 1, 2, 3, 7, -1, -5]
ENDS = [2**31 - 1, 2**31 - 5, -(2**31), 2**62, -(2**62), 2**63 - 1, 2**63 - 4, -(2**63), 2**53 + 1, 2**24 + 1]
FLOATS = [0.5, -0.5, 3.5, 0.1, -2.5, 1e4, 1.0]

CASTS = [
    *(Tensor.long, Tensor.int, Tensor.short, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
    lambda x: x.to(torch.int8),
    lambda x: x.to(dtype=torch.int32),
    lambda x: x.to(torch.int64),
    lambda x: x.to(torch.float64).to(torch.int64),
]
SAME = [
    *(Tensor.neg, torch.neg, Tensor.abs, torch.floor, Tensor.round, Tensor.ceil, Tensor.trunc, Tensor.clone, abs),
    lambda x: 0 - x,
    lambda x: ~x,
    lambda x: relu(x, inplace=True),
    lambda x: x.clone().mul_(2),
    lambda x: x.clamp(-5, 9),
    lambda x: x.square(),
    torch.zeros_like,
]
BY_INTEGER = [
    lambda x, n: x * n,
    lambda x, n: n * x,
    lambda x, n: x // (abs(n) + 2),
    lambda x, n: x % (abs(n) + 2),
    lambda x, n: x / (abs(n) + 2),
    lambda x, n: torch.div(x, abs(n) + 2, rounding_mode="floor"),
    lambda x, n: x.div(-abs(n) - 2, rounding_mode="trunc"),
    lambda x, n: x >> abs(n),
    lambda x, n: x << abs(n),
    lambda x, n: x & n,
    lambda x, n: x | n,
    lambda x, n: x ^ n,
]
OF_TWO = [
    *[lambda x, y: x + y, lambda x, y: x - y] * 4,
    *(torch.add, torch.sub, torch.subtract, torch.rsub, torch.minimum, torch.maximum),
    *(torch.ops.aten.add, torch.ops.aten.sub),
    lambda x, y: torch.add(x, y, alpha=2),
    lambda x, y: x.sub(y, alpha=3),
    lambda x, y: x.add(y, alpha=-1),
    lambda x, y: torch.add(input=x, other=y),
    lambda x, y: x.sub(other=y),
    lambda x, y: x.clone().sub_(y),
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: x * y,
]
COMPARISONS = [
    *[lambda x, y: x >= y, lambda x, y: x <= y, lambda x, y: x > y, lambda x, y: x < y],
    *[lambda x, y: x == y, lambda x, y: x != y, torch.ge, torch.lt, torch.eq, Tensor.ne],
    lambda x, y: torch.le(input=x, other=y),
]
OF_BOOLS = [torch.logical_and, torch.logical_or, torch.logical_xor, lambda x, y: x & y, lambda x, y: x | y]


def constant(draw: Random) -> float | Tensor:
    """A number, or a captured one of any type."""
    number = draw.choice([*INTEGERS, *INTEGERS, *FLOATS, *ENDS])
    if draw.randrange(3):
        return number
    return torch.tensor(number, dtype=torch.float64).clamp(-200, 200).to(draw.choice(DTYPES)) + 0


def within_limits(cast: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``cast(x)``; C++ leaves open which integer a float beyond an integer type becomes."""
    return cast(x.nan_to_num(0, 0, 0).clamp(-100, 100) if x.is_floating_point() else x)


def chain(draw: Random, depth: int) -> Expression:
    """The distance of query and key as people write it, plus steps that keep it, round it or overflow."""
    expression: Expression = (lambda b, h, q_idx, kv_idx: q_idx) if depth else (lambda b, h, q_idx, kv_idx: kv_idx)
    if depth > 1:
        expression = both(draw.choice(OF_TWO[:10]), chain(draw, 1), chain(draw, 0))
    for _ in range(draw.choice([0, 0, 2, 2, 3])):
        inner, step = expression, draw.choice([*CASTS, Tensor.neg])
        if draw.randrange(2):
            term = draw.choice(
                [draw.choice(FLOATS), draw.choice(FLOATS), draw.choice(ENDS), draw.choice(INTEGERS), constant(draw)]
            )
            expression = functools.partial(lambda inner, term, *x: inner(*x) + term, inner, term)
        else:
            expression = functools.partial(
                lambda inner, step, *places: within_limits(step, inner(*places)), inner, step
            )
    return expression


def number(draw: Random, depth: int) -> Expression:
    """An expression of any type."""
    if depth == 0 or not draw.randrange(6):
        place = draw.choice([0, 1, 2, 2, 2, 2, 3, 3, 3, 3])
        if not draw.randrange(8):
            table = torch.arange(64).mul(7).remainder(23).to(draw.choice(NUMBERS))
            return lambda *places: table[places[place]]
        return lambda *places: places[place]
    kind, first = draw.randrange(8), number(draw, depth - 1)
    if kind == 0:
        cast = draw.choice(CASTS)
        return lambda *places: within_limits(cast, first(*places))
    if kind == 1:
        change = draw.choice(SAME)
        return lambda *places: change(first(*places) + 0)  # relu changes a copy in place
    if kind == 2:
        by, n = draw.choice(BY_INTEGER), draw.choice(INTEGERS)
        return lambda *places: by(first(*places), n)
    if kind == 3:
        return both(draw.choice(OF_TWO), first, number(draw, depth - 1))
    if kind == 4:
        changed, copy = draw.choice([Tensor.add_, Tensor.sub_, relu]), draw.choice([Tensor.long, Tensor.double])

        def in_place(*places: Tensor) -> Tensor:
            x = within_limits(copy, first(*places)).clone()
            relu(x, inplace=True) if changed is relu else changed(x, 2)
            return x

        return in_place
    function, other = draw.choice(OF_TWO), constant(draw)
    swapped = draw.randrange(2) and isinstance(other, Tensor)
    return lambda *places: function(other, first(*places)) if swapped else function(first(*places), other)


def both(function: Callable[[Tensor, Tensor], Tensor], first: Expression, second: Expression) -> Expression:
    """The function of two expressions."""
    return lambda *places: function(first(*places), second(*places))


def condition(draw: Random, depth: int) -> Expression:
    """Comparisons of expressions with each other or with constants."""
    if depth and not draw.randrange(5):
        return both(draw.choice(OF_BOOLS), condition(draw, depth - 1), condition(draw, depth - 1))
    compared = draw.choice(COMPARISONS)
    if draw.randrange(3):
        return both(compared, chain(draw, 1), chain(draw, 0))
    first = chain(draw, 2) if draw.randrange(2) else number(draw, draw.randint(1, 3))
    if draw.randrange(3):
        return both(compared, first, number(draw, draw.randint(0, 3)))
    other = constant(draw)
    return lambda *places: compared(first(*places), other)


def mask_mod(draw: Random) -> Expression:
    """A condition of some depth."""
    drawn = condition(draw, 2)
    return lambda b, h, q_idx, kv_idx: drawn(b, h, q_idx, kv_idx)


FACTORS = [2, -3, 0.5, -0.1, 1, 0, 0.0, 1e39, 1e-39, 1e25, -1e-25, 1e-200, True]
NEVER = [-torch.inf, torch.tensor(-torch.inf), torch.tensor(-torch.inf, dtype=torch.float64), -1e300, -9.0]


def bounded(expression: Expression, dtype: torch.dtype) -> Expression:
    """A term whose rounding in one order or another hardly matters."""
    return lambda *places: expression(*places).to(torch.float64).nan_to_num(0, 3, -3).clamp(-99, 99).to(dtype) / 30


def term(draw: Random) -> Expression:
    """A random term of a score."""
    kind = draw.randrange(4)
    if kind == 0:
        added = draw.choice([0.1, 3, -0.7, torch.tensor(2, dtype=torch.uint8), torch.tensor(0.3)])
        return lambda *places: added
    if kind == 1:
        table = torch.arange(2 * 24 * 24).mul(7).remainder(11).reshape(2, 24, 24).to(draw.choice(NUMBERS))
        place = draw.choice([(1, 2, 3), (0, 2, 3), (1, 3, 3), (0, 1, 2), (1, 2, 2)])
        return lambda *places: table[tuple(places[n] for n in place)]
    expression = chain(draw, draw.choice([0, 1, 2, 2])) if kind == 2 else number(draw, 2)
    return bounded(expression, draw.choice([torch.float64, torch.float32, torch.int8]))


def scored(draw: Random) -> Callable[[Tensor, tuple[Tensor, ...]], Tensor]:
    """A step from a score to another."""
    kind = draw.randrange(6)
    if kind < 2:
        step = draw.choice([lambda s, x: s + x, lambda s, x: x + s, lambda s, x: s - x, lambda s, x: x - s])
        added = term(draw)
        return lambda s, places: step(s, added(*places))
    factor = draw.choice(FACTORS[:5] if draw.randrange(3) else FACTORS)
    if kind == 2:
        return draw.choice([lambda s, _: s * factor, lambda s, _: factor * s, lambda s, _: -s, lambda s, _: s / factor])
    if kind == 3:
        cap = draw.choice(FACTORS[:5])
        return draw.choice([lambda s, _: cap * torch.tanh(s / cap), lambda s, _: (s * factor).tanh() * cap])
    if kind == 4:
        to = draw.choice([Tensor.half, Tensor.bfloat16, Tensor.float, Tensor.double])
        return (lambda s, _: to(s)) if not draw.randrange(4) else lambda s, _: s
    seen, never = condition(draw, 1), draw.choice(NEVER)
    masking = draw.choice(
        [
            lambda s, x: torch.where(x, s, never),
            lambda s, x: torch.where(~x, never, s),
            lambda s, x: s.masked_fill(~x, never),
            lambda s, x: s + torch.where(x, 0, -torch.inf),
            lambda s, x: torch.where(x, 0.1, -torch.inf) + s * s,
            lambda s, x: s - torch.where(x, 0.1, torch.inf),
            lambda s, x: torch.where(x, s, torch.full_like(s, -1e300)),
            lambda s, x: torch.where(x, torch.full((), 7, dtype=torch.uint8), -torch.inf) - s,
        ]
    )
    return lambda s, places: masking(s, seen(*places))


def score_mod(draw: Random) -> Expression:
    """Some steps."""
    steps = [scored(draw) for _ in range(draw.randint(1, 4))]

    def changed(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for step in steps:
            score = step(score, (b, h, q_idx, kv_idx))
        return score

    return changed
