"""torch's ``context_parallel`` with the ring: a script runs on parts of its sequences by changing an import."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode, get_overridable_functions

from pyattn import ops
from pyattn.distributed.agreement.ranks import agree, ranks_of
from pyattn.distributed.agreement.signature import all_hear
from pyattn.distributed.attention import ring_attention
from pyattn.distributed.layout import check_layout, shard
from pyattn.options.checks import check_tensor, check_type
from pyattn.options.tensor_types import CONTEXTS, check_outside


@contextmanager
@all_hear
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: list[Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
    layout: str = "zigzag",
) -> Iterator[None]:
    """Within the context, each rank has its part of the buffers, and SDPA is :func:`pyattn.distributed.ring_attention`.

    So is :func:`pyattn.attention`, with all its options, and with it pyattn's modules and flash_attn_func.
    Packed sequences, caches, weights, FlexAttention's mods, rotary embeddings without ``positions=`` and transformers'
    models with ``attn_implementation="pyattn"`` (those with "sdpa" run) raise NotImplementedError: a rank's positions
    may be apart.

    Forward and backward both belong inside. ``scaled_dot_product_attention`` takes query, key and value (B, H, L, E) of
    this rank's positions; attn_mask has this rank's rows and all keys. Code under ``torch.utils.checkpoint`` must call
    it as an attribute of torch.nn.functional: called by its own name, torch's CheckpointError ends backward.
    ``torch.compile`` takes a function that is called inside in one graph; the context itself stays outside of it.

    Args:
        mesh: the ranks, a mesh of one dimension.
        buffers: tensors that every rank has whole, for example inputs, labels and positions. They are cut in place, and
            whole again, as they were, at the end.
        buffer_seq_dims: the dimension of the sequence in each buffer.
        no_restore_buffers: those that need not be whole again.
        layout: as for :func:`pyattn.distributed.shard`.

    Raises:
        ValueError: other numbers of buffers and dimensions, a buffer that requires a gradient, a buffer in
            no_restore_buffers that is not in buffers; as
            :func:`pyattn.distributed.shard` and :func:`pyattn.distributed.ring_attention`.
        TypeError: buffers or dimensions that are no list or tuple, whose order says which belong together;
            no_restore_buffers that are no list, tuple or set.
        NotImplementedError: query, key and value of other dimensions than 4; inside, calls that need all positions.
        If one rank's arguments of the context or of a call inside are wrong, every rank raises.

    Source: torch.distributed.tensor.experimental.context_parallel, which has the same signature.
    """
    error, whole, parts = None, list[Tensor](), list[Tensor]()
    try:
        check_layout(layout)
        whole = _listed("buffers", buffers, list, tuple)
        dims = _listed("buffer_seq_dims", buffer_seq_dims, list, tuple)
        transient = _transient(whole, dims, _listed("no_restore_buffers", no_restore_buffers, list, tuple, set))
        parts = [shard(buffer, dim, mesh, layout=layout) for buffer, dim in zip(whole, dims, strict=True)]
    except Exception as problem:  # whatever it is, the others must not wait for this rank
        error = problem
    agree("context_parallel", ranks_of(mesh), {"layout": layout}, [], error)
    kept = [None if id(buffer) in transient else buffer.detach() for buffer in whole]
    _set(whole, parts)
    get_overridable_functions()  # torch.compile reads this list, made once: torch's own function must be in it
    ring, before = _class_for(mesh, layout)(mesh, layout), functional.scaled_dot_product_attention
    ops.sdpa_forbid(1)
    try:
        functional.scaled_dot_product_attention = ring.attend
        CONTEXTS.append(ring.attention)
        with ring:
            yield
    finally:
        CONTEXTS.pop()
        ops.sdpa_forbid(-1)
        functional.scaled_dot_product_attention = before
        _set(whole, kept)


def _listed(name: str, values: Iterable[Any] | None, *types: type) -> list[Any]:
    """The values, none for None; TypeError for other types: a tensor is no list of others."""
    if values is None:
        return []
    check_type(name, values, *types)
    return list(values)


def _transient(buffers: Sequence[Tensor], dims: Sequence[int], no_restore: Sequence[Tensor]) -> set[int]:
    """The ids of the buffers that need not be whole again; checks the arguments of a context."""
    if len(buffers) != len(dims):
        raise ValueError(
            f"pyattn: buffer_seq_dims must have a dimension for each buffer, got {len(dims)} for {len(buffers)}"
        )
    known = {id(buffer) for buffer in buffers}
    for buffer in no_restore:
        check_tensor("each of no_restore_buffers", buffer)
        if id(buffer) not in known:
            raise ValueError(
                f"pyattn: no_restore_buffers must be among buffers, got one of shape {tuple(buffer.shape)} that is not"
            )
    for buffer in buffers:
        check_tensor("each of buffers", buffer)
        if buffer.requires_grad:
            raise ValueError(
                f"pyattn: buffers must not require gradients, got one of shape {tuple(buffer.shape)} that does"
            )
    return {id(buffer) for buffer in no_restore}


def _set(buffers: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
    """Lets the buffers be these tensors; other views of their memory are as before."""
    for buffer, value in zip(buffers, values, strict=True):
        if value is not None:
            buffer.data = value


class _Ring(TorchFunctionMode):
    """Replaces torch's function where a script imported it by its name; all others run as they are.

    Python functions of torch run without the mode: backward, in which checkpoints compute forward again, and
    ``multi_head_attention_forward``. Calls by way of torch.nn.functional find :meth:`attend` there.
    """

    def __init__(self, mesh: DeviceMesh, layout: str) -> None:
        super().__init__()
        self._mesh, self._layout = mesh, layout

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is scaled_dot_product_attention:
            return self.attend(*args, **kwargs or {})
        if func is torch.ops.higher_order.flex_attention:
            check_outside("torch's flex_attention")
        if func is Tensor.unflatten:  # torch.compile traces no function with super()
            return args[0].unflatten(*args[1:], **kwargs or {})
        return func(*args, **kwargs or {})

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
        """:func:`pyattn.attention` over this rank's positions."""
        return ring_attention(q, k, v, self._mesh, layout=self._layout, **named)

    def attend(self, *positional: Any, **named: Any) -> Any:
        """torch's function over this rank's positions."""
        try:
            tensors, options = _arguments(*positional, **named)
        except Exception as error:  # whatever it is, the others must not wait for this rank
            agree("scaled_dot_product_attention", ranks_of(self._mesh), {}, [], error)
            raise
        return ring_attention(*tensors, self._mesh, layout=self._layout, **options)


def _arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """q, k, v and the options of a call of torch's function, whose parameters these are."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
    if not query.dim() == key.dim() == value.dim() == 4:
        raise NotImplementedError(
            "pyattn: within context_parallel, query, key and value must have 4 dimensions, got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if not (enable_gqa or query.shape[1] == key.shape[1] == value.shape[1]):
        raise ValueError(
            "pyattn: query, key and value must have as many heads as one another without enable_gqa, got "
            f"{query.shape[1]}, {key.shape[1]} and {value.shape[1]}"
        )
    options: dict[str, Any] = {"causal": is_causal, "dropout_p": dropout_p, "softmax_scale": scale}
    if attn_mask is not None:
        check_tensor("attn_mask", attn_mask)
        options["mask" if attn_mask.dtype == torch.bool else "bias"] = attn_mask
    if is_causal:
        options["q_offset"] = 0  # torch's causal mask begins at the upper left corner
    return (query, key, value), options


@cache
def _class_for(mesh: DeviceMesh, layout: str) -> type[_Ring]:
    """A class of these alone: torch.compile uses a graph again for modes of the same class, whatever they hold."""
    return type("_Ring", (_Ring,), {})
