"""The processes that torchrun, or another launcher, started for one training: their places, their errors, restarts."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout

import torch
import torch.distributed as dist

from pyattn.cli import InputError
from pyattn.cli.train.one_process import AXES

RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
"""How often torchrun has started these processes again, because one of them ended."""


def _begun() -> bool:
    """Whether this process already has a process group, as in a worker of Ray Train."""
    return dist.is_available() and dist.is_initialized()


def launched() -> bool:
    """Whether a launcher started this process, alone or with others."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys() or _begun()


def may_restart() -> bool:
    """Whether torchrun starts the processes again if one ends."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def rank() -> int:
    """The number of this process, which a launcher started."""
    return dist.get_rank() if _begun() else int(os.environ["RANK"])


def _check(sizes: Sequence[int], device: str) -> None:
    """Raise InputError, on every rank and before any waits for another, if the launch does not fit the options."""
    world = dist.get_world_size() if _begun() else int(os.environ["WORLD_SIZE"]) if launched() else 1
    product = torch.Size(sizes).numel()
    if product != world:
        names = ", ".join(f"--{axis}-parallel" for axis in AXES)
        got = f"{' x '.join(map(str, sizes))} = {product} and {world}"
        raise InputError(f"{names} must multiply to the number of ranks that torchrun starts", got)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device == "cuda" and here > torch.cuda.device_count():
        raise InputError("--device cuda needs a GPU for each rank", f"{here} ranks and {torch.cuda.device_count()}")


@contextmanager
def group(sizes: Sequence[int], device: str) -> Iterator[None]:
    """Joins the processes that a launcher started, of ``sizes`` along each axis, unless they are joined already."""
    _check(sizes, device)
    if not launched() or _begun():
        yield
        return
    from torch.distributed.rendezvous import rendezvous  # not in every build of torch

    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store, own, world = next(rendezvous("env://"))
    # Under --max-restarts, torchrun keeps the store, in which gloo would find the addresses of ranks that have ended.
    store = dist.distributed_c10d.PrefixStore(f"pyattn/{RESTARTS}", store)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=own, world_size=world)
    yield
    dist.destroy_process_group()  # not after an error, which is told through the group's store


TRAININGS = itertools.count()
"""Numbers the trainings of a process group, which may have several."""


def _speaks(training: int) -> bool:
    """Whether no other rank has told an error of this training yet: one tells it for all."""
    if not _begun():
        return rank() == 0  # an error in the options, which all ranks find
    try:
        return bool(dist.distributed_c10d._get_default_store().add(f"pyattn/errors/{training}", 1) == 1)
    except RuntimeError:  # its host has ended
        return True


def _lost(error: RuntimeError) -> bool:
    """Whether the error is that another rank ended while this one waited for it."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def rank0_prints(work: Callable[[], int]) -> int:
    """The exit code of ``work``, which all ranks run: the first prints, and an error is printed once.

    The rank that fails tells its error before it ends. Ranks that wait for it then fail as well, and keep silent.
    """
    if not launched():
        return work()
    training = next(TRAININGS)
    with ExitStack() as quiet:
        if rank():
            nowhere = quiet.enter_context(open(os.devnull, "w"))
            quiet.enter_context(redirect_stdout(nowhere))
            quiet.enter_context(redirect_stderr(nowhere))
        try:
            return work()
        except Exception as error:
            if not _speaks(training):
                return 2
            if isinstance(error, RuntimeError) and _lost(error):
                raise InputError("each rank must live until the training ends", "one that ended before") from error
            raise
