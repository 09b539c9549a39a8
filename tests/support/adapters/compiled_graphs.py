"""Backends of torch.compile for the tests of pyattn.adapters.scratch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pyattn.adapters.scratch import graphs


def attention_calls(graph: fx.GraphModule) -> int:
    """How many calls of attention took the place of written-out code."""
    return sum(node.name.startswith("pyattn_attention") for node in graph.graph.nodes)


def replacing(compiler: str = "aot_eager", counts: list[int] | None = None) -> Callable[..., Any]:
    """``compiler`` after attention was replaced, noting in ``counts`` how many calls each graph has."""

    def compiled(graph: fx.GraphModule, inputs: Any) -> Any:
        made = graphs.replaced(graph)
        if counts is not None:
            counts.append(attention_calls(made))
        return torch._dynamo.lookup_backend(compiler)(made, inputs)

    return compiled
