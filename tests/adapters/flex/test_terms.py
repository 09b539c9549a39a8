"""Promise: a score_mod that is a multiple of the score plus terms of indices runs as native options, exactly."""

import pytest
import torch
from support.adapters.any_masks import LENGTH, every_third, in_place
from support.adapters.any_scores import HEADS, SCORES, by_formula, derivatives, drawn, functions
from support.adapters.gradients import assert_accurate

from pyattn.adapters.flex import causal, create_block_mask, flex_attention
from pyattn.adapters.flex.scores import attend
from pyattn.adapters.flex.scores.score_masks import masking_of
from pyattn.adapters.flex.scores.score_terms import score_of_terms
from pyattn.adapters.flex.trace.trace import Trace

TERMS = {"nothing", "soft cap", "alibi", "relative", "t5", "decay", "gates", "a bias", "a network"}
NATIVE = TERMS | {"causal", "a window", "dilated", "rows that see nothing", "documents"}
"""Names out of SCORES."""


def given(score_mod, seqlen_q=LENGTH, seqlen_k=LENGTH):
    """The options of a score_mod that are not their defaults, tensors by their shapes; None if it has none."""
    trace = Trace("score_mod", score_mod, torch.device("cpu"), torch.float64)
    score = score_of_terms(
        masking_of(trace.result).rest, torch.zeros(2, HEADS, seqlen_q, 8, dtype=torch.float64), seqlen_k
    )
    if score is None:
        return None
    shown = {k: tuple(v.shape) if isinstance(v, torch.Tensor) else v for k, v in score._asdict().items()}
    return {k: v for k, v in shown.items() if v not in (None, 0) and (k, v) != ("factor", 1)}


def test_which_are_native():
    found = {name for name in SCORES if given(SCORES[name].make(*drawn(name)[3:])) is not None}
    assert found == NATIVE


@pytest.fixture
def _native_only(monkeypatch):
    monkeypatch.setattr(attend, "apply", None)  # no blocks


@pytest.mark.usefixtures("_native_only")
@pytest.mark.parametrize("name", sorted(NATIVE))
def test_derivatives(name):
    """First and second ones, those of captured tensors too."""
    tensors = drawn(name)
    ours, expected = (derivatives(function, tensors) for function in functions(name))
    for number, (x, y) in enumerate(zip(ours, expected, strict=True)):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, msg=lambda text, n=number: f"result {n}: {text}")


@pytest.mark.usefixtures("_native_only")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["relative", "gates", "a bias"])
def test_accuracy(name, dtype):
    assert_accurate(*functions(name), *drawn(name, dtype))


T = torch.linspace(-1, 1, 400, dtype=torch.float64)
TABLE = T.reshape(4, 100)


def doubled(x):
    x.view(1).mul_(2)
    return x


BYTES = torch.arange(4 * LENGTH**2).mul(37).remainder(200).reshape(4, LENGTH, LENGTH).to(torch.uint8)

