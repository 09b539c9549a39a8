"""The code that ranks run for test_context.py: calls of torch's own function within contexts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.ranks import summed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from pyattn import distributed


def training_step(
    group: dist.ProcessGroup,
    layout: str | None,
    kwargs: dict[str, Any],
    how: str = "function",
    wrapped: Callable[..., Any] = lambda function: function,
) -> list[Tensor]:
    """The loss and the gradients of a layer that calls torch's own function, on parts unless layout is None.

    ``how``: "function" by its own name, or by way of its module: within "module", torch's, or in a "checkpoint".
    ``wrapped``: what the layer's function is turned into.
    """
    torch.manual_seed(0)
    layer: Any = torch.nn.Linear(16, 48).double()
    if how == "module":
        layer = torch.nn.MultiheadAttention(16, 4, batch_first=True).double()
    x, labels, mask = torch.randn(2, 11, 16).double(), torch.randn(2, 11, 16).double(), torch.rand(11, 11) < 0.7
    buffers = [x, labels, mask]

    def attended(x: Tensor) -> Tensor:
        if how == "module":
            hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
            return layer(x, x, x, attn_mask=hidden, is_causal=True, need_weights=False)[0]
        q, k, v = (t.unflatten(2, (4, 4)).transpose(1, 2) for t in layer(x).chunk(3, 2))
        masked = {} if kwargs.get("is_causal") else {"attn_mask": mask}
        of = scaled_dot_product_attention if how == "function" else functional.scaled_dot_product_attention
        return of(q, k, v, **kwargs, **masked).transpose(1, 2).flatten(2)

    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(attended, x, use_reentrant=False)

    run = wrapped(checkpointed if how == "checkpoint" else attended)

    def results() -> list[Tensor]:
        torch.manual_seed(dist.get_rank(group))
        out = run(x)
        value = (out - labels).square().sum()
        return [value.detach(), *torch.autograd.grad(value, list(layer.parameters()))]

    if layout is None:
        return results()
    mesh = DeviceMesh.from_group(group, "cpu")
    with distributed.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0], layout=layout):
        assert x.shape[1] < 11
        found = results()
    assert x.shape[1] == 11
    assert functional.scaled_dot_product_attention is scaled_dot_product_attention
    return [summed(t, group) for t in found]


def buffers(group: dist.ProcessGroup, whole: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Views of a tensor in a context and after it, and the tensor then."""
    mesh, found = DeviceMesh.from_group(group, "cpu"), []
    for view, dim in ((whole[:, ::2], 1), (whole.T, 0), (whole[:1].expand_as(whole), -1)):
        with distributed.context_parallel(mesh, buffers=[view], buffer_seq_dims=[dim]):
            inside = distributed.unshard(view, dim, group)
        found.append((inside, view, whole))
    leaf = torch.zeros(3, requires_grad=True)
    rule = r"buffers must not require gradients, got one of shape \(3,\) that does"
    with (
        pytest.raises(ValueError, match=rule),
        distributed.context_parallel(mesh, buffers=[view, leaf], buffer_seq_dims=[0, 0]),
    ):
        pass
    return found


def not_restored(group: dist.ProcessGroup, whole: Tensor) -> list[Tensor]:
    """Two buffers after a context: one that need not be whole again, and one that must."""
    mesh, found = DeviceMesh.from_group(group, "cpu"), [whole.clone(), whole.clone()]
    with distributed.context_parallel(mesh, buffers=found, buffer_seq_dims=[1, 1], no_restore_buffers={found[0]}):
        pass
    return found


def attended(group: dist.ProcessGroup, qkv: Sequence[Tensor], kwargs: dict[str, Any]) -> Tensor:
    """torch's function of the whole, with the generators of the ranks out of step."""
    torch.manual_seed(dist.get_rank(group))
    with distributed.context_parallel(DeviceMesh.from_group(group, "cpu")):
        out = scaled_dot_product_attention(*(distributed.shard(t, 2, group) for t in qkv), **kwargs)
    return distributed.unshard(out, 2, group)


def compiled(group: dist.ProcessGroup, how: str) -> list[list[Tensor]]:
    """:func:`training_step` as it is, and with its function in one graph."""
    graph = partial(torch.compile, fullgraph=True, backend="aot_eager")
    torch.compiler.reset()
    kwargs = {"is_causal": True, "dropout_p": 0.0 if how == "module" else 0.3}
    return [training_step(group, "zigzag", kwargs, how, *wrapped) for wrapped in ((), (graph,))]


def compiled_once(group: dist.ProcessGroup, whole: Tensor) -> list[list[Tensor]]:
    """A module of torch in contexts of two layouts, with parts of the same sizes: eager, and by one compiled function.

    Dynamo does not look into the module's function, so none of its guards sees what this calls.
    """
    torch.manual_seed(0)
    layer, mesh, found = torch.nn.MultiheadAttention(16, 4), DeviceMesh.from_group(group, "cpu"), list[list[Tensor]]()

    def call(x: Tensor) -> Tensor:
        hidden = torch.ones(len(x), len(x)).triu(1).bool()
        out: Tensor = layer(x, x, x, attn_mask=hidden, is_causal=True, need_weights=False)[0]
        return out.detach()

    torch.compiler.reset()
    graph = torch.compile(call, fullgraph=True, backend="aot_eager")
    for layout in ("zigzag", "contiguous"):
        x = whole.clone()
        with distributed.context_parallel(mesh, buffers=[x], buffer_seq_dims=[0], layout=layout):
            found.append([call(x), graph(x)])
    return found


def first_graph(rendezvous: str) -> str:
    """The first graph that a process compiles, in a context."""
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=0, world_size=1)
    graphs = list[str]()

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(str(module.graph))
        return module

    q = torch.zeros(1, 2, 4, 8)
    with distributed.context_parallel(DeviceMesh("cpu", [0])):
        torch.compile(lambda q: scaled_dot_product_attention(q, q, q), backend=backend)(q)
    return graphs[0]
