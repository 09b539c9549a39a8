"""Promise: a score_mod that masks by indices and captured tensors is a mask and a score_mod, exactly."""

import random

import pytest
import torch
from support.adapters.any_masks import ANCESTORS, HOLES, LENGTH, PIECES, REACHES, SEVERAL
from support.adapters.any_scores import HEADS, by_formula, derivatives, drawn

from pyattn.adapters.flex import causal, create_block_mask, flex_attention
from pyattn.adapters.flex.scores import attend
from pyattn.adapters.flex.scores.score_masks import EVALUATED, masking_of
from pyattn.adapters.flex.trace.trace import Trace

NEVER = torch.tensor(-torch.inf, dtype=torch.float64)
KEPT = torch.arange(LENGTH) % 7 < 6
STATE = torch.linspace(-1, 1, LENGTH, dtype=torch.float64)

MASKED = {
    "where": lambda s, b, h, i, j: torch.where(i >= j, s, float("-inf")),
    "branches swapped": lambda s, b, h, i, j: torch.where(i < j, -torch.inf, s * 2),
    "the tensor's where": lambda s, b, h, i, j: s.where(KEPT[j], -torch.inf) + STATE[j],
    "masked_fill": lambda s, b, h, i, j: (s + STATE[i - j]).masked_fill(~ANCESTORS[i, j], -torch.inf),
    "torch's masked_fill": lambda s, b, h, i, j: torch.masked_fill(s, (i - j).abs() > REACHES[h], -torch.inf),
    "a captured number": lambda s, b, h, i, j: torch.where(PIECES[i] == PIECES[j], s, NEVER),
    "a new number": lambda s, b, h, i, j: torch.where((i - j) % 3 == b, s, torch.full_like(s, -torch.inf)),
    "several": lambda s, b, h, i, j: torch.where(
        i >= j, torch.where(i - j < 20, (2 * torch.tanh(s / 2)).masked_fill(j % 5 == 3, -torch.inf), NEVER), NEVER
    ),
    "sums": lambda s, b, h, i, j: (
        torch.where(i >= j, 0.0, -torch.inf) + (s - torch.where((i - j) % 3 != 1, STATE[h], torch.inf))
    ),
    "minus": lambda s, b, h, i, j: torch.where(KEPT[j], 0, -torch.inf) - (s + torch.where(i >= j, 0, torch.inf)),
    "no key": lambda s, b, h, i, j: torch.where((j < i - 3) & (b > 0), s, -torch.inf),
}
"""Native score_mods after the mask is taken out; each is a mask by itself, in some form."""

KEPT_WHOLE = {
    "by the score": lambda s, b, h, i, j: torch.where(s > -1, s, -torch.inf),
    "a finite number": lambda s, b, h, i, j: torch.where(i >= j, s, -1e9),
    "within tanh": lambda s, b, h, i, j: torch.tanh(torch.where(i >= j, s, -torch.inf)),
    "plus infinity": lambda s, b, h, i, j: 1 - torch.where(i >= j, s, -torch.inf).clamp(-9, 9),
    "bits": lambda s, b, h, i, j: torch.where((i % 3).to(torch.uint8), s, -torch.inf),
    "in place": lambda s, b, h, i, j: s.clone().masked_fill_(i < j, -torch.inf),
}


def taken_apart(score_mod):
    return masking_of(Trace("score_mod", score_mod, torch.device("cpu"), torch.float64).result)


def both(score_mod, mask_mod=None):
    """Our function and the formula, under another mask."""
    block_mask = None if mask_mod is None else create_block_mask(mask_mod, 2, HEADS, LENGTH, LENGTH, "cpu", 16)
    return (
        lambda *x: flex_attention(*x, score_mod, block_mask, enable_gqa=True, return_lse=True),
        lambda *x: by_formula(*x, score_mod, mask_mod),
    )


def assert_same(ours, formula, tensors):
    for number, (x, y) in enumerate(zip(derivatives(ours, tensors), derivatives(formula, tensors), strict=True)):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, msg=lambda text, n=number: f"result {n}: {text}")


@pytest.fixture
def _native_only(monkeypatch):
    monkeypatch.setattr(attend, "apply", None)  # no blocks


@pytest.mark.usefixtures("_native_only")
@pytest.mark.parametrize("mask", [None, "an interval", "several", "holes"])
@pytest.mark.parametrize("name", MASKED)
def test_derivatives(name, mask):
    several = SEVERAL["rows of documents"]
    mask_mod = {"an interval": causal(3), "several": several, "holes": HOLES["tree"]}.get(mask)
    assert_same(*both(MASKED[name], mask_mod), drawn("nothing"))


@pytest.mark.filterwarnings("ignore:where received a uint8 condition tensor:UserWarning")
@pytest.mark.parametrize("name", KEPT_WHOLE)
def test_what_is_no_mask(name):
    assert not taken_apart(KEPT_WHOLE[name]).conditions
    assert_same(*both(KEPT_WHOLE[name]), drawn("nothing"))