FORMS = {
    "bytes": (
        lambda s, b, h, i, j: s - BYTES[h, i, j] - BYTES[b, 0, i - j],
        {"bias": (4, LENGTH, LENGTH), "relative_bias": (2, 1, 2 * LENGTH - 1)},
    ),
    "a number": (lambda s, b, h, i, j: s + 0.1, {"relative_bias": (1, 1)}),
    "scaled": (lambda s, b, h, i, j: -(s * 0.5) / 0.25, {"factor": -2.0}),
    "a cap in another form": (lambda s, b, h, i, j: torch.tanh(s * 0.125) * 4 * 2, {"softcap": 8.0}),
    "a cap of a multiple": (lambda s, b, h, i, j: -3 * torch.tanh(s), {"softcap": 3.0, "factor": -3.0}),
    "minus": (lambda s, b, h, i, j: 1 - s, {"factor": -1.0, "relative_bias": (1, 1)}),
    "the distance twice": (
        lambda s, b, h, i, j: s + TABLE[h, (i - j).abs()] - 0.5 * (2 * i - 2 * j > 9),
        {"relative_bias": (4, 2 * LENGTH - 1)},
    ),
    "distances by other ways": (
        lambda s, b, h, i, j: s + (j - (i + 3)).float().abs().sqrt() * torch.where(i >= j, T[h], T[b]),
        {"relative_bias": (2, 4, 2 * LENGTH - 1)},
    ),
    "sequences": (lambda s, b, h, i, j: T[b] + s, {"relative_bias": (2, 1, 1)}),
    "keys and distances": (
        lambda s, b, h, i, j: (s - T[j]) + T[99 + i - j],
        {"bias": (1, 1, 1, LENGTH), "relative_bias": (1, 2 * LENGTH - 1)},
    ),
    "queries": (lambda s, b, h, i, j: s + TABLE[h, i] * 2, {"bias": (1, 4, LENGTH, 1)}),
    "a cap, then a bias": (
        lambda s, b, h, i, j: 2 * torch.tanh(s / 2) + T[j],
        {"softcap": 2.0, "bias": (1, 1, 1, LENGTH)},
    ),
    "masked keys": (lambda s, b, h, i, j: s + torch.where(T[j] < -0.8, T[j], -torch.inf), {"bias": (1, 1, 1, LENGTH)}),
    "keys masked by a bias": (lambda s, b, h, i, j: s + (T[j] < -0.8).double().log(), {"bias": (1, 1, 1, LENGTH)}),
    "hidden distances": (
        lambda s, b, h, i, j: s + torch.where(i < j, -torch.inf, 0.0),
        {"relative_bias": (1, 1)},
    ),
    "a tensor like the score": (lambda s, b, h, i, j: s + torch.full_like(s, 0.1) * j, {"bias": (1, 1, 1, LENGTH)}),
    "a mask": (lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf), {}),
}
OTHERS = {
    "a cap after a bias": lambda s, b, h, i, j: torch.tanh(s + T[j]),
    "queries and keys": lambda s, b, h, i, j: s + T[i] + T[j],
    "a product": lambda s, b, h, i, j: s + T[i] * T[j],
    "rounded distances": lambda s, b, h, i, j: s + T[(i // 2 - j // 2).abs()],
    "sums": lambda s, b, h, i, j: s + T[i + j],
    "unequal slopes": lambda s, b, h, i, j: s + (2 * i - j).cos(),
    "a rounded position": lambda s, b, h, i, j: s - ((i - 3.5).long() - j).abs(),
    "positions as floats": lambda s, b, h, i, j: s + (j.float() - (i + 3)).abs().sqrt(),
    "a sum that overflows": lambda s, b, h, i, j: s + (i + (2**63 - 9) > j + (2**63 - 9)),
    "a distance in bytes": lambda s, b, h, i, j: s + (i.to(torch.int8) * 8 - j.to(torch.int8) * 8).float().sqrt(),
    "a distance in half precision": lambda s, b, h, i, j: s + (i.half() * 1.1 - j.half() * 1.1),
    "hidden distances": lambda s, b, h, i, j: s + (i >= j).double().log(),
    "the score twice": lambda s, b, h, i, j: s + s,
    "a cap of 0": lambda s, b, h, i, j: 0 * torch.tanh(s),
    "divided by 0": lambda s, b, h, i, j: s / 0,
    "times 0": lambda s, b, h, i, j: s * 0,
    "a factor that overflows": lambda s, b, h, i, j: s * 1e300 * 1e300 / 1e300,
    "a factor that overflows in float32": lambda s, b, h, i, j: s * 1e30 * 1e30 * 1e-60,
    "a factor that underflows": lambda s, b, h, i, j: s * 1e-300 * 1e-300 * 1e300,
    "a cap of a rounded score": lambda s, b, h, i, j: 2 * torch.tanh(s.half() / 2),
    "a rounded sum": lambda s, b, h, i, j: (s + T[j]).bfloat16(),
    "a rounded quotient": lambda s, b, h, i, j: torch.div(s, 2, rounding_mode="floor"),
    "named arguments": lambda s, b, h, i, j: torch.tanh(input=s),
    "a multiple of a term": lambda s, b, h, i, j: torch.add(s, T[j], alpha=2),
    "in place by an argument": lambda s, b, h, i, j: in_place(s - T[j]) - T[j],
    "in place": lambda s, b, h, i, j: s.clone().add_(T[j]).mul_(2),
    "TorchScript": lambda s, b, h, i, j: s + every_third(h, i, j),
    "several results": lambda s, b, h, i, j: s + T[torch.stack([i, j]).unbind()[1]],
    "changed through a view": lambda s, b, h, i, j: s + doubled(T[j].clone()),
    "a learned factor": lambda s, b, h, i, j: s * T[0],
}


@pytest.mark.usefixtures("_native_only")
@pytest.mark.parametrize(("length", "masked"), [(LENGTH, True), (LENGTH, False), (1, False), (9, True)])
@pytest.mark.parametrize("name", FORMS)
def test_forms(name, length, masked):
    """Also for queries fewer than keys, whose positions begin at 0."""
    score_mod, expected = FORMS[name]
    if length == LENGTH:
        assert given(score_mod) == expected
    q, k, v = (torch.randn(2, heads, n, 8, dtype=torch.float64) for heads, n in ((4, length), (2, 30), (2, 30)))
    if length == LENGTH:
        q, k, v = (torch.randn(2, heads, LENGTH, 8, dtype=torch.float64) for heads in (4, 2, 2))
    block_mask = create_block_mask(causal(3), 2, 4, length, k.shape[2], "cpu") if masked else None
    out = flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True, return_lse=True)
    truth = by_formula(q, k, v, score_mod, causal(3) if masked else None)
    torch.testing.assert_close(out, truth, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", OTHERS)
def test_other_forms(name):
    score_mod = OTHERS[name]
    assert given(score_mod) is None
    q = torch.randn(2, 4, 20, 8, dtype=torch.float64)
    torch.testing.assert_close(flex_attention(q, q, q, score_mod), by_formula(q, q, q, score_mod)[0], equal_nan=True)


def test_hidden_distances():
    """-inf masks a pair; a query that sees no key gets 0."""
    q, k, v = torch.randn(3, 1, 2, 20, 8, dtype=torch.float64).unbind()

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + (kv_idx < q_idx).double().log()

    found = flex_attention(q, k, v, score_mod, return_lse=True)
    torch.testing.assert_close(found, by_formula(q, k, v, score_mod))
    assert not found[0][:, :, 0].any()


def test_a_score_mod_that_changes():
    """Each call takes it apart again."""
    q, slope = torch.randn(1, 2, 20, 8, dtype=torch.float64), [0.5]

    def score_mod(score, b, h, q_idx, kv_idx):
        return score - slope[0] * (q_idx - kv_idx).abs()

    for number in (0.5, 2.0):
        slope[0] = number
        torch.testing.assert_close(flex_attention(q, q, q, score_mod), by_formula(q, q, q, score_mod)[0])
