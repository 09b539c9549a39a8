"""Recognition in what ``torch.utils.checkpoint`` computes again in backward, where no mode of the forward is on.

A checkpoint compares the tensors that autograd saves, and draws dropout from the same generator: what it computes again
must meet recognition exactly if the first computation did.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._pytree import tree_map_only

from pyattn.adapters.scratch.recording.deferred import Deferred, plain
from pyattn.adapters.scratch.recording.expressions import packer

Again = Callable[[], AbstractContextManager[Any]]
"""Switches recognition on, unless it is on."""

_checkpoint = getattr(checkpoint.checkpoint, "__wrapped__", checkpoint.checkpoint).__code__
_reentrant = checkpoint.CheckpointFunction.forward.__code__


def stopping() -> bool:
    """Whether a checkpoint is ending what it computes again, since backward has all tensors that it needs."""
    return sys.exc_info()[0] is getattr(checkpoint, "_StopRecomputationError", checkpoint)


def carry(again: Again, frame: FrameType | None, module: FrameType | None, until: FrameType | None) -> bool:
    """Has all checkpoints between ``frame`` and its caller ``until``, None = the outermost, computed ``again``.

    Returns:
        Whether all that may be computed again in backward will be. A Function of somebody else may call anything again
        by itself, unless it calls ``module``, the innermost forward that switches recognition on.
    """
    if not _possible():
        return True
    within = True
    while frame is not None and frame is not until:
        code = frame.f_code
        within = within and frame is not module
        if code is _checkpoint:
            generator = frame.f_locals.get("gen")
            if generator is not None and not _replaced(_local(generator.gi_frame, "new_frame"), "recompute_fn", again):
                return False
        elif code is _reentrant:
            if not _replaced(_local(frame, "ctx"), "run_function", again):
                return False
        elif within and _is_function(frame):
            return False
        frame = frame.f_back
    return True


def may_run_again(frame: FrameType | None) -> bool:
    """Whether ``frame`` or a caller of it is in a checkpoint, or in a Function of somebody else."""
    while frame is not None and _possible():
        if frame.f_code is _checkpoint or _is_function(frame):
            return True
        frame = frame.f_back
    return False


def _possible() -> bool:
    """Whether a checkpoint may be running: it packs saved tensors, or saves none of what it will differentiate."""
    return packer() is not None or not (torch.is_grad_enabled() or torch.is_inference_mode_enabled())


def _is_function(frame: FrameType) -> bool:
    """Whether ``frame`` is the forward of a ``torch.autograd.Function``."""
    return frame.f_code.co_name == "forward" and frame.f_code.co_varnames[:1] == ("ctx",)


def _local(frame: FrameType | None, name: str) -> Any:
    return None if frame is None else frame.f_locals.get(name)


def _replaced(owner: Any, name: str, again: Again) -> bool:
    """Whether ``owner``'s function ``name`` was wrapped, now or before."""
    function = getattr(owner, name, None)
    if function is None:
        return False
    if not isinstance(function, _Again):
        setattr(owner, name, _Again(function, again))
    return True


class _Again:
    """A function that runs under recognition. Its results hold nothing deferred: their gradients are requested next."""

    def __init__(self, function: Callable[..., Any], again: Again) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.again = again

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.again():
            out = self.function(*args, **kwargs)
        return tree_map_only(Deferred, plain, out)
