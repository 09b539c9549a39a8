"""The code that ranks run for tests of attention and routes: calls on parts, whose results are put together."""

import functools
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pyattn import distributed
from pyattn.distributed.ring.messages import Messages
from pyattn.distributed.ring.routes import Route
from pyattn.options.attention_options import Draws

LEARNED = ("bias", "alibi_slopes", "sinks", "relative_bias")


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks, rounded once."""
    total = tensor.to(torch.float64, copy=True)
    dist.all_reduce(total, group=group)
    return total.to(tensor.dtype)


@functools.cache
def mesh_of(name: str) -> DeviceMesh | None:
    """The mesh of all ranks that the name of a test's function names after a space: "usp_attention 2x4"."""
    _, _, sizes = name.partition(" ")
    return _mesh(*map(int, sizes.split("x"))) if sizes else None


@functools.cache
def _mesh(*sizes: int) -> DeviceMesh:
    """Made once: its ranks connect to one another, and each of its groups has a thread that often wakes up."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("far", "near"))


def dense(
    group: dist.ProcessGroup,
    name: str,
    layout: str,
    qkv: Sequence[Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    options: dict[str, Any],
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """out, lse, dq, dk, dv, and the gradients of LEARNED, of the whole, as ``helpers.run``.

    And the sums of the absolute values of those gradients of which each rank has a share.
    """
    length = qkv[0].shape[2]

    place = mesh_of(name) or group

    def part(tensor: Tensor, dim: int) -> Tensor:
        return distributed.shard(tensor, dim, place, layout=layout)

    def whole(tensor: Tensor, dim: int) -> Tensor:
        return distributed.unshard(tensor, dim, place, layout=layout)

    def by_row(name: str) -> bool:
        return name in ("mask", "bias") and options[name].dim() > 1 and options[name].shape[-2] == length > 1

    given = {key: part(value, -2) if by_row(key) else value for key, value in options.items()}
    if "key_ranges" in options and options["key_ranges"].shape[1] > 1:  # else a row for all
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
    own = dict(zip(learned, found[3:], strict=True))
    more = [whole(gradient, -2) if by_row(key) else summed(gradient, group) for key, gradient in own.items()]
    shares = {key: summed(gradient.abs(), group) for key, gradient in own.items() if not by_row(key)}
    return [*(whole(t, 2).detach() for t in (out, lse, *found[:3])), *more], shares


def of_rank_0(
    group: dist.ProcessGroup, name: str, compiles: bool, qkv: Sequence[Tensor], dout: Tensor, options: dict[str, Any]
) -> list[Tensor]:
    """out, dq, dk, dv and dbias, where rank 0 alone gives its first row of each option for all, and alone uses lse."""
    place, first = mesh_of(name) or group, dist.get_rank(group) == 0
    shard, unshard = (partial(of, group=place, layout="contiguous") for of in (distributed.shard, distributed.unshard))
    leaves = [shard(t, 2).requires_grad_() for t in qkv]
    given = {key: shard(value, 1 if key == "key_ranges" else 2) for key, value in options.items()}
    given = {key: t.narrow(1 if key == "key_ranges" else 2, 0, 1) if first else t for key, t in given.items()}
    leaves += [t.requires_grad_() for key, t in given.items() if key == "bias"]
    function = partial(getattr(distributed, name.partition(" ")[0]), layout="contiguous", return_lse=True)
    torch.compiler.reset()
    run = torch.compile(function, backend="aot_eager") if compiles else function
    out, lse = run(*leaves[:3], place, **given)
    found = torch.autograd.grad((out * shard(dout, 2)).sum() + (lse.sum() if first else 0), leaves)
    biases = [t.expand(*t.shape[:2], len(out[0, 0]), -1) / (len(out[0, 0]) if first else 1) for t in found[3:]]
    return [unshard(t.detach().contiguous(), 2) for t in (out, *found[:3], *biases)]


def max_scores(
    group: dist.ProcessGroup, name: str, layout: str, qkv: Sequence[Tensor], begins: Sequence[Tensor], sinks: Tensor
) -> list[Tensor]:
    """out, lse and max_score, of which out and lse are those without max_score, and max_score has no gradient."""
    place, dim = mesh_of(name) or group, 0 if begins else 2
    parts = [distributed.shard(t, dim, place, layout=layout).requires_grad_() for t in qkv]
    function = functools.partial(getattr(distributed, name.partition(" ")[0]), *parts, *begins, place, layout=layout)
    options = {"sinks": sinks, "causal": False, "window": (5, 0), "q_offset": -1}
    out, lse, most = function(**options, return_lse=True, return_max_score=True)
    assert not most.requires_grad
    torch.testing.assert_close(function(**options, return_lse=True), (out, lse), equal_nan=True)
    torch.testing.assert_close(function(**options, return_max_score=True), (out, most), equal_nan=True)
    dims = (0, 1) if begins else (2, 2)
    whole = [distributed.unshard(t, d, place, layout=layout) for t, d in zip((out, lse), dims, strict=True)]
    return [*(t.detach() for t in whole), most]


def strided(
    group: dist.ProcessGroup, name: str, qkv: Sequence[Tensor], begins: Sequence[Tensor], options: dict[str, Any]
) -> list[Tensor]:
    """out and the gradients of its sum, from parts in every second column of a larger tensor, heads outermost or not.

    The rank's rows of the mask lie in columns of a larger tensor, and those of key_ranges in reverse.
    """
    leaves, dim = list[Tensor](), 0 if begins else 2
    for whole in qkv:
        part = distributed.shard(whole, dim, group).transpose(-3, -2)
        wide = torch.stack([part, part + 1], -1).flatten(-2)
        leaves.append(wide[..., ::2].transpose(-3, -2).detach().requires_grad_())
    given = dict(options)
    if "mask" in options:
        rows = distributed.shard(options["mask"], -2, group)
        given["mask"] = torch.stack([rows.mT, ~rows.mT], -1)[..., 0].mT
    rows = distributed.shard(options["key_ranges"], -2, group)
    given["key_ranges"] = rows.permute(*reversed(range(rows.dim()))).contiguous().permute(*reversed(range(rows.dim())))
    out = getattr(distributed, name)(*leaves, *begins, group, **given)
    found = out, *torch.autograd.grad(out.sum(), leaves)
    return [distributed.unshard(t, dim, group).detach() for t in found]


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
    place_q, place_k = (
        {"group": group, "layout": layout} | ({"cu_seqlens": size} if layout == "zigzag_varlen" else {})
        for size in sizes
    )
    places = place_q, place_k, place_k
    given = {
        key: distributed.shard(value, 0, **place_q) if key == "key_ranges" else value for key, value in options.items()
    }
    leaves = [distributed.shard(t, 0, **place).requires_grad_() for t, place in zip(qkv, places, strict=True)]
    learned = [key for key in LEARNED if key in options]
    given |= {key: given[key].detach().clone().requires_grad_() for key in learned}
    out, lse = distributed.ring_attention_varlen(*leaves, *sizes, group, layout=layout, return_lse=True, **given)
    gradients = [distributed.shard(t, dim, **place_q) for t, dim in ((dout, 0), (dlse, 1))]
    found = torch.autograd.grad([out, lse], [*leaves, *(given[key] for key in learned)], gradients)
    results = zip((out, lse, *found[:3]), (0, 1, 0, 0, 0), (place_q, place_q, *places), strict=True)
    whole = [distributed.unshard(t, dim, **place) for t, dim, place in results]
    return [*(t.detach() for t in whole), *(summed(t, group) for t in found[3:])]


def of_larger_call(group: dist.ProcessGroup, qkv: Sequence[Tensor], first: int, head: int, seed: int) -> Tensor:
    """out for the sequences from ``first`` on and the heads from ``head`` on, put together again."""
    heads = qkv[0].shape[1]
    parts = [distributed.shard(t[first:, head:], 2, group) for t in qkv]
    draws = Draws(torch.tensor(seed), torch.tensor([[first, heads, head, 0, 0]]))
    out = distributed.ring_attention(*parts, group, dropout_p=0.4, dropout_seed=draws)
    assert isinstance(out, Tensor)
    return distributed.unshard(out, 2, group)


def round_trip(
    group: dist.ProcessGroup, layout: str, whole: Tensor, dim: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The parts put together again, and the gradient of a part under the sum of the ranks' losses."""
    part = distributed.shard(whole, dim, group, layout=layout, cu_seqlens=cu_seqlens).requires_grad_()
    again = distributed.unshard(part, dim, group, layout=layout, cu_seqlens=cu_seqlens)
    factor = dist.get_rank(group) + 1.0
    (gradient,) = torch.autograd.grad((again * factor).sum(), part)
    return again.detach(), gradient


def most_buffers(group: dist.ProcessGroup) -> int:
    """The largest number of buffers for chunks and their gradients that a rank has at once, forward and backward."""
    alive, numbers, most, buffer = weakref.WeakValueDictionary[int, Tensor](), count(), 0, Messages.buffer

    def counted(self: Messages, route: Route, dtype: torch.dtype) -> Tensor:
        nonlocal most
        alive[next(numbers)] = found = buffer(self, route, dtype)
        most = max(most, len(alive))
        return found

    with mock.patch.object(Messages, "buffer", counted):
        q, k, v = (torch.randn(1, 1, 64, 8, requires_grad=True) for _ in range(3))
        distributed.ring_attention(q, k, v, group).sum().backward()
    return most
