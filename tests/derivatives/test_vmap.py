"""Promise: torch.vmap gives the results of one call after the other, whichever inputs are mapped."""

from functools import partial

import pytest
import torch
from support.assertions import assert_close
from support.calls import MASKS, SCORES, score_tensors
from support.cases import Case
from torch import Tensor

from pyattn import attention


def test_vmap_over_nothing() -> None:
    assert torch.vmap(attention)(*torch.randn(3, 0, 1, 2, 3, 4)).shape == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 2, 0), (1, 1, None)])
def test_vmap(in_dims: tuple[int | None, ...]) -> None:
    case = Case(2, 2, 1, 4, 5, 3, 3)
    stacks = [
        x if dim is None else torch.stack([x, x.sin(), 2 * x], dim)
        for x, dim in zip(case.inputs(torch.float64), in_dims, strict=True)
    ]

    def slices(i: int) -> list[Tensor]:
        return [x if dim is None else x.select(dim, i) for x, dim in zip(stacks, in_dims, strict=True)]

    def grad(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda *qkv: attention(*qkv).sin().sum(), (0, 1, 2))(q, k, v)

    out, lse = torch.vmap(partial(attention, return_lse=True), in_dims)(*stacks)
    grads = torch.vmap(grad, in_dims)(*stacks)
    for i in range(3):
        assert_close((out[i], lse[i]), attention(*slices(i), return_lse=True))
        assert_close(tuple(g[i] for g in grads), grad(*slices(i)))


@pytest.mark.parametrize(
    "mapped", ["", "q", "bias", "alibi_slopes", "sinks", "relative_bias", "key_ranges", "q bias alibi_slopes"]
)
@pytest.mark.parametrize("size", [0, 3])
@pytest.mark.parametrize("full", [False, True])
def test_vmap_over_masks_and_scores(mapped: str, size: int, full: bool) -> None:
    """``full``: options that all sequences could share have a batch dimension."""
    q, k, v = SCORES.inputs(torch.float64)
    inputs = {"q": q, "k": k, "v": v, "key_ranges": MASKS["key_ranges"], **score_tensors()}
    if full:
        inputs |= {
            "key_ranges": inputs["key_ranges"][:, :, 1].expand(2, 4, 2),
            "alibi_slopes": torch.rand(2, 4).double(),
        }
        inputs["relative_bias"] = torch.randn(2, 1, 5).double()
    else:
        inputs["bias"] = inputs["bias"][0, 0]
    dims = {name: (0 if i % 2 else -1) if name in mapped.split() else None for i, name in enumerate(inputs)}
    stacks = {
        name: x if dims[name] is None else torch.stack([x, x.flip(-1).sort().values, x] if size else [x], dims[name])
        for name, x in inputs.items()
    }
    if size == 0:
        stacks = {name: x if dims[name] is None else x.narrow(dims[name], 0, 0) for name, x in stacks.items()}
    learned = [name for name in inputs if name != "key_ranges"]

    def call(**tensors: Tensor) -> tuple[Tensor, Tensor]:
        return attention(**tensors, window=(3, -1), return_lse=True)

    def grads(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        rest = {name: x for name, x in tensors.items() if name not in learned}

        def loss(some: dict[str, Tensor]) -> Tensor:
            out, lse = call(**some, **rest)
            return out.sin().sum() + lse.cos().sum()

        return torch.func.grad(loss)({name: tensors[name] for name in learned})

    if not mapped:
        stacks |= {"q": torch.stack([q] * size) if size else q[None][:0]}
        dims |= {"q": 0}
    out, lse = torch.vmap(lambda tensors: call(**tensors), (dims,))(stacks)
    found = torch.vmap(grads, (dims,))(stacks)
    assert out.shape[0] == lse.shape[0] == size
    assert all(x.shape == (size, *inputs[name].shape) for name, x in found.items())
    for i in range(size):
        one = {name: x if dims[name] is None else x.select(dims[name], i) for name, x in stacks.items()}
        assert_close((out[i], lse[i]), call(**one))
        assert_close({name: x[i] for name, x in found.items()}, grads(one))


def test_per_sample_offsets_under_vmap() -> None:
    q, k, v = (torch.stack([x, 2 * x]) for x in Case(2, 1, 1, 4, 5, 3, 3).inputs(torch.float64))
    offsets = torch.tensor([[0, 1], [-2, 3]])
    out = torch.vmap(lambda q, k, v, o: attention(q, k, v, q_offset=o))(q, k, v, offsets)
    for i in range(2):
        assert_close(out[i], attention(q[i], k[i], v[i], q_offset=offsets[i]))


@pytest.mark.parametrize(
    "bias", [None, torch.randn(1, 4, 5), torch.randn(4, 4, 5), torch.randn(5)], ids=["", "1qk", "hqk", "k"]
)
def test_gradients_of_scores_fold_into_heads(bias: Tensor | None) -> None:
    """One call for all slices, with mapped sinks or with gradients that differ by slice."""
    q, k, v = (torch.stack([x, 2 * x, -x]) for x in SCORES.inputs(torch.float64))
    bias = None if bias is None else bias.double()
    slopes, sinks = torch.rand(2, 4).double(), torch.randn(3, 4).double()

    def loss(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, sinks: Tensor) -> Tensor:
        return attention(q, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks).sin().sum()

    grad = torch.func.grad(loss, (0, 1, 2, 3, 4))
    with torch.profiler.profile() as profile:
        found = torch.vmap(grad, (0, 0, 0, None, 0))(q, k, v, slopes, sinks)
    calls = {event.key: event.count for event in profile.key_averages()}
    # Each call is counted above vmap and below; a loop would run it three times.
    assert max(calls["pyattn::attention_forward"], calls["pyattn::attention_backward"]) <= 2
    for i in range(3):
        one = grad(q[i], k[i], v[i], slopes, sinks[i])
        assert_close(tuple(x[i] for x in found), one)
