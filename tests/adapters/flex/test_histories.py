"""Promise: a mod's state may change at any time and in any way; each call and its derivatives see it as the call did.

``pytest tests/adapters/flex/test_histories.py --examples 5000`` draws that many new histories for each test.
"""

from collections import Counter
from random import Random

import numpy
import pytest
import torch
from adapters.flex.any_scores import by_formula
from assertions import check_examples
from helpers import newer_compiler
from torch.nn.attention.flex_attention import noop_mask

from pyattn.adapters.flex import alibi, causal, create_block_mask, document, flex_attention, prefix_lm, trace

LENGTH, HEADS = 24, 2


class State(torch.nn.Module):
    """What the mods below read."""

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
    """A change under no_grad, as of an optimizer, of the whole tensor or of its second half."""

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


class History:
    """Calls, changes and derivatives, in any order.

    Attributes:
        waiting: the results of calls, with the gradients that their backward is to give.
        seen: how often each outcome occurred.
    """

    def __init__(self, draw: Random, seen: Counter, copies: bool) -> None:
        self.draw, self.seen, self.copies = draw, seen, copies
        self.state = state = State(draw)
        self.waiting = []
        mask = draw.choice((*MASKS, None, "native"))
        self.mask_mod = noop_mask if mask is None else None if mask == "native" else getattr(state, mask)
        if mask == "native":
            self.mask_mod = draw.choice((causal, prefix_lm, lambda x: document(state.ids)))(state.step)
        self.block_mask = create_block_mask(noop_mask, None, None, LENGTH, LENGTH, "cpu", separate_full_blocks=False)
        if mask is not None:
            made = create_block_mask(self.mask_mod, None, None, LENGTH, LENGTH, "cpu", separate_full_blocks=False)
            covers = bool(made.kv_num_blocks.all())  # one block of all pairs
            self.block_mask = made if covers else self.block_mask
            self.block_mask.mask_mod = self.mask_mod
        score = draw.choice((*SCORES, None, "alibi"))
        self.score_mod = None if score is None else alibi(state.slopes) if score == "alibi" else getattr(state, score)
        if score in SCORES and draw.random() < 0.6:
            hidden = draw.choice(MASKS)
            mask = (mask, hidden)
            self.score_mod = state.masked(getattr(state, hidden), self.score_mod)
        self.is_called_again = "in_place" in str((mask, score))
        self.reads_array = "array" in str(mask)
        self.of_own = score in SCORES
        self.name = f"mask {mask}, score {score}"

    def tensors(self):
        generator = torch.Generator().manual_seed(self.draw.getrandbits(32))
        return [torch.randn(1, HEADS, LENGTH, 4, dtype=torch.float64, generator=generator) for _ in range(4)]

    def attend(self, q, k, v):
        return flex_attention(q, k, v, self.score_mod, self.block_mask)

    def formula(self, q, k, v):
        return by_formula(q, k, v, self.score_mod or (lambda score, *_: score), self.mask_mod)[0]

    def leaves(self, tensors):
        return [*(x.requires_grad_() for x in tensors), *(x for x in self.state.parameters() if x.requires_grad)]

    def call(self, function=None, second=False, before=lambda: None, after=lambda: None):
        """Compares a call, and computes at once what its derivatives are to be."""
        *tensors, dout = self.tensors()
        leaves = self.leaves(tensors)
        before()
        truth = self.formula(*tensors)
        wanted = torch.autograd.grad(truth, leaves, dout, create_graph=second, allow_unused=True)
        seconds = self.differentiated(wanted, leaves, dout) if second else None
        after()
        out = (function or self.attend)(*tensors)
        torch.testing.assert_close(out, truth, rtol=1e-9, atol=1e-9, msg=lambda m: f"out of {self.name}: {m}")
        self.waiting.append([out, leaves, dout, wanted, seconds, set()])

    def differentiated(self, gradients, leaves, dout):
        loss = sum((dx * dx.detach().cos()).sum() for dx in gradients if dx is not None and dx.requires_grad)
        return torch.autograd.grad(loss, leaves, allow_unused=True)

    def change(self):
        counted = change(self.state, self.draw)
        for _, _, _, _, _, changes in self.waiting:
            changes.add(counted)
        return counted

    def backward(self):
        """The derivatives of a call that waits, any of them; a second backward of one, if it was asked for."""
        if not self.waiting:
            return
        out, leaves, dout, wanted, seconds, changes = self.waiting.pop(self.draw.randrange(len(self.waiting)))
        try:
            found = torch.autograd.grad(out, leaves, dout, create_graph=seconds is not None, allow_unused=True)
            again = None
            if seconds is not None:
                if self.draw.random() < 0.5:
                    changes.add(self.change())
                again = self.differentiated(found, leaves, dout)
        except RuntimeError as error:
            assert changes and (self.is_called_again or not self.copies), (self.name, error)
            assert "must read the same" in str(error) or "modified by an inplace operation" in str(error)
            self.seen["raised"] += 1
            return
        if not self.copies and (False in changes or self.reads_array):
            return  # torch, too, reads its large tensors as they are
        for mine, other in zip((*found, *(again or ())), (*wanted, *(seconds or ())), strict=True):
            mine, other = (torch.zeros(()) if x is None else x for x in (mine, other))
            mine, other = torch.broadcast_tensors(mine, other)
            torch.testing.assert_close(
                mine, other, rtol=1e-8, atol=1e-8, check_dtype=False, msg=lambda m: f"gradient of {self.name}: {m}"
            )
        self.seen["after changes" if changes else "at once"] += 1


