"""Keys and values repeated for groups of heads: native code reads one head a group, if it is proved that they agree."""

import copy
from collections.abc import Callable

import pytest
import torch
from support.adapters.groups import (
    SIZE,
    B,
    Counting,
    D,
    G,
    H,
    T,
    assert_same,
    attention,
    both,
    inputs,
    repeated,
    results,
)
from support.adapters.people import GroupedQueryAttention
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from pyattn.adapters import scratch

Repeat = Callable[[Tensor], Tensor]
"""(B, G, T, D) to (B, H, T, D)."""

REPEATED: dict[str, Repeat] = {
    "repeat_interleave": lambda k: k.repeat_interleave(SIZE, 1),
    "by names": lambda k: torch.repeat_interleave(k, repeats=SIZE, dim=-3),
    "transformers": lambda k: k[:, :, None].expand(B, G, SIZE, T, D).reshape(B, H, T, D),
    "Llama": lambda k: k.transpose(1, 2)[:, :, :, None].expand(B, T, G, SIZE, D).reshape(B, T, H, D).transpose(1, 2),
    "positions first": lambda k: k.transpose(1, 2).repeat_interleave(SIZE, 2).transpose(1, 2),
    "contiguous": lambda k: k.unsqueeze(2).expand(B, G, SIZE, T, D).contiguous().view(B, H, T, D),
    "flatten": lambda k: torch.flatten(k.unsqueeze(2).expand(B, G, SIZE, T, D), 1, 2),
}


def unseen(x: Tensor) -> None:
    """A change that no mode sees."""
    with torch._C.DisableTorchFunction():
        x[:, 1].mul_(2)


def in_place(x: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    change(x)
    return x


OTHERS: dict[str, Repeat] = {
    "a part of a longer one": lambda k: torch.cat([k, k], 2).repeat_interleave(SIZE, 1)[:, :, 1 : T + 1],
    "tiles": lambda k: k.repeat(1, SIZE, 1, 1),
    "halves": lambda k: k.repeat_interleave(SIZE, 1).roll(1, 1),
    "other heads": lambda k: k.repeat_interleave(SIZE, 1)[:, torch.arange(H).flip(0)],
    "counts": lambda k: k.repeat_interleave(torch.tensor([2, 4]), 1),
    "of one number": lambda k: k.repeat_interleave(SIZE, 1) * 1,
    "the first heads left out": lambda k: torch.cat([k, k], 1).repeat_interleave(SIZE, 1)[:, 1 : H + 1],
    "every second head": lambda k: k.repeat_interleave(2 * SIZE, 1)[:, ::2],
    "of columns": lambda k: k[..., :2].repeat_interleave(2, 3).repeat(1, SIZE, 1, 1),
    "of positions": lambda k: k[:, :1].expand(B, H, T, D).clone().repeat_interleave(2, 2)[:, :, :T],
    "changed": lambda k: in_place(k.repeat_interleave(SIZE, 1), lambda x: x[:, 1].mul_(2)),
    "changed unseen": lambda k: in_place(k.repeat_interleave(SIZE, 1), unseen),
    "changed by data": lambda k: in_place(k.repeat_interleave(SIZE, 1), lambda x: x.data[:, 1].mul_(2)),
    "changed by name": lambda k: in_place(k.repeat_interleave(SIZE, 1), lambda x: torch.relu_(input=x.data)),
}
"""Whatever is not proved to be the same for a group of heads."""


@pytest.fixture
def count(monkeypatch):
    return Counting(monkeypatch)


def folded(q, k, v):
    q, k, v = (x.reshape(-1, T, D) for x in (q, k, v))
    return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)


@pytest.mark.parametrize("code", [attention, folded])
@pytest.mark.parametrize("name", REPEATED)
def test_taken_back(name, code, count):
    assert_same(*both(results, REPEATED[name], code))
    copied = code is folded and name in ("Llama", "positions first")
    assert (count.taken, count.whole) == (int(not copied), 0)
    assert scratch.counts() == (1, {})


@pytest.mark.parametrize("name", OTHERS)
def test_not_taken_back(name, count):
    assert_same(*both(results, OTHERS[name]))
    assert count.taken == 0
    assert scratch.counts() == (1, {})


def test_results_may_change_in_place(count):
    assert_same(*both(results, REPEATED["transformers"], lambda q, k, v: attention(q, k, v).mul_(2).add_(q)))
    assert_same(*both(results, OTHERS["tiles"], lambda q, k, v: attention(q, k, v).mul_(2).add_(q)))
    assert count.taken == 1


class Model(nn.Module):
    """Grouped heads, twice, perhaps recomputed in backward."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GroupedQueryAttention() for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            attend = lambda x, layer=layer: x + layer(x)[0]  # noqa: E731
            x = attend(x) if self.reentrant is None else checkpoint(attend, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_modules(reentrant, count):
    torch.manual_seed(0)
    plain = Model(reentrant).double()
    ours = scratch.convert(copy.deepcopy(plain))
    x = torch.randn(2, 8, 24, dtype=torch.float64).requires_grad_()
    for n in range(1, 4):
        steps = []
        for model in (ours, plain):
            x.grad = None
            model.zero_grad()
            out = model(x)
            out.square().sum().backward()
            steps.append([out, x.grad, *(p.grad for p in model.parameters())])
        assert_same(*steps)
        assert count.taken == (2 * n if reentrant is None else 2 * n if reentrant else 4 * n)
    assert count.whole == 0


def test_autocast(count):
    with torch.autocast("cpu", torch.bfloat16):
        ours, plain = both(results, REPEATED["transformers"], attention, torch.float32)
    torch.testing.assert_close(ours, plain, rtol=0.05, atol=0.05)
    assert (count.taken, count.whole) == (1, 0)


class Hooked(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.read = kind, []
        self.attend = Hooking(self.read)

    def forward(self, q, k, v):
        self.read.clear()
        if self.kind == "on the CPU":
            with save_on_cpu():
                return self.attend(q, k, v)
        return checkpoint(self.attend, q, k, v, use_reentrant=self.kind == "reentrant checkpoint")


class Hooking(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, q, k, v):
        made = repeated(k), repeated(v)
        for x in made:
            if x.requires_grad:
                x.register_hook(lambda g: self.read.append(g + 0))
        return attention(q, *made)


@pytest.mark.parametrize("kind", ["checkpoint", "reentrant checkpoint", "on the CPU"])
def test_hooks_where_saved_tensors_are_others(kind, count):
    def code(model):
        tensors = inputs()
        model(*tensors).square().sum().backward()
        return list(model.read), [x.grad for x in tensors]

    assert_same(code(scratch.convert(Hooked(kind))), code(Hooked(kind)))
    assert count.whole == 1


def test_nothing_outlives_backward():
    """While the loss lives: neither the tensors of a pass that skipped the keys, nor repeated ones."""
    q, k, v = inputs()
    with scratch.enabled():
        made = repeated(k), repeated(v)
        loss = attention(q * 1, *made).sum()
    memory = [StorageWeakRef(x.untyped_storage()) for x in made]
    del made
    torch.autograd.grad(loss, q)
    assert all(x.expired() for x in memory)
