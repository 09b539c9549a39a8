"""A pool of ranks: processes that start once and run many calls, on the first two, three, four or all eight of them."""

import atexit
import io
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import fresh
import torch
import torch.distributed as dist

SIZES = (1, 2, 3, 4, 8)
PATIENCE = 20
"""Seconds after which a rank that waits for another raises."""


def serve(rank: int, pipe: Connection, rendezvous: str) -> None:
    """A rank: calls ``function(group, *arguments)`` for each message, and returns its result or its traceback."""
    torch.set_num_threads(1)
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=max(SIZES), timeout=patience)
    groups = {size: dist.new_group(list(range(size)), timeout=patience) for size in SIZES}
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
    """The processes and the pipes to them."""

    def __init__(self) -> None:
        rendezvous = str(Path(tempfile.mkdtemp()) / "rendezvous")
        self.pipes, self.processes = [], []
        for rank in range(max(SIZES)):
            ours, theirs = fresh.CONTEXT.Pipe()
            process = fresh.CONTEXT.Process(target=serve, args=(rank, theirs, rendezvous), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of ``function(group, *arguments)`` on the first ranks; AssertionError with what one raised."""
        buffer = io.BytesIO()
        torch.save((size, function, arguments), buffer)
        for pipe in self.pipes[:size]:
            pipe.send_bytes(buffer.getvalue())
        replies = []
        for rank, pipe in enumerate(self.pipes[:size]):
            wait([pipe, self.processes[rank].sentinel])
            assert pipe.poll(), f"rank {rank} ended with {self.processes[rank].exitcode}"
            replies.append(torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False))
        failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(replies) if error]
        assert not failed, "\n".join(failed)
        return [result for _, result in replies]

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
