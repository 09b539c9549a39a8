"""The code that ranks run for test_attention.py: a call on parts, whose results are put together again."""

import functools
import os
import signal
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pyattn import distributed
from pyattn.distributed.shares import Dense
from pyattn.distributed.stream import Stream
from pyattn.distributed.trips import Trip
from pyattn.dropout import Draws

LEARNED = ("bias", "alibi_slopes", "sinks", "relative_bias")


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks, rounded once."""
    total = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
    dist.all_reduce(total, group=group)
    return total.to(tensor.dtype)


@functools.cache
def mesh_of(name: str) -> DeviceMesh | None:
    """The mesh of all ranks that the name of a test's function names after a space: "usp_attention 2x4"."""
    _, _, sizes = name.partition(" ")
    return init_device_mesh("cpu", tuple(map(int, sizes.split("x"))), mesh_dim_names=("far", "near")) if sizes else None


def dense(
    group: dist.ProcessGroup,
    name: str,
    layout: str,
    qkv: Sequence[Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    options: dict[str, Any],
) -> list[Tensor]:
    """out, lse, dq, dk, dv, and the gradients of bias, slopes and sinks, of the whole, as ``helpers.run``."""
    length = qkv[0].shape[2]

    place = mesh_of(name) or group

    def part(tensor: Tensor, dim: int) -> Tensor:
        return distributed.shard(tensor, dim, place, layout=layout)

    def whole(tensor: Tensor, dim: int) -> Tensor:
        return distributed.unshard(tensor, dim, place, layout=layout)

    def by_row(name: str) -> bool:
        return name in ("mask", "bias") and options[name].dim() > 1 and options[name].shape[-2] == length > 1

    given = {key: part(value, -2) if by_row(key) else value for key, value in options.items()}
    if "key_ranges" in options:
        given["key_ranges"] = part(options["key_ranges"], 1)
    leaves = [part(t, 2).requires_grad_() for t in qkv]
    learned = [key for key in LEARNED if key in options]
    given |= {key: given[key].detach().clone().requires_grad_() for key in learned}
    function = getattr(distributed, name.partition(" ")[0])
    out, lse = function(*leaves, place, layout=layout, return_lse=True, **given)
    results, gradients = [out], [part(dout, 2)]
    if dlse is not None:
        results, gradients = [out, lse], [*gradients, part(dlse, 2).to(lse.dtype)]
    found = torch.autograd.grad(results, [*leaves, *(given[key] for key in learned)], gradients)
    more = [
        whole(gradient, -2) if by_row(key) else summed(gradient, group)
        for key, gradient in zip(learned, found[3:], strict=True)
    ]
    return [*(whole(t, 2).detach() for t in (out, lse, *found[:3])), *more]


def strided(group: dist.ProcessGroup, name: str, qkv: Sequence[Tensor]) -> list[Tensor]:
    """out and the gradients of its sum, from parts that lie (B, S, H, D) in every second column of a larger tensor."""
    leaves = []
    for whole in qkv:
        part = distributed.shard(whole, 2, group).transpose(1, 2)
        wide = torch.stack([part, part + 1], -1).flatten(-2)
        leaves.append(wide[..., ::2].transpose(1, 2).detach().requires_grad_())
    out = getattr(distributed, name)(*leaves, group)
    found = out, *torch.autograd.grad(out.sum(), leaves)
    return [distributed.unshard(t, 2, group).detach() for t in found]


def packed(
    group: dist.ProcessGroup,
    layout: str,
    qkv: Sequence[Tensor],
    dout: Tensor,
    dlse: Tensor,
    sizes: tuple[Tensor, Tensor],
    options: dict[str, Any],
) -> list[Tensor]:
    """The same for packed sequences."""
    given = {
        key: distributed.shard(value, 0, group, layout=layout) if key == "key_ranges" else value
        for key, value in options.items()
    }
    leaves = [distributed.shard(t, 0, group, layout=layout).requires_grad_() for t in qkv]
    learned = [key for key in LEARNED if key in options]
    given |= {key: given[key].detach().clone().requires_grad_() for key in learned}
    out, lse = distributed.ring_attention_varlen(*leaves, *sizes, group, layout=layout, return_lse=True, **given)
    gradients = [distributed.shard(t, dim, group, layout=layout) for t, dim in ((dout, 0), (dlse, 1))]
    found = torch.autograd.grad([out, lse], [*leaves, *(given[key] for key in learned)], gradients)
    dims = (0, 1, 0, 0, 0)
    whole = [distributed.unshard(t, d, group, layout=layout) for t, d in zip((out, lse, *found[:3]), dims, strict=True)]
    return [*(t.detach() for t in whole), *(summed(t, group) for t in found[3:])]


def of_larger_call(group: dist.ProcessGroup, qkv: Sequence[Tensor], first: int, head: int, seed: int) -> Tensor:
    """out for the sequences from ``first`` on and the heads from ``head`` on, put together again."""
    heads = qkv[0].shape[1]
    parts = [distributed.shard(t[first:, head:], 2, group) for t in qkv]
    draws = Draws(torch.tensor(seed), torch.tensor([[first, heads, head, 0, 0]]))
    out = distributed.ring_attention(*parts, group, dropout_p=0.4, dropout_seed=draws)
    assert isinstance(out, Tensor)
    return distributed.unshard(out, 2, group)


def refusal(group: dist.ProcessGroup, changes: dict[int, dict[str, Any]]) -> str:
    """The error of a call whose arguments some ranks change."""
    rank = dist.get_rank(group)
    arguments = {"q": torch.zeros(1, 2, 4, 8), "k": torch.zeros(1, 2, 4, 8), "v": torch.zeros(1, 2, 4, 8)}
    try:
        distributed.ring_attention(**arguments | changes.get(rank, {}), group=group)
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def packed_refusal(group: dist.ProcessGroup, qkv: Tensor, begins: Tensor, ranges: Tensor) -> str:
    """The error of key_ranges over packed sequences."""
    parts = [distributed.shard(t, 0, group, layout="contiguous") for t in (*qkv, ranges)]
    try:
        distributed.ring_attention_varlen(
            *parts[:3], begins, begins, group, layout="contiguous", causal=False, key_ranges=parts[3]
        )
    except ValueError as error:
        return str(error)
    return "no error"


def round_trip(group: dist.ProcessGroup, layout: str, whole: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The parts put together again, and the gradient of a part under the sum of the ranks' losses."""
    part = distributed.shard(whole, dim, group, layout=layout).requires_grad_()
    again = distributed.unshard(part, dim, group, layout=layout)
    factor = dist.get_rank(group) + 1.0
    (gradient,) = torch.autograd.grad((again * factor).sum(), part)
    return again.detach(), gradient


def training_step(group: dist.ProcessGroup, layout: str | None, kwargs: dict[str, Any]) -> list[Tensor]:
    """The loss and the gradients of a layer that calls torch's own function, on parts unless layout is None."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 48).double()
    x, labels, mask = torch.randn(2, 11, 16).double(), torch.randn(2, 11, 16).double(), torch.rand(11, 11) < 0.7
    buffers = [x, labels, mask]

    def loss() -> Tensor:
        q, k, v = (t.unflatten(2, (4, 4)).transpose(1, 2) for t in layer(x).chunk(3, 2))
        masked = {} if kwargs.get("is_causal") else {"attn_mask": mask}
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **kwargs, **masked)
        return (out.transpose(1, 2).flatten(2) - labels).square().sum()

    if layout is None:
        value = loss()
        return [value.detach(), *torch.autograd.grad(value, list(layer.parameters()))]
    mesh = DeviceMesh.from_group(group, "cpu")
    with distributed.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0], layout=layout):
        assert x.shape[1] < 11
        value = loss()
        found = [value.detach(), *torch.autograd.grad(value, list(layer.parameters()))]
    assert x.shape[1] == 11
    return [summed(t, group) for t in found]


def imported(_: dist.ProcessGroup) -> None:
    """Nothing; once all ranks have returned, none makes others wait for its imports."""


def interrupted(group: dist.ProcessGroup, end: str, phase: str) -> str:
    """The error of a call in which rank 1 raises, exits or is killed while the others wait for its keys."""
    q, k, v = (torch.randn(1, 2, 30, 8).requires_grad_() for _ in range(3))

    def fail(*_: Any) -> None:
        if end == "raise":
            raise ArithmeticError("one rank's own")
        if end == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        with mock.patch.object(Dense, phase, fail) if dist.get_rank(group) == 1 else nullcontext():
            distributed.ring_attention(q, k, v, group, causal=False).sum().backward()
    except (ArithmeticError, RuntimeError) as error:
        return type(error).__name__
    return "no error"


def refused_then_right(group: dist.ProcessGroup, arguments: dict[str, Any]) -> tuple[str, Tensor]:
    """The error of wrong arguments, and then the result of a right call."""
    error = refusal(group, dict.fromkeys(range(dist.get_world_size(group)), arguments))
    torch.manual_seed(0)
    parts = [distributed.shard(t, 2, group) for t in torch.randn(3, 1, 2, 12, 8)]
    return error, distributed.unshard(distributed.ring_attention(*parts, group), 2, group)


def most_buffers(group: dist.ProcessGroup) -> int:
    """The largest number of buffers for chunks and their gradients that a rank has at once, forward and backward."""
    alive, numbers, most, buffer = weakref.WeakValueDictionary[int, Tensor](), count(), 0, Stream.buffer

    def counted(self: Stream, trip: Trip, dtype: torch.dtype) -> Tensor:
        nonlocal most
        alive[next(numbers)] = found = buffer(self, trip, dtype)
        most = max(most, len(alive))
        return found

    with mock.patch.object(Stream, "buffer", counted):
        q, k, v = (torch.randn(1, 1, 64, 8, requires_grad=True) for _ in range(3))
        distributed.ring_attention(q, k, v, group).sum().backward()
    return most
