"""mods that read a state, and every way in which torch lets that state change."""

from random import Random

import numpy
import torch

LENGTH, HEADS = 24, 2


class State(torch.nn.Module):
    """The state that the mods below read."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(draw.getrandbits(32))
        self.array = numpy.zeros(LENGTH, dtype=numpy.int64)
        self.ids = torch.from_numpy(self.array) if draw.random() < 0.5 else torch.zeros(LENGTH, dtype=torch.int64)
        self.register_buffer("step", torch.tensor(1))
        self.register_buffer("pairs", torch.zeros(LENGTH, LENGTH, dtype=torch.bool))
        self.weights = torch.nn.Parameter(torch.zeros(LENGTH, dtype=torch.float64), draw.random() < 0.5)
        self.slopes = torch.nn.Parameter(torch.zeros(HEADS, dtype=torch.float64), draw.random() < 0.5)
        self.numbers = [5, 0.5]
        with torch.no_grad():
            for name in ("ids", "pairs", "weights", "slopes"):
                getattr(self, name).copy_(self.drawn(name, generator))

    def drawn(self, name: str, generator: torch.Generator) -> torch.Tensor:
        """New values for a tensor."""
        x = getattr(self, name)
        if x.is_floating_point():
            return torch.randn(x.shape, dtype=x.dtype, generator=generator)
        return torch.randint(2 if x.dtype == torch.bool else 4, x.shape, generator=generator).to(x.dtype)

    def documents(self, b, h, q_idx, kv_idx):
        return (self.ids[q_idx] == self.ids[kv_idx]) | (q_idx == kv_idx)

    def documents_of_an_array(self, b, h, q_idx, kv_idx):
        ids = torch.as_tensor(self.array)
        return (ids[q_idx] == ids[kv_idx]) | (q_idx == kv_idx)

    def dilated(self, b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() % (self.step + 1) == 0

    def near(self, b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= self.numbers[0]

    def listed(self, b, h, q_idx, kv_idx):
        return self.pairs[q_idx, kv_idx] | (q_idx == kv_idx)

    def in_place(self, b, h, q_idx, kv_idx):
        return (self.ids[q_idx] == self.ids[kv_idx]).clone().logical_or_(q_idx - kv_idx == self.step)

    def masked(self, mask_mod, score_mod):
        return lambda score, *places: torch.where(mask_mod(*places), score_mod(score, *places), -torch.inf)

    def table(self, score, b, h, q_idx, kv_idx):
        return score + self.weights[kv_idx] * self.numbers[1]

    def gated(self, score, b, h, q_idx, kv_idx):
        return score * self.weights[q_idx] + score.square() * self.numbers[1] / 9

    def gated_in_place(self, score, b, h, q_idx, kv_idx):
        return score.clone().mul_(self.weights[q_idx])


MASKS = ("documents", "documents_of_an_array", "dilated", "near", "listed", "in_place")
SCORES = ("table", "gated", "gated_in_place")


def _in_place(change):
    """A change under no_grad, as an optimizer makes it."""

    def changed(state, name, new):
        with torch.no_grad():
            change(getattr(state, name), new)

    return changed


def _of_data(state, name, new):
    getattr(state, name).data = new.clone()


def _refuse_learned(x):
    if x.requires_grad:
        raise RuntimeError("torch then loses the gradients of calls before")


def _set(state, name, new):
    _refuse_learned(getattr(state, name))
    getattr(state, name).set_(new.clone())


def _swapped(state, name, new):
    x = getattr(state, name)
    _refuse_learned(x)
    torch.utils.swap_tensors(x, torch.nn.Parameter(new, False) if isinstance(x, torch.nn.Parameter) else new)


def _rebound(state, name, new):
    x = getattr(state, name)
    setattr(state, name, torch.nn.Parameter(new, x.requires_grad) if isinstance(x, torch.nn.Parameter) else new)


COUNTED = {
    "copy_": _in_place(lambda x, new: x.copy_(new)),
    "index_put_": _in_place(lambda x, new: x.index_put_((torch.arange(len(new)),), new) if new.dim() else x.copy_(new)),
    "a view": _in_place(lambda x, new: x.view(-1)[-5:].copy_(new.view(-1)[-5:])),
    "set_": _set,
    "resize_": _in_place(lambda x, new: x.resize_(0).resize_(new.shape).copy_(new)),
}
"""Changes in place that torch counts."""

UNCOUNTED = {
    "data": _in_place(lambda x, new: x.data.copy_(new)),
    "numpy": lambda state, name, new: numpy.copyto(getattr(state, name).detach().numpy(), new.numpy()),
    "dlpack": _in_place(lambda x, new: torch.from_dlpack(x.detach().numpy()).copy_(new)),
    "a storage": _in_place(lambda x, new: x.untyped_storage().copy_(new.clone().untyped_storage())),
    "shared memory": _in_place(lambda x, new: x.share_memory_().data.copy_(new)),
    "data of another": _of_data,
    "swap_tensors": _swapped,
    "another tensor": _rebound,
}


def change(state, draw):
    """Changes something; returns whether torch counts it."""
    what = draw.choice(("ids", "ids", "step", "pairs", "weights", "weights", "slopes", "array", "numbers"))
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    if what == "array":
        state.array[:] = state.drawn("ids", generator).numpy()
    elif what == "numbers":
        state.numbers[:] = draw.randint(0, 9), draw.uniform(-1, 1)
    else:
        new, ways = state.drawn(what, generator), COUNTED | UNCOUNTED
        way = draw.choice(list(ways))
        try:
            ways[way](state, what, new)
        except RuntimeError:  # a tensor that NumPy owns is not resized, one in use not swapped
            UNCOUNTED["data"](state, what, new)
            way = "data"
        return way in COUNTED
    return False
