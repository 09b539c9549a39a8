"""Fills of scores.data, which autograd does not see: gradients pass on as if nothing was filled."""

import pytest
import torch
from support.adapters.compiled_graphs import replacing
from support.adapters.gradients import of_weighted_sum
from support.adapters.spellings import ALL_FUTURE, BIAS, FUTURE, INF, PADDED, B, Code, D, H, T
from torch import Tensor

from pyattn.adapters import scratch


def filled(mask: Tensor, value: float, attribute: str = "data") -> Code:
    def code(q, k, v):
        scores = q @ k.mT / 2
        data = scores.data if attribute == "data" else scores.detach()
        data.masked_fill_(mask, value)
        return scores.softmax(-1) @ v

    return code


def indexed(q, k, v):
    scores = q @ k.mT / 2
    scores.data[..., FUTURE] = -INF
    return scores.softmax(-1) @ v


def of_a_biased_sum(q, k, v):
    scores = q @ k.mT + BIAS
    scores.data.masked_fill_(FUTURE, -1e9)
    return (scores / 2 + BIAS).softmax(-1) @ v


def twice(q, k, v):
    scores = q @ k.mT
    scores.data.masked_fill_(FUTURE, -INF)
    scores.data.masked_fill_(PADDED, -INF)
    return scores.masked_fill(FUTURE, -1e9).softmax(-1) @ v


def beside_a_copy_that_lives(q, k, v):
    scores = q @ k.mT / 2
    data = scores.detach()
    scores.masked_fill_(FUTURE, -INF)
    return scores.softmax(-1) @ v + data[..., :1].exp()


TAKEN: dict[str, Code] = {
    "-inf": filled(FUTURE, -INF),
    "-1e9": filled(FUTURE, -1e9),
    "detached": filled(FUTURE, -INF, "detach"),
    "padded keys": filled(PADDED, -INF),
    "an index": indexed,
    "of a biased sum": of_a_biased_sum,
    "twice": twice,
}


def of_capped_scores(q, k, v):
    scores = (q @ k.mT).tanh()
    scores.data.masked_fill_(FUTURE, -1e3)
    return (scores * 5).softmax(-1) @ v


def of_weights(q, k, v):
    weights = (q @ k.mT).masked_fill(FUTURE, -INF).softmax(-1)
    weights.data.masked_fill_(FUTURE, 0)
    return weights @ v


def weights_of_data(q, k, v):
    scores = q @ k.mT
    data = scores.data
    data.masked_fill_(FUTURE, -INF)
    return data.softmax(-1) @ v + scores.sum() * 0


def through_a_view(q, k, v):
    scores = q @ k.mT
    scores.data.view(B * H, T, T).masked_fill_(FUTURE, -INF)
    return scores.softmax(-1) @ v


def other_changes(q, k, v):
    scores = q @ k.mT
    scores.data.mul_(2)
    return scores.softmax(-1) @ v


LEFT: dict[str, Code] = {
    "rows of -1e9": filled(ALL_FUTURE, -1e9),
    "rows of -inf": filled(ALL_FUTURE, -INF),
    "visible keys": filled(FUTURE, -5.0),
    "of capped scores": of_capped_scores,
    "of weights": of_weights,
    "weights of data": weights_of_data,
    "through a view": through_a_view,
    "other changes": other_changes,
    "beside a copy that lives": beside_a_copy_that_lives,
}


def results(code: Code) -> list[Tensor]:
    inputs = torch.randn(3, B, H, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return of_weighted_sum(code, [x.requires_grad_() for x in inputs.clone().unbind()], BIAS)


@pytest.mark.parametrize("name", [*TAKEN, *LEFT])
def test_results(name):
    code, taken = (TAKEN | LEFT)[name], name in TAKEN
    plain = results(code)
    with scratch.enabled():
        ours = results(code)
    torch.testing.assert_close(ours, plain, rtol=1e-11 * taken, atol=1e-12 * taken, equal_nan=True)
    assert scratch.counts().taken == taken


@pytest.mark.parametrize("value", [-1e9, -1e4])
@torch.no_grad()
def test_rows_without_keys_without_gradients(value):
    q, k, v = torch.randn(3, B, H, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind()
    code = filled(ALL_FUTURE, value)
    with scratch.enabled():
        ours = code(q, k, v)
    torch.testing.assert_close(ours, code(q, k, v), rtol=1e-11, atol=1e-12)
    assert scratch.counts() == (1, {})


@pytest.mark.parametrize("name", [*TAKEN, *LEFT])
@pytest.mark.usefixtures("fresh")
def test_compiled(name, found):
    """They stay plain code there, since rows without keys are not known."""
    code = (TAKEN | LEFT)[name]
    plain = results(torch.compile(code, backend="aot_eager"))
    torch.compiler.reset()
    ours = results(torch.compile(code, backend=replacing(counts=found)))
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12, equal_nan=True)
    assert set(found) == {0}
