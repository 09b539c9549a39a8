"""Tensor parallelism: each rank computes some of a module's heads, and the ranks sum what these give."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.functional import linear

from pyattn.distributed.agreement.ranks import agree, ranks_of
from pyattn.distributed.tensor_parallel.plans import Part, Plan, home_of, place_of, plan_of
from pyattn.distributed.tensor_parallel.state_dict import take_part
from pyattn.nn import Attention
from pyattn.nn.heads import Heads, Output, output_of
from pyattn.nn.replace import dropout_probability
from pyattn.options.attention_options import Draws
from pyattn.options.checks import check_type
from pyattn.options.dropout import draw_seed


def tensor_parallel(module: nn.Module, mesh: DeviceMesh, *, src_data_rank: int | None = 0) -> nn.Module:
    """Divides a multi-head module's heads among the ranks, in place; its results stay those of one process.

    ::

        x (B, S, d_in), the same on all ranks
        q, k, v = the rank's columns of the projections     colwise: heads [rank * H / n, (rank + 1) * H / n)
        out     = sum over the ranks of the rank's rows of the last projection, + its bias     one all-reduce
        dx      = sum over the ranks                                                           one all-reduce

    Latent attention has the projections before its latent vectors, and their cache, whole on every rank; gradients are
    summed where heads read these vectors.

    Parameters become DTensors on the mesh: query, key and value projections and sinks are sharded by heads, the last
    projection by its inputs; its bias is replicated. Projections that hold q, k and v in one parameter (3 * width, ...)
    keep it as (3, width, ...); whole states load as they are, and :func:`whole_state_dict` gives one. Wrappers of
    single heads keep those of the rank, whose parameters are plain tensors. ``num_heads`` and the other attributes that
    count heads become the rank's, and so do caches made for them.

    A call has the arguments of one process: a mask or bias with heads has all of them, and returned weights have too.
    Dropout drops the same weights, from a seed that rank 0 draws and sends; every rank draws one, so generators in step
    stay so. Calls must be alike on all ranks. The first call of the module compares them: the shape and dtype of x, and
    the other arguments, of which only shapes and dtypes of tensors. With ``PYATTN_CHECK=1`` in the environment every
    call does. ``torch.compile`` takes the module into one graph, whose calls compare nothing.

    Args:
        module: one of the multi-head classes of :mod:`pyattn.nn` and :mod:`pyattn.nn.book`.
        mesh: the ranks, a mesh of one dimension; ``mesh["tp"]`` of a larger one.
        src_data_rank: the rank whose parameters all take; None: each rank takes its part of its parameters.

    Returns:
        ``module``. Its class is a subclass of the one that it had.

    Raises:
        TypeError: a module of another class, a mesh of another type.
        ValueError: a mesh of more dimensions; numbers of query or KV heads that are not multiples of the number of
            ranks; modules that differ, or calls where they are compared. Every rank raises.

    Source: Shoeybi et al. 2019 (Megatron-LM).
    """
    check_type("mesh", mesh, DeviceMesh)
    if mesh.ndim != 1:
        raise ValueError(f"pyattn: mesh must have one dimension, got {mesh}")
    ranks, error, facts = ranks_of(mesh), None, dict[str, Any]()
    try:
        plan = plan_of(module)
        facts = _facts(module, plan, ranks.size)
    except (TypeError, ValueError) as problem:  # all ranks must hear of it
        error = problem
    agree("tensor_parallel", ranks, facts, [], error)
    if plan.single:
        heads: Any = module.heads
        num_heads = len(heads)
        _keep_heads(heads, mesh, num_heads, src_data_rank)
    else:
        num_heads = _counts(module, plan)[plan.counts[0]]
    for name, placement in plan.placements.items():
        parameter = module.get_parameter(name)
        whole = parameter.detach()
        whole = whole.unflatten(0, (3, -1)) if name in plan.fused else whole
        part = distribute_tensor(whole, mesh, [placement], src_data_rank=src_data_rank)
        owner, leaf = place_of(module, name)
        owner.register_parameter(leaf, nn.Parameter(part, parameter.requires_grad))
    for name, count in _counts(module, plan).items():
        setattr(*place_of(module, name), count // ranks.size)
    first = num_heads // ranks.size * ranks.own
    vars(module)["part"] = Part(mesh, plan, num_heads, range(first, first + num_heads // ranks.size))
    module.register_load_state_dict_pre_hook(take_part)
    module.__class__ = type(f"TensorParallel{type(module).__name__}", (_OfRank, type(module)), {})
    return module


class TensorParallel(ParallelStyle):
    """:func:`tensor_parallel` in a plan of torch's ``parallelize_module``: ``{"blocks.*.att": TensorParallel()}``.

    x may be a DTensor of any placement, as from ``PrepareModuleInput``.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return tensor_parallel(module, device_mesh, src_data_rank=self.src_data_rank)


