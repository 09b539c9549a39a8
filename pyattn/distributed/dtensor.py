"""DTensors: calls that the operators' sharding rules cannot express, as calls on the ranks' local tensors.

Importing :mod:`pyattn.distributed` lets :func:`pyattn.attention` and :func:`pyattn.attention_varlen` take DTensors.
Each dimension of their mesh has one role, by the placements of q, k and v::

    batch, heads    each rank computes its own
    positions       ring_attention between the ranks
    none            q, k and v are whole, and so is out

Shards of batch and heads without dropout are left to :mod:`pyattn.ops.dtensor_rules`, if all options are
DTensors. Tensors placed in other ways than their role requires are redistributed first, options too; an option that is
not a DTensor is one that all ranks have whole.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from pyattn.attention import attention
from pyattn.distributed.agreement.call import chosen
from pyattn.distributed.agreement.checks import check_dense
from pyattn.distributed.agreement.ranks import ERRORS, agree, ranks_of
from pyattn.distributed.attention import ring_attention, ring_attention_varlen
from pyattn.masks.key_ranges import plain
from pyattn.ops import dtensor_rules
from pyattn.ops.dtensor_rules import BATCH, HEADS, POSITIONS, place
from pyattn.options.attention_options import Draws
from pyattn.options.checks import shown
from pyattn.options.dropout import draw_seed
from pyattn.options.parse import check_given
from pyattn.options.tensor_types import TAKERS
from pyattn.varlen import attention_varlen

DENSE = {BATCH: 0, HEADS: 1, POSITIONS: 2}
PACKED = {POSITIONS: 0, HEADS: 1}
"""The dimension of q, k and v that each role shards, in batches and in packed sequences."""

NO_OPTIONS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "return_max_score")
"""Arguments that are no options."""

Roles = list[str | None]


class _Sharding(NamedTuple):
    """The roles of the dimensions of a call's mesh, and the dimension of q, k and v that each role shards."""

    mesh: DeviceMesh
    roles: Roles
    dims: Mapping[str, int]

    def placements(self) -> list[Any]:
        """The placements of q, k, v and out."""
        return [Replicate() if role is None else Shard(self.dims[role]) for role in self.roles]

    def local(self, tensor: Tensor, placements: Sequence[Any]) -> Tensor:
        """This rank's part. The gradient of a part that several ranks have is their sum."""
        whole: Any = tensor
        if not isinstance(tensor, DTensor):
            whole = DTensor.from_local(tensor, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        shares = [
            Partial() if role is not None and at == Replicate() else at
            for role, at in zip(self.roles, placements, strict=True)
        ]
        part: Tensor = whole.redistribute(placements=placements).to_local(grad_placements=shares)
        return part

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's parts of the options."""
        packed = self.dims is PACKED
        return {
            name: self.local(value, [place(name, value, role, packed) for role in self.roles])
            if isinstance(value, Tensor)
            else value
            for name, value in given.items()
        }

    def first(self, role: str, size: int) -> int:
        """The number of this rank's first sequence or head."""
        for at, own in enumerate(self.roles):
            if own == role:
                return size // self.mesh.size(at) * self.mesh.get_local_rank(at)
        return 0

    def draws(self, seed: int | Tensor | None, batch: int, num_heads: int) -> Draws:
        """The weights that one process drops; without a seed, rank 0 draws one."""
        device = torch.device(self.mesh.device_type)
        drawn: Any = draw_seed(device) if seed is None else torch.as_tensor(seed, device=device)
        if isinstance(drawn, DTensor):
            drawn = drawn.full_tensor()
        else:  # the first of all: torch.compile traces no broadcast
            for at in range(self.mesh.ndim):
                places: list[Any] = [Shard(0) if dim == at else Replicate() for dim in range(self.mesh.ndim)]
                each: Any = DTensor.from_local(drawn[None], self.mesh, places, run_check=False)
                drawn = each.full_tensor()[0]
        origin = [[self.first(BATCH, batch), num_heads, self.first(HEADS, num_heads), 0, 0]]
        return Draws(drawn, torch.tensor(origin, device=device))

    def whole(self, tensor: Tensor, shape: tuple[int, ...], placements: Sequence[Any]) -> Tensor:
        """The DTensor of this shape whose part this is."""
        stride = torch.empty(shape, device="meta").stride()
        found: Tensor = DTensor.from_local(
            tensor.contiguous(), self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
        return found

    def group(self) -> Any:
        """The ranks between which positions are sharded; None if none are."""
        return self.mesh.get_group(self.roles.index(POSITIONS)) if POSITIONS in self.roles else None


def _role(at: int, tensors: tuple[DTensor, ...], dims: Mapping[str, int]) -> str | None:
    """The role of a dimension of the mesh: that of the first of q, k and v that it shards, if all can be.

    As in :mod:`pyattn.ops.dtensor_rules`, numbers of sequences and KV heads must be multiples of its size.
    """
    for tensor in tensors:
        for role, dim in dims.items():
            if tensor.placements[at] == Shard(dim):
                uneven = tensors[1].shape[dim] % tensor.device_mesh.size(at)
                return None if uneven and role != POSITIONS else role
    return None


def _sharding(q: DTensor, k: Tensor, v: Tensor, dims: Mapping[str, int]) -> _Sharding:
    for name, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, DTensor) or tensor.device_mesh != q.device_mesh:
            got = tensor.device_mesh if isinstance(tensor, DTensor) else type(tensor).__name__
            raise TypeError(f"pyattn: {name} must be a DTensor on the mesh of q, {q.device_mesh}, got {got}")
        if tensor.dim() != q.dim():
            raise ValueError(f"pyattn: {name} must have {q.dim()} dimensions like q, got {tensor.dim()}")
    tensors: tuple[Any, ...] = q, k, v
    roles = [_role(at, tensors, dims) for at in range(q.device_mesh.ndim)]
    return _Sharding(q.device_mesh, roles, dims)


def _agreed(
    function: Callable[..., Any], tensors: tuple[Any, Any, Any], dims: Mapping[str, int], given: dict[str, Any]
) -> _Sharding | None:
    """The sharding, once all ranks of q's mesh have the same tensors and options; None if the operators' rules serve.

    A graph has no separate agreement, only that of the operator in it.
    """
    q, error, sharding = tensors[0], None, None
    options = {name: value for name, value in given.items() if name not in NO_OPTIONS}
    facts = {name: _described(value) for name, value in (dict(zip("qkv", tensors, strict=True)) | given).items()}
    mixed = any(isinstance(value, Tensor) and not isinstance(value, DTensor) for value in options.values())
    messages = dims is PACKED or mixed or bool(options.get("dropout_p"))
    try:
        sharding = _sharding(*tensors, dims)
        messages |= POSITIONS in sharding.roles
        check_given(function, options)
        for name, value in options.items():
            if isinstance(value, Tensor):
                check_dense(name, value)
    except Exception as problem:  # whatever it is, the others must not wait for this rank
        messages |= Shard(dims[POSITIONS]) in q.placements
        error = problem
    if messages and not torch.compiler.is_compiling():
        for at in range(q.device_mesh.ndim):  # an error goes from one dimension's ranks to the next one's
            try:
                agree(function.__name__, ranks_of(q.device_mesh.get_group(at)), facts, [], error)
            except ERRORS as problem:
                error = error or problem
    if error is not None:
        raise error
    return sharding if messages else None


def _described(value: Any) -> str:
    """Tensors by their properties, anything else by its value."""
    if not isinstance(value, Tensor):
        return shown(value)
    places = f", placed {value.placements}" if isinstance(value, DTensor) else ""
    gradient = " with a gradient" if torch.is_grad_enabled() and value.requires_grad else ""
    return f"{value.dtype} of shape {list(value.shape)} on {value.device.type}{places}{gradient}"


def _dense(q: Any, k: Tensor, v: Tensor, *, return_lse: bool, return_max_score: bool, **options: Any) -> Any:
    """:func:`pyattn.attention` over DTensors; None if the sharding rules of the operators serve, or q is wrong."""
    if q.dim() > 4:
        raise NotImplementedError(
            "pyattn: DTensors must have 4 dimensions (batch, num_heads, seqlen, head_dim), got q of shape "
            f"{tuple(q.shape)}"
        )
    if q.dim() < 4:
        return None
    returned = return_lse, return_max_score
    sharding = _agreed(attention, (q, k, v), DENSE, options | {"return_max_score": return_max_score})
    if sharding is None:
        return None
    return _computed(sharding, attention, ring_attention, (q, k, v), (), returned, options)


def _packed(
    q: Any, k: Tensor, v: Tensor, *packing: Any, return_lse: bool, return_max_score: bool, **options: Any
) -> Any:
    """:func:`pyattn.attention_varlen` over DTensors."""
    for name in ("block_table", "seqused_k"):
        if options.pop(name) is not None:
            raise NotImplementedError(f"pyattn: {name} must not be given with DTensors, got {name}")
    if q.dim() != 3:
        raise ValueError(f"pyattn: q must be (total_q, heads, head_dim), got shape {tuple(q.shape)}")
    given = options | {"return_max_score": return_max_score} | dict(zip(NO_OPTIONS, packing, strict=False))
    sharding = _agreed(attention_varlen, (q, k, v), PACKED, given)
    assert sharding is not None
    begins: list[Any] = [t.full_tensor() if isinstance(t, DTensor) else t for t in packing[:2]]
    packing = (*begins, *packing[2:]) if sharding.group() is None else tuple(begins)
    return _computed(
        sharding, attention_varlen, ring_attention_varlen, (q, k, v), packing, (return_lse, return_max_score), options
    )


def _computed(
    sharding: _Sharding,
    alone: Callable[..., Any],
    ring: Callable[..., Any],
    tensors: tuple[Any, Any, Any],
    packing: tuple[Any, ...],
    returned: tuple[bool, bool],
    options: dict[str, Any],
) -> Any:
    """The results; ``returned`` says whether lse and max_score are among them."""
    q, _, v = tensors
    for role in sharding.dims:
        if sharding.roles.count(role) > 1:
            raise NotImplementedError(
                f"pyattn: each dimension of q must be sharded by one dimension of the mesh, got {q.placements}"
            )
    places, group = sharding.placements(), sharding.group()
    if options.get("dropout_p"):
        options["dropout_seed"] = sharding.draws(options.get("dropout_seed"), q.shape[0], q.shape[sharding.dims[HEADS]])
    if options.get("key_ranges") is not None:
        options["key_ranges"] = plain(options["key_ranges"], options.get("causal", True))
    local = [t.redistribute(placements=places).to_local() for t in tensors]
    given = sharding.options(options) | {"return_lse": True, "return_max_score": returned[1]}
    if group is None:
        out, lse, *most = alone(*local, *packing, **given)
    else:
        out, lse, *most = ring(*local, *packing, group, layout="chunk", **given)
    dense, count = sharding.dims is DENSE, q.shape[sharding.dims[HEADS]]
    rows = places if dense else [Shard(1 - place.dim) if isinstance(place, Shard) else place for place in places]
    result = sharding.whole(out, (*q.shape[:-1], v.shape[-1]), places)
    lse = sharding.whole(lse, tuple(q.shape[:-1]) if dense else (count, q.shape[0]), rows)
    if not most:
        return chosen(result, lse, lse, *returned)
    by_head: dict[str | None, Any] = {BATCH: Shard(0), HEADS: Shard(1)}
    heads = [by_head.get(role, Replicate()) for role in sharding.roles]
    largest = sharding.whole(most[0], (q.shape[0] if dense else len(packing[0]) - 1, count), heads)
    return chosen(result, lse, largest, *returned)


def register() -> None:
    """Lets the public functions take DTensors."""
    dtensor_rules.register()
    TAKERS[DTensor] = {"attention": _dense, "attention_varlen": _packed}
