"""The code that ranks run for test_tensors.py: calls on whole tensors and on DTensors."""

from typing import Any

import torch
import torch.distributed as dist
from support.ranks import ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import pyattn
import pyattn.distributed

LEARNED = ("bias", "alibi_slopes", "sinks", "relative_bias")


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def results(name: str, qkv: list[Tensor], packing: tuple[Any, ...], options: dict[str, Any], seed: int) -> list[Tensor]:
    """out, lse, max_score if it is asked for, and the gradients of q, k, v and of the options that have gradients."""
    torch.manual_seed(seed)
    leaves = [t.detach().requires_grad_() for t in qkv]
    learned = {key: options[key].detach().requires_grad_() for key in LEARNED if key in options}
    out, lse, *most = getattr(pyattn, name)(*leaves, *packing, **options | learned, return_lse=True)
    loss = out.sin().sum() + lse.masked_fill(lse.isinf(), 0.0).cos().sum()
    return [out, lse, *most, *torch.autograd.grad(loss, [*leaves, *learned.values()])]


def compare(
    group: dist.ProcessGroup,
    name: str,
    places: list[tuple[int | None, int | None, int | None]],
    qkv: list[Tensor],
    packing: tuple[Any, ...],
    options: dict[str, Any],
    shards: dict[str, int],
) -> list[Any]:
    """DTensors give what whole tensors do; the placements of out.

    ``places``: for each dimension of the mesh, the dimension of q, k and v that it shards. ``shards``: the same for
    options on the first dimension of the mesh; "plain" ones are no DTensors.
    """
    mesh = DeviceMesh.from_group(group, "cpu") if len(places) == 1 else ranks.mesh_of("mesh 4x2")

    def placed(tensor: Tensor, dims: list[int | None]) -> Tensor:
        return distribute_tensor(tensor, mesh, [Replicate() if dim is None else Shard(dim) for dim in dims])

    rest = [None] * (len(places) - 1)
    sharded = [placed(t, [place[number] for place in places]) for number, t in enumerate(qkv)]
    given = {
        key: placed(value, [shards.get(key), *rest]) if isinstance(value, Tensor) and key in shards else value
        for key, value in options.items()
    }
    expected = results(name, qkv, packing, options, 3)
    found = results(name, sharded, packing, given, 3 if dist.get_rank(group) == 0 else 4)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(whole(one), other, rtol=1e-10, atol=1e-11, msg=lambda m, n=number: f"{n}: {m}")
    return [str(found[0].placements), [isinstance(t, DTensor) for t in found[:5]]]


def refusal(group: dist.ProcessGroup, name: str, places: list[int | None], options: dict[str, Any]) -> str:
    """The error of a call on DTensors of a shape among the options, the first of them sharded in these dimensions."""
    mesh = ranks.mesh_of("mesh 4x2")
    where = [Replicate() if dim is None else Shard(dim) for dim in places]
    shape, packing = ((8, 8, 8, 4), ()) if name == "attention" else ((8, 8, 4), (torch.tensor([0, 8]),) * 2 + (8, 8))
    arguments = dict(options)
    q = distribute_tensor(torch.zeros(arguments.pop("shape", shape)), mesh, where)
    arguments = {"k": q, "v": q} | arguments
    try:
        getattr(pyattn, name)(q, arguments.pop("k"), arguments.pop("v"), *packing, **arguments)
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def of_one_rank(group: dist.ProcessGroup, places: list[int | None]) -> list[tuple[str, str, str]]:
    """The last rank's value, the error of the call, and what was wrong with the next one, "" if nothing."""
    mesh = DeviceMesh.from_group(group, "cpu") if len(places) == 1 else ranks.mesh_of("mesh 4x2")
    where = [Replicate() if dim is None else Shard(dim) for dim in places]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (distribute_tensor(t, mesh, where) for t in torch.randn(3, 8, 8, 8, 4, generator=generator))
    slopes, pairs = torch.rand(8), torch.rand(8, 8, 8, 8)
    right = {"k": k, "v": v, "dropout_p": 0.3, "dropout_seed": 3, "alibi_slopes": slopes, "mask": pairs < 0.8}
    right |= {"bias": distribute_tensor(pairs, mesh, where)}
    changes = {
        "k": (None, whole(k), k.redistribute(placements=[Shard(3)] * mesh.ndim), k.double(), k[:, :3], k[0]),
        "v": ("v", v.detach().requires_grad_(), v[:, :, :7]),
        "dropout_p": (0.0, 1.0, 0.5),
        "dropout_seed": (4, "seed", torch.zeros(2).long()),
        "alibi_slopes": (None, slopes[:7], slopes.double(), distribute_tensor(slopes, mesh, [Replicate()] * mesh.ndim)),
        "mask": (None, pairs, pairs[:7] < 0.8, (pairs < 0.8).to_sparse()),
        "bias": (None, pairs, right["bias"].redistribute(placements=[Shard(3)] * mesh.ndim), right["bias"][:, :3]),
        "window": ((-2, 0), (2, 2)),
        "softcap": (float("nan"), 1.0),
        "softcapp": (1.0,),
        "return_max_score": (True,),
    }
    found, last = list[tuple[str, str, str]](), dist.get_rank(group) == dist.get_world_size(group) - 1
    expected = whole(pyattn.attention(q, **right))
    for name, values in changes.items():
        for value in values:
            wrong, error, fault = right | ({name: value} if last else {}), "", ""
            try:
                pyattn.attention(q, **wrong)
            except Exception as problem:
                error = f"{type(problem).__name__}: {problem}"
            try:
                assert torch.equal(whole(pyattn.attention(q, **right)), expected)
            except Exception as problem:
                fault = f"{type(problem).__name__}: {problem}"
            found.append((f"{name} {str(value)[:40]}", error, fault))
    return found