@pytest.mark.parametrize("change", [lambda s: s * 2, torch.square], ids=["native", "blocks"])
def test_hidden_values_never_leak(change):
    """torch's own formula lets NaN leak from values (0 * NaN) and into gradients."""
    edge, results = torch.tensor(40.0, requires_grad=True), []
    for hidden in (0.0, torch.nan):
        tensors = torch.randn(3, 1, 1, 64, 8, generator=torch.Generator().manual_seed(0))
        tensors[1:, :, :, 40:] = hidden
        inputs = [x.requires_grad_() for x in tensors.unbind()]
        out, lse = flex_attention(
            *inputs, lambda s, b, h, i, j: torch.where(j < edge, change(s), -torch.inf), return_lse=True
        )
        gradients = torch.autograd.grad(out.square().sum() + lse.sum(), [*inputs, edge], allow_unused=True)
        assert gradients[-1] is None
        results.append((out, lse, *gradients[:-1]))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_conditions_are_evaluated_when_they_change():
    """A table that an optimizer changes is not part of them."""
    reach, table = torch.tensor(9), torch.zeros(2 * LENGTH, dtype=torch.float64)

    def score_mod(score, b, h, q_idx, kv_idx):
        return (score + table[q_idx - kv_idx]).masked_fill((q_idx - kv_idx).abs() > reach, -torch.inf)

    q, k, v = (x.detach() for x in drawn("nothing"))
    masks = []
    for size in (9, 9, 30):
        if reach != size:
            reach.fill_(size)
        table += 1
        ours, expected = (f(q, k, v) for f in both(score_mod))
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
        masks.append(EVALUATED[score_mod].mask)
    assert masks[0] is masks[1]
    assert masks[1] is not masks[2]


class Slots:
    __slots__ = ()

    def __call__(self, score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score, -torch.inf)


class Unhashable(Slots):
    __slots__ = ("__weakref__",)
    __hash__ = None


@pytest.mark.parametrize("kind", [Slots, Unhashable])
def test_score_mods_that_are_no_keys(kind):
    q = torch.randn(1, 2, 20, 8, dtype=torch.float64)
    torch.testing.assert_close(flex_attention(q, q, q, kind()), by_formula(q, q, q, kind())[0])


def conditions(rng):
    """mask_mods in which every query sees itself."""
    n, some = rng.randint(1, 20), torch.rand(HEADS, LENGTH, LENGTH) < 0.7
    return [
        lambda b, h, i, j: i >= j,
        lambda b, h, i, j: (i - j).abs() <= n,
        lambda b, h, i, j: (i - j) % (n + h) == 0,
        lambda b, h, i, j: (j < 3 * n) | (j == i),
        lambda b, h, i, j: PIECES[i] == PIECES[j],
        lambda b, h, i, j: some[h, i, j] | (i == j),
        lambda b, h, i, j: (i <= j + b * n) | (i // n == j // n),
    ]


TERMS = [
    lambda s, x, b, h, i, j: s + x[h, i - j],
    lambda s, x, b, h, i, j: x[b, j] + s,
    lambda s, x, b, h, i, j: s - x[h, 0] * (i - j).abs() / 9,
    lambda s, x, b, h, i, j: 1 - s,
    lambda s, x, b, h, i, j: 3 * torch.tanh(s / 3),
    lambda s, x, b, h, i, j: s * x[h, 1],
]
MASKINGS = [
    lambda s, seen, never: torch.where(seen, s, never),
    lambda s, seen, never: torch.where(~seen, never, s),
    lambda s, seen, never: s.masked_fill(~seen, never),
    lambda s, seen, never: s + torch.where(seen, 0.0, never),
]


def random_score_mod(rng, table):
    """Some terms, then one to three masks."""
    terms = rng.choices(TERMS, k=rng.randint(0, 3))
    masks = [
        (rng.choice(conditions(rng)), rng.choice(MASKINGS), rng.choice([NEVER, -torch.inf]))
        for _ in range(rng.randint(1, 3))
    ]

    def score_mod(s, *places):
        for term in terms:
            s = term(s, table, *places)
        for seen, masking, never in masks:
            s = masking(s, seen(*places), never)
        return s

    return score_mod


@pytest.mark.parametrize("seed", range(12))
def test_random_score_mods(seed):
    tensors = [*drawn("nothing"), torch.randn(HEADS, 2 * LENGTH, dtype=torch.float64, requires_grad=True)]

    def functions_of(number):
        def function(*x):
            rng = random.Random(seed)
            torch.manual_seed(seed)
            score_mod = random_score_mod(rng, x[3])
            assert taken_apart(score_mod).conditions
            mask_mod = rng.choice([None, causal(3), SEVERAL["rows of documents"], HOLES["tree"]])
            return both(score_mod, mask_mod)[number](*x[:3])

        return function

    assert_same(functions_of(0), functions_of(1), tensors)
