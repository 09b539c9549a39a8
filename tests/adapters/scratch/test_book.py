"""The book's classes of chapters 3 and 4, in plain PyTorch, converted: the rows of the page that name them."""

import copy

import pytest
import torch
from support.modules import ARGUMENTS, D_IN, class_of

from pyattn import reference
from pyattn.adapters import scratch

CLASSES = {name: given for name, given in ARGUMENTS.items() if name != "SingleHeadSelfAttention"} | {
    "MultiHeadAttentionWithDSA": (D_IN, 8, 0.0, 2)
}
OF_ONE_SEQUENCE = ("SimplifiedSelfAttention", "SelfAttention_v1", "SelfAttention_v2")
OF_TWO_HEADS = ("MultiHeadAttentionWrapper", "Ch03_MHA_Wrapper")
CACHED = ("MultiHeadAttention", "GroupedQueryAttention", "book.MultiHeadLatentAttention", "MultiHeadAttentionWithSWA")


def pair(name):
    """A plain module and a converted copy of it."""
    torch.manual_seed(0)
    module = class_of(name, reference)(*CLASSES[name]).double()
    return module, scratch.convert(copy.deepcopy(module))


def step(module, x):
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = module(x)
    out.sin().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", CLASSES)
def test_steps(name):
    plain, ours = pair(name)
    x = torch.randn(2, 9, D_IN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = x[0] if name in OF_ONE_SEQUENCE else x
    for _ in range(2):
        torch.testing.assert_close(step(ours, x), step(plain, x), rtol=1e-10, atol=1e-11)
    assert scratch.counts() == (2 * (1 + (name in OF_TWO_HEADS)), {})


@pytest.mark.parametrize("name", CACHED)
@torch.no_grad()
def test_caches(name):
    plain, ours = pair(name)
    x = torch.randn(2, 9, D_IN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for part in x.split([5, 1, 1, 2], dim=1):
        torch.testing.assert_close(ours(part, use_cache=True), plain(part, use_cache=True), rtol=1e-10, atol=1e-11)
    assert scratch.counts() == (4, {})
