"""People's own attention, converted: outputs, gradients and caches equal the plain module's."""

import copy

import pytest
import torch

from pyattn.adapters import scratch
from tests.support.adapters import chapter5, people

T = 16
NAMES = {
    "nanoGPT": people.NanoGPT,
    "minGPT": people.MinGPT,
    "Llama 3.2": people.GroupedQueryAttention,
    "Qwen3": lambda: people.GroupedQueryAttention("heads"),
    "Gemma 3": lambda: people.GroupedQueryAttention("heads", window=5, scalar=12.0),
    "Olmo 3": lambda: people.GroupedQueryAttention("columns", window=5),
    "Tiny Aya, with a window": lambda: chapter5.TinyAya(5),
    "Tiny Aya, full": lambda: chapter5.TinyAya(None),
    "Qwen3.5": chapter5.Qwen35,
    "Gemma 4, with a window": lambda: chapter5.Gemma4(5),
    "Gemma 4, full": lambda: chapter5.Gemma4(None),
    "Gemma 4, shared keys": chapter5.Gemma4Layers,
    "chapter 4": people.MultiHeadAttention,
    "ViT": people.ViT,
    "Swin": people.Window,
    "AlphaFold": people.Triangle,
    "einsum": people.Einsum,
    "T5": people.Relative,
}
CACHED = ["Llama 3.2", "Qwen3", "Gemma 3", "Olmo 3", "Tiny Aya, with a window", "Tiny Aya, full", "Qwen3.5"]
CACHED += ["Gemma 4, with a window", "Gemma 4, full"]


def pair(kind):
    """A module and a converted copy of it, in float64."""
    torch.manual_seed(0)
    module = kind().double()
    return module, scratch.convert(copy.deepcopy(module))


def numbers(shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def step(module, x):
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = module(x)
    out = out[0] if isinstance(out, tuple) else out
    (out * numbers(out.shape)).sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def tolerance(name):
    """T5's and Qwen3.5's softmaxes are in float32."""
    return {"rtol": 1e-5, "atol": 1e-5} if name in ("T5", "Qwen3.5") else {"rtol": 1e-10, "atol": 1e-11}


@pytest.mark.parametrize("name", NAMES)
def test_steps(name):
    plain, ours = pair(NAMES[name])
    x = numbers((2, T, people.D))
    truth = step(plain, x)
    for _ in range(3):
        torch.testing.assert_close(step(ours, x), truth, **tolerance(name))
    assert scratch.counts() == (3 * (4 if name == "Gemma 4, shared keys" else 1), {})


def test_weights_that_are_kept():
    plain, ours = pair(people.MultiHeadedAttention)
    x = numbers((2, T, people.D))
    truth = step(plain, x)
    for _ in range(3):
        torch.testing.assert_close(step(ours, x), truth, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(ours.attn + 0, plain.attn, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", CACHED)
@torch.no_grad()
def test_caches(name):
    plain, ours = pair(NAMES[name])
    caches = [None, None]
    for x in numbers((2, 10, people.D)).split([6, 1, 1, 2], dim=1):
        outs = []
        for at, module in enumerate((plain, ours)):
            out, caches[at] = module(x, caches[at])
            outs.append(out)
        torch.testing.assert_close(outs[1], outs[0], **tolerance(name))
    assert scratch.counts() == (4, {})


@torch.no_grad()
def test_caches_in_buffers():
    plain, ours = pair(people.MultiHeadAttention)
    for x in numbers((2, 10, people.D)).split([6, 1, 1, 2], dim=1):
        torch.testing.assert_close(ours(x, use_cache=True), plain(x, use_cache=True), rtol=1e-10, atol=1e-11)
    assert scratch.counts() == (4, {})