def _described(value: Any) -> str:
    """An argument of a call as all ranks must have it: of tensors the shape, of objects the class."""
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {list(value.shape)}"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def _counts(module: nn.Module, plan: Plan) -> dict[str, int]:
    return {name: getattr(*place_of(module, name)) for name in plan.counts}


def _facts(module: Any, plan: Plan, size: int) -> dict[str, Any]:
    """The properties of a module that all ranks must have in common, if it can be divided among that many."""
    if isinstance(module, _OfRank):
        raise ValueError(f"pyattn: module must be whole, got a rank's part with heads {module.part.heads}")
    counts = {"num_heads": len(module.heads)} if plan.single else _counts(module, plan)
    for name, count in counts.items():
        if count % size:
            raise ValueError(
                f"pyattn: {name} must be a multiple of the mesh's size, of which each rank has a part, got {count} and "
                f"{size}"
            )
    shapes = {name: (tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()}
    return {"class of module": type(module).__name__, "number of heads": counts, "parameters of module": shapes}


def _keep_heads(heads: nn.ModuleList, mesh: DeviceMesh, num_heads: int, src_data_rank: int | None) -> None:
    """Keeps this rank's heads, under their names in the whole."""
    count = num_heads // mesh.size()
    first = count * mesh.get_local_rank()
    for number, head in enumerate(list(heads)):
        with torch.no_grad():
            for parameter in head.parameters():
                sent = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=src_data_rank)
                parameter.copy_(sent.to_local())
        if number in range(first, first + count):
            head.__class__ = type(f"TensorParallel{type(head).__name__}", (_HeadOfRank, type(head)), {})
        else:
            delattr(heads, str(number))


class _HeadOfRank(nn.Module):
    """A single head whose seed its module draws."""

    seed: Tensor | None = None

    def attend(self, *qkv: Tensor, **options: Any) -> Output:
        result: Output = super().attend(*qkv, **options, dropout_seed=self.seed)  # type: ignore[misc]
        return result


