"""Attention over several ranks: ``pyattn bench --only distributed``, beside one process with as many threads as ranks.

A rank is a process of one thread, with gloo on this machine. torch's own ring takes no tensors of a CPU, so the other
side is what one writes in plain torch: an all-gather of k and v, and SDPA of the rank's rows with a mask.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import pyattn
from pyattn.cli.bench.processes import team_of
from pyattn.cli.bench.sides.calls import Calls, Run, Side
from pyattn.cli.bench.sides.contenders import sdpa
from pyattn.cli.bench.table import Call
from pyattn.cli.options import DTYPES
from pyattn.cli.timing import peak_memory
from pyattn.distributed.attention import ring_attention

HEADS, HEAD_DIM = 4, 64
LONGEST_GATHERED = 8192
"""Positions beyond which the all-gather is left out: SDPA on CPUs makes its mask a float matrix, 2 GB at 32,768."""

BASE = "pyattn attention, one process"
GATHERED = "torch all-gather and sdpa"


def flops(seqlen: int) -> int:
    """Floating-point operations of a forward on all ranks together."""
    return 2 * HEADS * HEAD_DIM * seqlen * (seqlen + 1)


class _Gather(torch.autograd.Function):
    """(B, H, S / ranks, D) -> (B, H, S, D) of contiguous parts; the gradient is the rank's part of the ranks' sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), 2)[dist.get_rank()]


def gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of this rank's rows over all keys; contiguous parts of one length."""
    k, v = (_Gather.apply(t) for t in (k, v))  # type: ignore[no-untyped-call]
    first = q.shape[2] * dist.get_rank()
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(first)
    return sdpa(q, k, v, seen)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "pyattn ring_attention": ring_attention,
    GATHERED: gathered,
}


@cache
def _side(name: str, seqlen: int, dtype: str) -> Side:
    """A side's part on this rank."""
    shape = 1, HEADS, seqlen // dist.get_world_size(), HEAD_DIM
    *qkv, dout = (torch.randn(shape, dtype=DTYPES[dtype], requires_grad=True) for _ in range(4))
    return Side(FUNCTIONS[name], qkv, dout.detach())


@torch.no_grad()
def _forward(*side: Any) -> None:
    _side(*side).forward()


def _gradients(*side: Any) -> None:
    _side(*side).gradients()


def _peak(*side: Any) -> int | None:
    return peak_memory(_side(*side).gradients)


class Sides(NamedTuple):
    """By side: forward, forward and backward, and the peak memory of the latter on the rank that needs most."""

    forwards: dict[str, Call]
    trainings: dict[str, Call]
    peak_bytes: dict[str, int | None]


def sides(seqlen: int, dtype: str, ranks: int) -> Sides:
    """The sides at ``seqlen`` positions in all."""
    team = team_of(ranks)
    *qkv, dout = (torch.randn(1, HEADS, seqlen, HEAD_DIM, dtype=DTYPES[dtype], requires_grad=True) for _ in range(4))
    alone = Side(pyattn.attention, qkv, dout.detach())
    found = Sides({BASE: alone.forward}, {BASE: alone.gradients}, {})
    for name in FUNCTIONS:
        if name != GATHERED or seqlen <= LONGEST_GATHERED:
            side = name, seqlen, dtype
            found.forwards[name] = partial(team.run, _forward, *side)
            found.trainings[name] = partial(team.run, _gradients, *side)
            found.peak_bytes[name] = max(team.run(_peak, *side), key=lambda size: size or 0)
    return found


def calls(run: Run, seqlens: tuple[int]) -> Calls:
    """Attention over as many ranks as there are threads, at the given length of the whole sequence."""

    found = sides(seqlens[0], run.dtype, torch.get_num_threads())
    return Calls(found.forwards, found.trainings, flops(seqlens[0]), found.peak_bytes)
