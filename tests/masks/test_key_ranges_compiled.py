"""Promise: KeyRanges enter compiled and exported graphs, are made in them, and work in transforms and threads."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.assertions import assert_close, graph_of
from support.cases import assert_equal, newer_compiler
from torch import Tensor, nn
from torch.autograd import forward_ad

from pyattn import attention, masks
from pyattn.masks import KeyRanges

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own warnings while it traces

ROWS = 6
MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "documents": lambda n: masks.documents([4, 2]),
    "chunked": lambda n: masks.chunked(ROWS, 4),
    "padding": lambda n: masks.padding(n, ROWS),
    "prefix_lm": lambda n: masks.prefix_lm(n, ROWS),
    "own": lambda n: KeyRanges(torch.stack([n * 0, n], -1)[:, None].expand(-1, ROWS, -1), whole=True),
    "both": lambda n: masks.within(masks.prefix_lm(n, ROWS), masks.chunked(ROWS, 4)),
}
"""Functions that make ranges from two lengths."""

CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda r: r,
    "slice": lambda r: r[:1, -ROWS:],
    "cat": lambda r: torch.cat([r[:1], r[:1]]),
    "int32": lambda r: r.to(torch.int32),
    "shifted": lambda r: (r - 1).clamp(0, ROWS),
}

each_made = pytest.mark.parametrize("made", MADE)


def lengths() -> Tensor:
    return torch.tensor([2, 5])


def rows() -> tuple[Tensor, ...]:
    return torch.randn(3, 2, 1, ROWS, 4).unbind(0)


@pytest.mark.parametrize(
    ("made", "change"),
    [(made, change) for made in MADE for change in CHANGED if made == "both" or change == "as it is"],
)
@pytest.mark.parametrize("inside", [False, True])
def test_compile(made: str, change: str, inside: bool) -> None:
    """Given, or made inside: eager and compiled agree on result, type and gradients; on types after every change."""

    def call(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> tuple[Tensor, list[Tensor]]:
        ranges = MADE[made](given) if inside else given
        changed = [f(ranges) for f in CHANGED.values()]
        return attention(q, k, v, causal=False, key_ranges=CHANGED[change](ranges)), changed

    if inside and made == "documents":
        return  # their number is known only when the lengths are read
    given = lengths() if inside else MADE[made](lengths())
    q, k, v = rows()
    q.requires_grad_()
    compiled = graph_of(call)
    for _ in range(2):
        (out, changed), (expected, same) = (f(q, k, v, given) for f in (compiled, call))
        assert torch.equal(out, expected)
        assert_equal(changed, same)
        assert list(map(type, changed)) == list(map(type, same))
        assert torch.equal(*(torch.autograd.grad(x.sin().sum(), q)[0] for x in (out, expected)))
        ranges = dict(zip(CHANGED, changed, strict=True))[change]
        assert torch.equal(attention(q, k, v, causal=False, key_ranges=ranges), expected)


@pytest.mark.parametrize("made", ["padding", "prefix_lm", "own", "both"])
def test_from_graph_to_graph(made: str) -> None:
    """One graph makes ranges, another takes them."""
    q, _, _ = rows()

    def call(q: Tensor, n: Tensor) -> Tensor:
        ranges = MADE[made](n)
        torch._dynamo.graph_break()
        return attention(q, q, q, causal=False, key_ranges=ranges)

    compiled = torch.compile(call, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(q, lengths()), call(q, lengths()))


@newer_compiler
@pytest.mark.parametrize("made", ["prefix_lm", "own", "both"])
def test_compiled_functions_refuse(made: str) -> None:
    """Whether the ranges are given, made inside, or a constant."""
    given = MADE[made](lengths())
    calls = [
        (lambda q, r: attention(q, q, q, key_ranges=r), given),
        (lambda q, n: attention(q, q, q, key_ranges=MADE[made](n)), lengths()),
        (lambda q, _: attention(q, q, q, key_ranges=given), lengths()),
    ]
    for call, argument in calls:
        with pytest.raises(ValueError, match=r"need causal=False, got causal=True"):
            torch.compile(call, backend="eager")(rows()[0], argument)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"need causal=False, got causal=True"):
            torch.compile(call, backend="eager", fullgraph=True)(rows()[0], argument)


def test_one_graph_for_all_lengths() -> None:
    compiled = torch.compile(
        lambda q, r: attention(q, q, q, causal=False, key_ranges=r[:, :]), dynamic=True, fullgraph=True
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seqlen in (5, 9, 30):
            q, ranges = torch.randn(1, 2, seqlen, 8), masks.prefix_lm(3, seqlen)
            expected = attention(q, q, q, causal=False, key_ranges=ranges)
            assert_close(compiled(q, ranges), expected, 0)


class Given(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
        return attention(q, k, v, causal=False, key_ranges=ranges[:, -ROWS:])


class Kept(Given):
    def __init__(self, ranges: Tensor) -> None:
        super().__init__()
        self.register_buffer("ranges", ranges)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().forward(q, k, v, self.ranges)


class Made(Given):
    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make = make

    def forward(self, q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
        return super().forward(q, k, v, self.make(n))


@pytest.mark.parametrize("made", ["padding", "prefix_lm", "both"])
@pytest.mark.parametrize("strict", [False, True])
def test_export_and_trace(made: str, strict: bool) -> None:
    qkv, given = rows(), MADE[made](lengths())
    modules: list[tuple[nn.Module, tuple[Any, ...]]] = [
        (Given(), (*qkv, given)),
        (Kept(given), qkv),
        (Made(MADE[made]), (*qkv, lengths())),
    ]
    for module, inputs in modules:
        expected = module(*inputs)
        assert torch.equal(torch.export.export(module, inputs, strict=strict).module()(*inputs), expected)
        if not strict:
            assert torch.equal(torch.jit.trace(module, inputs)(*inputs), expected)


@each_made
def test_transforms(made: str) -> None:
    """Transforms of the queries with ranges as a constant, and of the ranges themselves."""
    q, k, v = (t.double() for t in rows())
    ranges = MADE[made](lengths()).expand(2, -1, -1)
    bare = ranges.as_subclass(Tensor)

    def call(q: Tensor, r: Tensor) -> Tensor:
        return attention(q, k, v, causal=False, key_ranges=r)

    def each(q: Tensor, r: Tensor) -> Tensor:
        return attention(q[None], k[:1], v[:1], causal=False, key_ranges=r[None])

    def tangent(r: Tensor) -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(call(forward_ad.make_dual(q, q.sin()), r)).tangent

    for function in (
        lambda r: torch.func.grad(lambda q: call(q, r).sin().sum())(q),
        lambda r: torch.func.jvp(lambda q: call(q, r), (q,), (q.sin(),))[1],
        lambda r: torch.vmap(lambda q: call(q, r))(torch.stack([q, q.cos()])),
        lambda r: torch.vmap(each)(q, r),
        tangent,
    ):
        assert torch.equal(function(ranges), function(bare))


def test_threads() -> None:
    ranges, (q, k, v) = masks.prefix_lm(3, ROWS), torch.randn(3, 1, 1, ROWS, 4)
    expected, found = attention(q, k, v, causal=False, key_ranges=ranges), []

    def work() -> None:
        found.extend(attention(q, k, v, causal=False, key_ranges=ranges[:, :ROWS].clone()) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200
    assert all(torch.equal(out, expected) for out in found)