class _OfRank(Heads):
    """A module with some of the heads; its class comes after this one."""

    part: Part
    compared = False

    def forward(self, x: Any, *args: Any, **named: Any) -> Output:
        mesh, plan = self.part.mesh, self.part.plan
        if not torch.compiler.is_compiling() and (not self.compared or os.environ.get("PYATTN_CHECK") == "1"):
            arguments = {"x": x, **{f"argument {n}": value for n, value in enumerate(args, 1)}, **named}
            facts = {"arguments": list(arguments), "training": self.training}
            facts |= {name: _described(value) for name, value in arguments.items()}
            agree("forward", ranks_of(mesh), facts, [], None)
            self.compared = True
        given = [self._own("mask", value) for value in args]
        named |= {name: self._own(name, named[name]) for name in ("mask", "bias") if name in named}
        if isinstance(x, Tensor):
            x = self._whole(x, Replicate() if plan.whole else Partial())
            self._seed_heads(x.device)
        with self._own_parameters():
            result: Output = super().forward(x, *given, **named)
        out, weights = result if isinstance(result, tuple) else (result, None)
        out = self._all(out, Shard(2)) if plan.joins else out
        return output_of(out, None if weights is None else self._all(weights, Shard(1)))

    def common(self, x: Tensor) -> Tensor:
        return self._whole(x, Partial()) if self.part.plan.whole else x

    def drawn(self, options: dict[str, Any], device: torch.device) -> dict[str, Any]:
        if not 0 < dropout_probability(options["dropout"]) < 1:  # with 1, one process draws no seed
            return options
        origin = [[0, self.part.num_heads, self.part.heads.start, 0, 0]]
        return options | {"dropout_seed": Draws(self._seeds(1, device)[0], torch.tensor(origin, device=device))}

    def project(self, projection: Any, out: Tensor) -> Tensor:
        total = self._all(linear(out, projection.weight), Partial())
        return total if projection.bias is None else total + projection.bias.to(total.dtype)

    def score_options(self, num_heads: int, x: Tensor) -> dict[str, Any]:
        options: dict[str, Any] = super().score_options(self.part.num_heads, x)  # type: ignore[misc]
        slopes, own = options["alibi_slopes"], self.part.heads
        return options | {"alibi_slopes": None if slopes is None else slopes[own.start : own.stop]}

    def _own(self, name: str, given: Any) -> Any:
        """The rank's heads of a mask or a bias."""
        no_heads = name == "mask" and isinstance(self, Attention) and isinstance(given, Tensor) and given.dim() == 3
        if not isinstance(given, Tensor) or given.dim() not in (3, 4) or given.shape[-3] == 1 or no_heads:
            return given
        count, own = self.part.num_heads, self.part.heads
        if given.shape[-3] != count:
            raise ValueError(f"pyattn: {name} must have all {count} heads, or 1, got shape {tuple(given.shape)}")
        return given[..., own.start : own.stop, :, :]

    def _whole(self, x: Tensor, gradient: Partial | Replicate) -> Tensor:
        """``x`` as all ranks have it, and what of its gradient each of them computes."""
        mesh = self.part.mesh
        given = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        whole: Tensor = given.redistribute(placements=[Replicate()]).to_local(grad_placements=[gradient])
        return whole

    def _all(self, tensor: Tensor, placement: Partial | Shard) -> Tensor:
        """The sum over the ranks, or their parts one after another."""
        parts = DTensor.from_local(tensor, self.part.mesh, [placement], run_check=False)
        whole: Tensor = parts.redistribute(placements=[Replicate()]).to_local()
        return whole

    def _seeds(self, count: int, device: torch.device) -> Tensor:
        """Rank 0's next seeds."""
        drawn = torch.stack([draw_seed(device) for _ in range(count)])
        return self._all(drawn[None], Shard(0))[0]  # out of all ranks': torch.compile traces no broadcast

    def _seed_heads(self, device: torch.device) -> None:
        """Gives each single head the seed that it would draw in one process."""
        heads: Any = self.heads if self.part.plan.single else ()
        if any(0 < dropout_probability(head.dropout) < 1 for head in heads):
            seeds = self._seeds(self.part.num_heads, device)
            for number, head in zip(self.part.heads, heads, strict=True):
                head.seed = seeds[number]

    @contextmanager
    def _own_parameters(self) -> Iterator[None]:
        """Within the context, parameters are this rank's parts of them, as the module's code multiplies them."""
        kept = []
        for name in self.part.plan.placements:
            home, leaf = home_of(self, name)
            parameter = home.get(leaf)
            if isinstance(parameter, DTensor):
                kept.append((home, leaf, parameter))
                own: Any = parameter.to_local()
                home[leaf] = own.flatten(0, 1) if name in self.part.plan.fused else own
        try:
            yield
        finally:
            for home, leaf, parameter in kept:
                home[leaf] = parameter
