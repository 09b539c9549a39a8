"""Backends of torch.compile for the tests of pyattn.adapters.scratch."""

from collections.abc import Callable
from typing import Any

import torch
from support.assertions import assert_as_exact
from torch import Tensor, fx

from pyattn.adapters.scratch import graphs


def attention_calls(graph: fx.GraphModule) -> int:
    """How many calls of attention took the place of written-out code, also in what checkpoints compute."""
    made = [part for part in graph.modules() if isinstance(part, fx.GraphModule)]
    return sum(node.name.startswith("pyattn_attention") for part in made for node in part.graph.nodes)


def replacing(compiler: str = "aot_eager", counts: list[int] | None = None) -> Callable[..., Any]:
    """``compiler`` after attention was replaced, noting in ``counts`` how many calls each graph has."""

    def compiled(graph: fx.GraphModule, inputs: Any) -> Any:
        made = graphs.replaced(graph)
        if counts is not None:
            counts.append(attention_calls(made))
        return torch._dynamo.lookup_backend(compiler)(made, inputs)

    return compiled


def check_rounding(code: Callable[..., Tensor], tensors: list[Tensor], counts: list[int]) -> None:
    """Compiled ``code`` of ``tensors`` is about as close to that of float64 as plain code."""
    tensors = [x.detach() for x in tensors]
    exact = code(*(x.double() for x in tensors))
    out = torch.compile(code, backend=replacing(counts=counts), fullgraph=True)(*tensors)
    assert out.dtype == tensors[0].dtype
    assert_as_exact(out, code(*tensors), exact)
