"""Promise: compiled code follows the switch, whenever it was compiled, and is compiled once per switch position."""

from typing import Any

import pytest
import torch
from support.adapters.gradients import with_gradients
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention  # bound before the switch is on, as in models

from pyattn.adapters.sdpa import counts, disable, enable, enabled, is_enabled, reset_counts

compiled_graphs: list[bool] = []
"""For each compiled graph, whether the switch was on."""


def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    compiled_graphs.append(is_enabled())
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch.compiler.reset()
    compiled_graphs.clear()
    reset_counts()
    yield
    disable()
    torch.compiler.reset()
    reset_counts()


class Attention(nn.Module):
    """All instances share one forward, so one code object."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 8)).unbind(-2)
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def with_a_break(x: Tensor) -> Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return scaled_dot_product_attention(y, y, y)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


MADE = {"a module": Attention, "torch's encoder": encoder, "after a graph break": lambda: with_a_break}

NATIVE = {"pyattn::attention_forward", "pyattn::attention_backward"}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it from tensors that cross a graph break
@pytest.mark.parametrize(
    ("what", "first"),
    [("a module", False), ("a module", True), ("torch's encoder", False), ("after a graph break", True)],
)
def test_compiled_code_follows_the_switch(what, first):
    """Another instance of the same class follows too: Dynamo keys compiled code by code object."""
    x = torch.randn(2, 6, 8)
    pairs = [(plain, torch.compile(plain, backend=backend)) for plain in (MADE[what](), MADE[what]())]
    for on in (first, not first, first, not first):
        (enable if on else disable)()
        assert ("pyattn" in torch.compiler.config.cache_key_tag) == on, "or the cache on disk would mix the two up"
        for plain, compiled in pairs:
            with torch.profiler.profile() as record:
                ours = with_gradients(compiled, x)
            native = {event.key for event in record.key_averages() if event.key.startswith("pyattn::")}
            assert native >= NATIVE if on else not native
            torch.testing.assert_close(ours, with_gradients(plain, x))
    taken, traced, by_torch = counts()
    assert taken == 4, "the plain calls"
    assert traced > 0
    assert by_torch == {}


def test_each_position_is_compiled_once():
    x = torch.randn(2, 6, 8)
    function = torch.compile(Attention(), backend=backend, fullgraph=True)
    for _ in range(5):
        function(x)
        with enabled():
            function(x)
            with enabled():
                function(x)
    assert compiled_graphs == [False, True]


def test_code_without_attention_runs_on():
    """It is recompiled once, because Dynamo keeps no record of what a graph calls."""
    function = torch.compile(lambda x: x.sin() + 1, backend=backend)
    x = torch.randn(3)
    for _ in range(3):
        with enabled():
            torch.testing.assert_close(function(x), x.sin() + 1)
        torch.testing.assert_close(function(x), x.sin() + 1)
    assert len(compiled_graphs) == 2


def test_a_torch_that_hides_its_compiled_code_is_a_warning(monkeypatch):
    """The names belong to torch and may change; the switch itself then still works."""
    compiled = torch.compile(scaled_dot_product_attention, backend=backend)
    compiled(*torch.randn(3, 1, 2, 8, 4))
    monkeypatch.delattr("torch._dynamo.eval_frame._debug_get_cache_entry_list")
    with pytest.warns(UserWarning, match="^pyattn: with torch .* torch.compiler.reset"):
        enable()
    scaled_dot_product_attention(*torch.randn(3, 1, 2, 8, 4))
    assert counts().taken == 1
    with pytest.warns(UserWarning, match="^pyattn: with torch .* torch.compiler.reset"):
        disable()