@pytest.mark.parametrize("copies", [True, False], ids=["copied", "large"])
def test_histories(request, monkeypatch, copies):
    """Eager calls; ``large``: no tensor is small enough to be copied."""
    if not copies:
        monkeypatch.setattr(trace, "MOST_BYTES", 0)
    seen = Counter()

    def check(draw):
        history = History(draw, seen, copies)
        for _ in range(8):
            step = draw.choice(("call", "call", "second", "change", "change", "backward", "checkpoint"))
            if step == "call":
                history.call()
            elif step == "second":
                history.call(second=history.of_own)
            elif step == "checkpoint":
                attend = history.attend
                history.call(lambda *x: torch.utils.checkpoint.checkpoint(attend, *x, use_reentrant=False))  # noqa: B023
                out, leaves, dout, *_ = history.waiting[-1]
                history.waiting, others = history.waiting[-1:], history.waiting[:-1]
                history.backward()  # checkpoint computes the call again
                history.waiting = others
            else:
                getattr(history, step)()
        while history.waiting:
            history.backward()

    check_examples(request, 120, check)
    print(dict(seen))
    assert min(seen["after changes"], seen["at once"]) > 0


@newer_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
def test_histories_of_graphs(request):
    """Two graphs, one of which changes the state, between eager calls."""
    seen = Counter()

    def check(draw):
        torch.compiler.reset()
        history = History(draw, seen, True)
        state = history.state

        def changing(q, k, v):
            out = flex_attention(q, k, v, history.score_mod, history.block_mask)
            state.ids.add_(1)
            state.ids[:7].add_(1)
            state.step.copy_(2)
            return out

        def changed(q, k, v):
            state.step.fill_(3)
            state.ids[3:9].fill_(7)
            return flex_attention(q, k, v, history.score_mod, history.block_mask)

        def change_first():
            nonlocal before
            before = [x.clone() for x in (state.ids, state.step)]
            state.step.fill_(3)
            state.ids[3:9].fill_(7)

        def change_back():
            state.ids.copy_(before[0])
            state.step.copy_(before[1])

        before, own = [], (id(state.ids), id(state.step))
        graphs = [torch.compile(f, backend=draw.choice(("eager", "aot_eager"))) for f in (changing, changed)]
        for _ in range(6):
            step = draw.choice(("call", "changing", "changed", "change", "backward"))
            if step == "changed" and (history.reads_array or own != (id(state.ids), id(state.step))):
                step = "changing"  # graphs write at their end to what the BlockMask did not read when it was made
            try:
                if step == "changing":
                    history.call(graphs[0])
                elif step == "changed":
                    history.call(graphs[1], before=change_first, after=change_back)
                else:
                    getattr(history, step)()
            except RuntimeError as error:
                if "at most as many intervals" not in str(error):
                    raise
                seen["refused"] += 1
                break
            if step in ("changing", "changed"):
                for _, _, _, _, _, changes in history.waiting:
                    changes.add(True)
        while history.waiting:
            history.backward()

    check_examples(request, 8, check)
    print(dict(seen))
