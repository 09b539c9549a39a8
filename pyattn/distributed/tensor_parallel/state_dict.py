"""State dicts of tensor-parallel modules: whole ones, and the parts that ranks take of them."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from pyattn.distributed.tensor_parallel.plans import Part, home_of


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict that one process's model would have, on every rank.

    All ranks of the modules' meshes must call it. ``load_state_dict`` takes it, in the model of one process and in the
    parallel one, there before ``fully_shard``.

    Args:
        model: a model with modules divided by :func:`tensor_parallel`, or such a module.
    """
    state = {key: _whole(value) for key, value in model.state_dict().items()}
    for home, module in model.named_modules():
        part = vars(module).get("part")
        if isinstance(part, Part):
            prefix = f"{home}." if home else ""
            homes = {name: home_of(module, name) for name in part.plan.placements}
            for name, (values, leaf) in homes.items():
                if prefix + name not in state and values.get(leaf) is not None:  # under DDP
                    state[prefix + name] = _whole(values[leaf])
            for key in [prefix + name for name in part.plan.fused if prefix + name in state]:
                state[key] = state[key].flatten(0, 1)
            if part.plan.single:
                own = {key: value for key, value in state.items() if key.startswith(f"{prefix}heads.")}
                heads: list[Any] = [None] * part.mesh.size()
                dist.all_gather_object(heads, own, group=part.mesh.get_group())
                state |= {key: value for theirs in heads for key, value in theirs.items()}
    return state


def _whole(value: Any) -> Any:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def take_part(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replaces what a rank takes of a whole state, before it is loaded."""
    part: Part = module.part
    for name in part.plan.placements:
        values, leaf = home_of(module, name)
        parameter, value = values.get(leaf), state.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(value, Tensor):
            if name in part.plan.fused and value.dim() < parameter.dim():
                value = value.unflatten(0, (3, -1))
            if not isinstance(value, DTensor) and value.shape == parameter.shape:
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            state[prefix + name] = value
    others = tuple(f"{prefix}heads.{h}." for h in range(part.num_heads) if part.plan.single and h not in part.heads)
    for key in [key for key in state if key.startswith(others)]:
        del state[key]
