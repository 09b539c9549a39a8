"""The code that ranks run for test_ranks.py: ``pyattn train``, cut off or disturbed as a test wants it."""

import contextlib
import io
import resource
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from pyattn.cli import chart, main, output
from pyattn.cli.train import checkpoint_shards, command

REDIRECTIONS = contextlib.redirect_stdout, contextlib.redirect_stderr


def interrupted(steps: int) -> Any:
    """Ctrl-C in the optimiser after ``steps`` steps: the step's random numbers are already drawn."""
    ahead, take_step = iter(range(steps)), torch.optim.AdamW.step

    def step(self: torch.optim.AdamW) -> Any:
        if next(ahead, None) is None:
            raise KeyboardInterrupt
        return take_step(self)

    return mock.patch.object(torch.optim.AdamW, "step", step)


def without_room(rank: int, after: int) -> Any:
    """The disk of one rank is full after that many checkpoints."""
    ahead, write = iter(range(after)), checkpoint_shards.write

    def cut(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() != rank or next(ahead, None) is not None:
            return write(*args, **kwargs)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            return write(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return mock.patch.object(checkpoint_shards, "write", cut)


def train(
    group: dist.ProcessGroup, options: list[str], disturb: Callable[..., Any] | None = None, *arguments: Any
) -> tuple[int, str, str]:
    """The exit code of ``pyattn train`` and what it prints, without the curve and with few measurements."""
    patches = {"VALIDATION_WINDOWS": 8, "COMPARED_BATCHES": 2}
    with contextlib.ExitStack() as stack:
        out, err = (stack.enter_context(redirect(io.StringIO())) for redirect in REDIRECTIONS)
        stack.enter_context(mock.patch.multiple(command, **patches))
        stack.enter_context(mock.patch.object(chart, "draw", lambda *given: output.write(given[-1], b"")))
        if disturb is not None:
            stack.enter_context(disturb(*arguments))
        own = [option.replace("{rank}", str(dist.get_rank(group))) for option in options]
        return main(["train", *own]), out.getvalue(), err.getvalue()
