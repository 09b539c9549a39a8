"""The ranks of a call, and their agreement on its arguments before any of them waits for another's data."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.device_mesh import DeviceMesh

from pyattn.options.axes import having


class Ranks(NamedTuple):
    """A process group and this process's place in it.

    Attributes:
        group: the process group.
        size: how many ranks it has.
        own: the number of this rank.
        inner: how many ranks share a part of the sequence before it is cut among them: the size of a mesh's second
            dimension.
    """

    group: dist.ProcessGroup
    size: int
    own: int
    inner: int = 1


WORDS = 3 + 2 * len(having("q"))
"""The most words with which ranks agree: lengths, the seed, rows and columns of options by row.

All agreements send as many: gloo ends a process that gets more than it expects, as it would if ranks called different
functions.
"""

ERRORS = (TypeError, ValueError, RuntimeError)
"""Errors of one rank, NotImplementedError among them, that all ranks must hear of before they wait for its data."""

Group = dist.ProcessGroup | DeviceMesh | None
"""The ranks of a call; None: all processes."""


def ranks_of(group: Group | Ranks) -> Ranks:
    """The ranks of a process group, of a mesh of one or two dimensions, or with None of all processes."""
    if not dist.is_initialized():
        raise ValueError(
            "pyattn: torch.distributed has no process group; call torch.distributed.init_process_group first"
        )
    if isinstance(group, Ranks):
        return group
    if isinstance(group, DeviceMesh):
        groups = groups_of(group)
        inner = groups[2].size() if len(groups) > 1 else 1
        return ranks_of(groups[0])._replace(inner=inner)
    group = process_group(group)
    return Ranks(group, dist.get_world_size(group), dist.get_rank(group))


def process_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or with None that of all processes.

    Raises:
        ValueError: a group without this process, such as ``new_group`` gives to those that are not in it.
        TypeError: anything else.
    """
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0:
        return group
    if isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("pyattn: this process must be a rank of the group, got a group without it")
    raise TypeError(f"pyattn: group must be a ProcessGroup or a DeviceMesh, got {type(group).__name__}")


def groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The group of all ranks of a mesh; with two dimensions, also those of this rank's column and row."""
    if mesh.get_coordinate() is None:
        raise ValueError(f"pyattn: this process must be a rank of the mesh, got rank {dist.get_rank()} and {mesh}")
    if mesh.ndim == 1:
        return [mesh.get_group()]
    if mesh.ndim > 2 or not mesh.mesh_dim_names:
        raise ValueError(f"pyattn: group must be a mesh of one dimension, or of two that have names, got {mesh}")
    return [mesh._flatten().get_group(), *(mesh.get_group(at) for at in (0, 1))]


def gather_words(words: list[int], ranks: Ranks) -> list[list[int]]:
    """Each rank's 64-bit words."""
    device = torch.device("cuda" if dist.get_backend(ranks.group) == "nccl" else "cpu")
    mine = torch.tensor(words, dtype=torch.int64, device=device)
    found = [torch.empty_like(mine) for _ in range(ranks.size)]
    dist.all_gather(found, mine, group=ranks.group)
    rows: list[list[int]] = torch.stack(found).tolist()
    return rows


def agree(
    name: str, ranks: Ranks, facts: Mapping[str, Any], words: list[int], error: Exception | None
) -> list[list[int]]:
    """Each rank's ``words``, at most WORDS, once all ranks have the same ``facts`` and none has an error.

    Raises:
        ValueError, on every rank: facts that differ, or another rank's error. Its own error is raised as it is.
    """
    with temporarily_clear_interpreter_stack():  # a transform, which the ranks refuse, would take their messages
        return _agree(name, ranks, {"function": name, **facts}, words, error)


def _agree(
    name: str, ranks: Ranks, facts: Mapping[str, Any], words: list[int], error: Exception | None
) -> list[list[int]]:
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
    padding = [0] * (WORDS - len(words))
    rows = gather_words([int.from_bytes(digest, "little", signed=True), error is not None, *words, *padding], ranks)
    if all(row[:2] == [rows[0][0], 0] for row in rows):
        return [row[2 : 2 + len(words)] for row in rows]
    found: list[Any] = [None] * ranks.size
    dist.all_gather_object(found, (dict(facts), error and str(error)), group=ranks.group)
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(found):
        if message is not None:
            raise ValueError(f"pyattn: {name} failed on rank {rank}: {message.removeprefix('pyattn: ')}")
    first = found[0][0]
    for rank, (theirs, _) in enumerate(found):
        for fact in theirs:
            if repr(theirs[fact]) != repr(first.get(fact)):
                got = f"{first.get(fact)} on rank 0 and {theirs[fact]} on rank {rank}"
                raise ValueError(f"pyattn: {fact} must be the same on all ranks, got {got}")
    raise AssertionError("the ranks differ in no fact")


def exchange(name: str, ranks: Ranks, tensors: Sequence[Tensor], error: Exception | None = None) -> list[list[Tensor]]:
    """Each rank's tensors, which have the same shapes on all; dtypes of more bytes come first.

    Raises:
        ValueError, on every rank, if one has an error. Its own error is raised as it is.
    """
    numbers = [t.contiguous().flatten().view(torch.uint8) for t in tensors]  # bytes, because gloo knows few dtypes
    flag = torch.tensor([error is not None], dtype=torch.uint8, device=tensors[0].device)
    mine = torch.cat([*numbers, flag])
    found = [torch.empty_like(mine) for _ in range(ranks.size)]
    dist.all_gather(found, mine, group=ranks.group)
    if any(bool(part[-1]) for part in found):
        agree(name, ranks, {}, [], error)
    sizes = [len(part) for part in (*numbers, flag)]
    theirs = [
        [part.view(t.dtype).view(t.shape) for part, t in zip(parts.split(sizes), tensors, strict=False)]
        for parts in found
    ]
    theirs[ranks.own] = [*tensors]
    return theirs
