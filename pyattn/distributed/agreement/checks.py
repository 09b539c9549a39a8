"""Checks of one rank's arguments, which it runs before it agrees with the others: all of them hear of an error."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyattn import ops
from pyattn.derivatives.transforms import transforming
from pyattn.ops.row_invariance import refuse_row_invariance
from pyattn.options.axes import AXES, dims_of, having, take
from pyattn.options.checks import check_tensor
from pyattn.options.schema import Options

DIMS = ("batch", "heads", "positions", "head_dim")
DIMS_PACKED = ("positions", "heads", "head_dim")


def check_dense(name: str, value: object) -> None:
    """TypeError unless ``value`` is a tensor; NotImplementedError unless its numbers lie in memory by strides."""
    check_tensor(name, value)
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        raise NotImplementedError(f"pyattn: {name} must be a dense tensor, got layout {value.layout}")


def check_values(name: str, value: object) -> None:
    """As :func:`check_dense`; NotImplementedError also for a tensor without values, which no message can carry."""
    check_dense(name, value)
    if isinstance(value, Tensor) and value.device.type == "meta":
        raise NotImplementedError(f"pyattn: {name} must have values to send, got a tensor on {value.device}")


def refuse_transforms(function: Callable[..., Any]) -> None:
    """NotImplementedError within a transform of torch.func or forward-mode differentiation."""
    if transforming():
        raise NotImplementedError(
            f"pyattn: {function.__name__} has no rule for transforms of torch.func or forward mode"
        )


def check_dims(function: Callable[..., Any], tensors: Sequence[Tensor], dims: Sequence[str]) -> None:
    """Checks that q, k and v are tensors of these dimensions, whatever their sizes."""
    refuse_transforms(function)
    refuse_row_invariance(function.__name__)
    for name, tensor in zip("qkv", tensors, strict=False):
        check_values(name, tensor)
        if tensor.dim() != len(dims):
            raise ValueError(f"pyattn: {name} must be ({', '.join(dims)}), got shape {tuple(tensor.shape)}")


def check_parts(function: Callable[..., Any], tensors: tuple[Tensor, ...], dims: tuple[str, ...]) -> None:
    """Checks q, k and v of a rank."""
    check_dims(function, tensors, dims)
    q, k, v = tensors
    for name, tensor in zip("qkv", tensors, strict=True):
        if (tensor.dtype, tensor.device) != (q.dtype, q.device):
            raise TypeError(
                f"pyattn: {name} must be {q.dtype} on {q.device} like q, got {tensor.dtype} on {tensor.device}"
            )
    heads, positions = (dims.index(of) for of in ("heads", "positions"))
    if k.shape[positions] != v.shape[positions]:
        lengths = f"{k.shape[positions]} and {v.shape[positions]}"
        raise ValueError(f"pyattn: k and v must have as many positions as one another, got {lengths}")
    num_q, num_k, num_v = (tensor.shape[heads] for tensor in tensors)
    if num_k != num_v or (num_q % num_k if num_k else num_q):
        raise ValueError(
            f"pyattn: num_heads_q must be a multiple of num_heads_kv, got {num_q}, {num_k} of k and {num_v} of v"
        )


def check_options(tensors: tuple[Tensor, ...], options: Options, begins: list[int] | None = None) -> None:
    """The operator's checks, apart from the numbers of rows and columns, which depend on the other ranks too.

    The operator gets no positions. If it raises, its error names the sizes without them, so the same call of meta
    tensors that have them comes first.

    Args:
        tensors: q, k and v of a rank.
        options: of the call.
        begins: where packed sequences begin; None: q, k and v are batches.
    """
    q, k, v = tensors
    packed = begins is not None
    at = 0 if packed else 2
    none = take(options, rows=slice(0), keys=slice(0), packed=packed)
    with torch.no_grad():
        try:
            _call(q.narrow(at, 0, 0), k.narrow(at, 0, 0), v.narrow(at, 0, 0), none, begins)
        except (TypeError, ValueError, NotImplementedError):
            _call(*_with_sizes(q, k, v, options), begins)
            raise


def _call(q: Tensor, k: Tensor, v: Tensor, options: Options, begins: list[int] | None) -> None:
    if begins is not None:
        none = torch.zeros(len(begins), dtype=torch.int64, device=q.device)
        ops.attention_varlen_forward(q, k, v, none, none, 0, 0, None, *options)
    else:
        ops.attention_forward(q, k, v, *options)


def _with_sizes(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor, Options]:
    """Meta tensors with as many keys as a mask or a bias has columns, and as many rows of these as queries."""
    q, k, v = (t.to("meta") for t in (q, k, v))
    known = {name: t.to("meta") for name, t in options._asdict().items() if isinstance(t, Tensor)}
    pairs = {name: known[name] for name in having("k") if name in known and known[name].dim()}
    if q.dim() == len(DIMS):
        columns = max([t.shape[-1] for t in pairs.values()], default=k.shape[2])
        k, v = (t.new_empty(*t.shape[:2], columns, t.shape[3]) for t in (k, v))
        known |= {name: _resized(AXES[name], t, {"q": q.shape[2], "k": columns}) for name, t in pairs.items()}
    return q, k, v, options._replace(**known)


def _resized(axes: str, tensor: Tensor, lengths: Mapping[str, int]) -> Tensor:
    """A tensor of other lengths along some axes, except where it broadcasts."""
    sizes = [*tensor.shape]
    for axis, dim in dims_of(axes, tensor).items():
        sizes[dim] = lengths.get(axis, sizes[dim])
    return tensor.new_empty(sizes)
