"""The code of test_failing.py's processes: small groups of ranks, in each of which one rank fails."""

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from support import fresh
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from pyattn import KVCache, distributed, ops

FAILING = 1
"""The rank that fails."""
STATUSES = {0: "no error", 1: "RuntimeError", 2: "ArithmeticError", 3: "exit", 4: "no call", -signal.SIGKILL: "kill"}


class FailingOperator(TorchDispatchMode):
    """Ends this rank when it computes with the kernel, once it has keys."""

    def __init__(self, operator: Any, end: str) -> None:
        super().__init__()
        self._operator, self._end = operator, end

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._operator and args[0].numel():
            if self._end == "raise":
                raise ArithmeticError("one rank's own")
            if self._end == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)
        return func(*args, **kwargs or {})


def call_of(name: str, patience: timedelta) -> Callable[[], torch.Tensor]:
    """A call of the function on all ranks, in groups whose operations wait so long."""
    q, k, v = (torch.randn(1, 4, 24, 8).requires_grad_() for _ in range(3))
    if name == "attention_with_cache":
        cache = KVCache(1, 4, 24, 8)
        cache.append(k.detach(), v.detach())
        return partial(distributed.attention_with_cache, q, cache, dist.new_group(timeout=patience))
    if name != "usp_attention":
        return partial(getattr(distributed, name), q, k, v, dist.new_group(timeout=patience), causal=False)
    square = torch.arange(4).view(2, 2)
    groups = {tuple(pair): dist.new_group(pair, timeout=patience) for pair in (*square.T.tolist(), *square.tolist())}
    own = [group for pair, group in groups.items() if dist.get_rank() in pair]
    mesh = DeviceMesh.from_group(own, "cpu", mesh=square, mesh_dim_names=("far", "near"))
    return partial(distributed.usp_attention, q, k, v, mesh, causal=False)


def serve(rank: int, size: int, name: str, phase: str, end: str, seconds: int, rendezvous: str) -> NoReturn:
    """A rank; its exit status says how its call ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    torch.set_num_threads(1)
    status = 4
    try:
        dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=size)
        call_of(name, timedelta(minutes=1))().sum().backward()  # takes longer than the next one
        call = call_of(name, timedelta(seconds=seconds))
        operator = ops.attention_forward if phase == "forward" else ops.attention_backward
        status = 0
        with FailingOperator(operator, end) if rank == FAILING else nullcontext():
            call().sum().backward()
    except RuntimeError:
        status = status or 1
    except ArithmeticError:
        status = 2
        signal.sigwait({signal.SIGTERM})  # its connections last longer than the others' calls
    finally:
        os._exit(status)


def outcomes(cases: Sequence[tuple[str, str]], end: str, seconds: int, folder: str, pipe: Connection) -> None:
    """Sends how the ranks of each case ended, a function and whether forward or backward fails; all run at once."""
    with FailingOperator(None, end):  # the first time imports modules, half a second in each rank
        torch.zeros(1).neg()
    fresh.collect_rarely()
    ranks = list[list[int]]()
    for number, (name, phase) in enumerate(cases):
        size, processes = 4 if name == "usp_attention" else 3, list[int]()
        for rank in range(size):
            process = os.fork()
            if process == 0:
                serve(rank, size, name, phase, end, seconds, f"{folder}/{number}")
            processes.append(process)
        ranks.append(processes)
    pipe.send([statuses_of(processes) for processes in ranks])


def statuses_of(ranks: Sequence[int]) -> list[str]:
    """How these processes ended, of which one waits for the others if it has raised."""
    found = dict[int, str]()
    for process in sorted(ranks, key=ranks[FAILING].__eq__):
        if process == ranks[FAILING]:
            os.kill(process, signal.SIGTERM)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        found[process] = STATUSES.get(status, str(status))
    return [found[process] for process in ranks]
