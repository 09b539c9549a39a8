"""Promise: random calls, changes of what their mods read and derivatives, in any order, agree with plain formulas.

``pytest tests/adapters/flex/test_histories.py --examples 1500`` draws that many new histories for each test.
"""

from collections import Counter
from random import Random

import pytest
import torch
from support.adapters.any_scores import by_formula
from support.adapters.changes import HEADS, LENGTH, MASKS, SCORES, State, change
from support.assertions import check_examples
from support.cases import newer_compiler
from torch.nn.attention.flex_attention import noop_mask

from pyattn.adapters.flex import alibi, causal, create_block_mask, document, flex_attention, prefix_lm
from pyattn.adapters.flex.trace import trace

RAISED = "must read the same", "modified by an inplace operation"
"""Errors of backward, after changes, about mods that it calls again or that read large tensors."""


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
            may_raise = changes and (self.is_called_again or not self.copies)
            if not may_raise or not any(words in str(error) for words in RAISED):
                raise AssertionError(self.name) from error
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
