"""A pool of ranks: processes that start once and run many calls, on the first two, three, four or all eight of them."""

import atexit
import io
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fresh
import torch
import torch.distributed as dist

SIZES = (1, 2, 3, 4, 8)


def serve(rank: int, pipe: Connection, rendezvous: str, sizes: Sequence[int], seconds: int) -> None:
    """A rank: calls ``function(group, *arguments)`` for each message, and returns its result or its traceback."""
    torch.set_num_threads(1)
    patience = timedelta(seconds=seconds)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=max(sizes), timeout=patience)
    groups = {size: dist.new_group(list(range(size)), timeout=patience) for size in sizes}
    while True:
        message = pipe.recv_bytes()
        if not message:
            break
        size, function, arguments = torch.load(io.BytesIO(message), weights_only=False)
        try:
            reply = None, function(groups[size], *arguments)
        except Exception:
            reply = traceback.format_exc(), None
        buffer = io.BytesIO()
        torch.save(reply, buffer)
        pipe.send_bytes(buffer.getvalue())


class Pool:
    """The processes and the pipes to them.

    Attributes:
        sizes: how many ranks a call may have.
        seconds: after so many, a rank that waits for another raises.
    """

    def __init__(self, sizes: Sequence[int] = SIZES, seconds: int = 60) -> None:
        rendezvous = str(Path(tempfile.mkdtemp()) / "rendezvous")
        self.pipes, self.processes = [], []
        for rank in range(max(sizes)):
            ours, theirs = fresh.CONTEXT.Pipe()
            arguments = rank, theirs, rendezvous, sizes, seconds
            process = fresh.CONTEXT.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def outcomes(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[tuple[str | None, Any]]:
        """The error and the result of ``function(group, *arguments)`` on each of the first ranks."""
        buffer = io.BytesIO()
        torch.save((size, function, arguments), buffer)
        for pipe in self.pipes[:size]:
            pipe.send_bytes(buffer.getvalue())
        found: list[tuple[str | None, Any]] = []
        for pipe in self.pipes[:size]:
            try:
                found.append(torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False))
            except EOFError:
                found.append(("ended", None))
        return found

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of ``function(group, *arguments)`` on the first ranks; AssertionError with what one raised."""
        found = self.outcomes(size, function, *arguments)
        failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(found) if error]
        assert not failed, "\n".join(failed)
        return [result for _, result in found]

    def close(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.kill()


@cache
def pool() -> Pool:
    """The pool of this process, started by the first test that needs it."""
    started = Pool()
    atexit.register(started.close)
    return started
