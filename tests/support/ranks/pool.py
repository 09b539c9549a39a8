"""A pool of ranks: processes that start once and run many calls, on the first two, three, four or all eight of them."""

import atexit
import faulthandler
import importlib
import io
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import fresh

SIZES = (1, 2, 3, 4, 8)


def serve(rank: int, pipe: Connection, rendezvous: str, sizes: Sequence[int], seconds: int) -> None:
    """A rank: calls ``function(group, *arguments)`` for each message, and returns its result or its traceback."""
    torch.set_num_threads(1)
    patience = timedelta(seconds=seconds)
    dist.distributed_c10d.default_pg_timeout = patience  # of the groups of meshes; torch's own is half an hour
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


def fork_ranks(module: str, compiles: bool, errors: str, pipes: Sequence[Connection], *arguments: Any) -> None:
    """Forks the ranks from one process that has imported what they run; together they are a process group.

    ``errors``: the file that their standard error goes to, with the place where a signal ended one.
    """
    os.setpgrp()
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    faulthandler.enable(2)
    importlib.import_module(module)
    if compiles:  # the first graph imports the compiler: three seconds, once for all ranks
        # Without gradients, which start threads of autograd in builds of torch with CUDA: a fork then has no backward.
        torch.compile(torch.sin, backend="aot_eager")(torch.zeros(1))
        torch._dynamo.reset()
    fresh.collect_rarely()
    for rank, pipe in enumerate(pipes):
        if os.fork() == 0:
            for other in pipes[:rank] + pipes[rank + 1 :]:
                other.close()  # a pipe ends with its rank
            serve(rank, pipe, *arguments)
            os._exit(0)
    for pipe in pipes:
        pipe.close()
    for _ in pipes:
        os.wait()


class Pool:
    """The processes and the pipes to them.

    Attributes:
        sizes: how many ranks a call may have.
        seconds: after this many, a rank that waits for another raises.
        module: imported once for all ranks; it takes longer than to start them.
        compiles: whether torch's compiler is, too.
    """

    def __init__(
        self,
        sizes: Sequence[int] = SIZES,
        seconds: int = 60,
        module: str = "support.ranks.parallel",
        compiles: bool = True,
    ) -> None:
        self.arguments = module, compiles, sizes, seconds
        self.start()

    def start(self) -> None:
        """Starts the processes."""
        module, compiles, sizes, seconds = self.arguments
        folder = Path(tempfile.mkdtemp())
        self.errors = folder / "errors"
        self.pipes, theirs = zip(*(fresh.CONTEXT.Pipe() for _ in range(max(sizes))), strict=True)
        arguments = module, compiles, str(self.errors), theirs, str(folder / "rendezvous"), sizes, seconds
        self.process = fresh.CONTEXT.Process(target=fork_ranks, args=arguments, daemon=True)
        self.process.start()
        for pipe in theirs:
            pipe.close()

    def outcomes(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[tuple[str | None, Any]]:
        """The error and the result of ``function(group, *arguments)`` on each of the first ranks.

        If one has ended, the next call gets new processes: only this one fails.
        """
        buffer = io.BytesIO()
        torch.save((size, function, arguments), buffer)
        for pipe in self.pipes[:size]:
            with suppress(BrokenPipeError):
                pipe.send_bytes(buffer.getvalue())
        found: list[tuple[str | None, Any]] = []
        ended = False
        for pipe in self.pipes[:size]:
            try:
                found.append(torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False))
            except (EOFError, ConnectionError):
                ended = True
                found.append((f"ended\n{self.errors.read_text()}", None))
        if ended:
            self.close()
            self.start()
        return found

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of ``function(group, *arguments)`` on the first ranks; AssertionError with what one raised."""
        found = self.outcomes(size, function, *arguments)
        failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(found) if error]
        assert not failed, "\n".join(failed)
        return [result for _, result in found]

    def close(self) -> None:
        """Ends the processes."""
        with suppress(ProcessLookupError):  # they have ended
            os.killpg(self.process.pid, signal.SIGKILL)


@cache
def pool() -> Pool:
    """The pool of this process, started by the first test that needs it."""
    return Pool()


def close(pool: Any = pool) -> None:
    """Ends such a pool, if it has started: waiting ranks wake up a hundred times a second for each of gloo's groups."""
    if pool.cache_info().currsize:
        pool().close()
        pool.cache_clear()


atexit.register(close)
