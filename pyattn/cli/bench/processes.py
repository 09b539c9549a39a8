"""A team: one process for each rank, of one thread, joined by gloo."""

import pickle
import signal
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

PATIENCE = timedelta(minutes=10)
"""Time after which a rank that waits for another raises: more than a call of any benchmark takes."""


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes started within never see Ctrl-C, which a terminal sends to all: this process ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(pipe: Connection, name: str) -> None:
    """For each message, sends the result of ``function(*arguments)``, or the error of the process with that name."""
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:  # this process is no longer needed
            return
        try:
            function, *arguments = pickle.loads(message)
            pipe.send(function(*arguments))
        except Exception as error:
            pipe.send(RuntimeError(f"{name}: {type(error).__name__}: {error}"))


def _serve_rank(rank: int, ranks: int, pipe: Connection, rendezvous: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=PATIENCE)
    serve(pipe, f"rank {rank}")


def _end(processes: list[Any], folder: tempfile.TemporaryDirectory[str]) -> None:
    for process in processes:
        process.kill()
        process.join()
    folder.cleanup()


class Team:
    """The ranks and the pipes to them; its processes end with it, or with this process."""

    def __init__(self, ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # else the first start of a process does it, and unblocks SIGINT
        folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        processes: list[Any] = []
        self._finalizer: weakref.finalize[Any, Any] = weakref.finalize(self, _end, processes, folder)
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            arguments = rank, ranks, theirs, str(Path(folder.name, "rendezvous"))
            process = context.Process(target=_serve_rank, args=arguments, daemon=True)
            with without_interrupts():
                process.start()
            theirs.close()
            self._pipes.append(ours)
            processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of ``function(*arguments)``, a module's function, on all ranks.

        Raises:
            RuntimeError: the first error of a rank. The others may wait for it, so this team takes no further calls.
        """
        try:
            return self._replies(function, *arguments)
        except RuntimeError:
            team_of.cache_clear()
            self._finalizer()
            raise

    def _replies(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, *arguments))
        replies: dict[Connection, Any] = {}
        while waiting := [pipe for pipe in self._pipes if pipe not in replies]:
            ready = wait(waiting)
            for pipe in (pipe for pipe in waiting if pipe in ready):
                try:
                    reply = pipe.recv()
                except EOFError as error:
                    raise RuntimeError(f"rank {self._pipes.index(pipe)} ended") from error
                if isinstance(reply, Exception):
                    raise reply
                replies[pipe] = reply
        return [replies[pipe] for pipe in self._pipes]


@cache
def team_of(ranks: int) -> Team:
    """The team of this process with that many ranks: starting one takes seconds, to import torch."""
    return Team(ranks)
