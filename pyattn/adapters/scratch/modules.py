"""Recognition within a model's modules, by forward hooks: torch copies and pickles them, and calls them after errors.

The first forward of a converted model runs under one mode. Afterwards the mode is entered only in the modules that hold
an attention: the innermost one in which queries meet keys and weights meet values, and which drops the weights. All
other modules that took part lose their hooks and cost nothing, unless a checkpoint will run them again.
"""

import sys
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from pyattn.adapters.scratch import checkpoints, compiling
from pyattn.adapters.scratch.recognition import Recognition, is_on, running, untouched
from pyattn.adapters.scratch.recording.session import Session

_holding: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Modules that were found to hold an attention. Others with hooks have not run yet."""

_small: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
"""The largest inputs, in numbers, for which all products of such a module had too few scores to be recorded."""


class _Visit:
    """A converted module whose forward is running in ``frame``; ``mode`` if it was entered for this module."""

    __slots__ = ("frame", "mode", "module", "session", "size")

    def __init__(
        self, module: nn.Module, size: int, session: Session, mode: Recognition | None, frame: FrameType
    ) -> None:
        self.module = module
        self.size = size
        self.session = session
        self.mode = mode
        self.frame = frame

    @property
    def interrupted(self) -> bool:
        """Whether the forward has ended without hooks: torch calls them after errors, not after KeyboardInterrupt."""
        try:
            self.frame.clear()
        except RuntimeError:  # it runs
            return False
        return True


def add_hooks(model: nn.Module) -> None:
    """Adds the hooks to every module whose code is not torch's."""
    for module in model.modules():
        if not type(module).__module__.startswith("torch.nn."):
            module.register_forward_pre_hook(_before, prepend=True, with_kwargs=True)
            module.register_forward_hook(_after, always_call=True)


def remove_hooks(module: nn.Module) -> None:
    """Removes the hooks of ``module``, also those that a copy has from its original."""
    for hooks, ours in ((module._forward_pre_hooks, _before), (module._forward_hooks, _after)):
        for key in [key for key, hook in list(hooks.items()) if hook is ours]:  # another thread may remove them as well
            hooks.pop(key, None)
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)
    _holding.discard(module)
    _small.pop(module, None)


def _size(*inputs: Iterable[object]) -> int:
    return sum(x.numel() for given in inputs for x in given if isinstance(x, torch.Tensor))


def _before(module: nn.Module, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_dynamo_compiling():
        compiling.begin(__name__)
        return
    if untouched():
        return
    while running.visits and running.visits[-1].interrupted:
        _end(running.visits.pop())
    size = _size(args, kwargs.values()) or _size(tree_iter((args, kwargs)))  # walking a tree takes 20 us
    if running.sessions and is_on():
        session, mode = running.sessions[-1], None
    elif size <= _small.get(module, -1):
        return
    else:
        session = Session(learning=module not in _holding)
        mode = Recognition(session, sys._getframe(1))
        mode.__enter__()
    session.modules.append(module)
    running.visits.append(_Visit(module, size, session, mode, sys._getframe(1)))


def _after(module: nn.Module, args: Any, out: Any) -> None:
    compiling.end(__name__)
    if untouched() or not running.visits or running.visits[-1].module is not module:
        return
    visit = running.visits.pop()
    if visit.session.learning:
        visit.session.visited.add(module)
        visit.session.narrow(module)
        if visit.mode is not None and sys.exc_info()[0] is None and not checkpoints.may_run_again(sys._getframe(1)):
            _learn(visit.session)
    _end(visit)


def _end(visit: _Visit) -> None:
    visit.session.modules.pop()
    if visit.mode is not None:
        visit.mode.__exit__(None, None, None)
        visit.session.end(read=not checkpoints.stopping())
        if visit.session.few and not visit.session.recorded and visit.module in _holding:
            _small[visit.module] = max(visit.size, _small.get(visit.module, -1))


def _learn(session: Session) -> None:
    holders = session.holders()
    for module in session.visited:
        if module in holders:
            _holding.add(module)
        else:
            remove_hooks(module)
