"""Promise: a mask_mod of the user's own is one operator of a compiled graph, and is evaluated again when it changes."""

import copy
import functools

import pytest
import torch
from support.adapters.any_masks import HOLES, INTERVALS, LENGTH
from support.cases import newer_compiler
from torch.nn.attention import flex_attention as torch_flex

from pyattn.adapters.flex import create_block_mask, flex_attention

pytestmark = [
    newer_compiler,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning"),
]


def blocks(mask_mod, block_size=16):
    return create_block_mask(mask_mod, 2, 4, LENGTH, LENGTH, "cpu", block_size)


def inputs():
    return [torch.randn(2, heads, LENGTH, 8, requires_grad=True) for heads in (4, 2, 2)]


def step(q, k, v, block_mask):
    return flex_attention(q * 2, k, v, block_mask=block_mask, enable_gqa=True) * 2


def compiled(backend="eager"):
    torch.compiler.reset()
    return torch.compile(step, backend=backend, fullgraph=True)


def assert_same(function, tensors, block_mask):
    ours, expected = function(*tensors, block_mask), step(*tensors, block_mask)
    assert torch.equal(ours, expected)
    for x, y in zip(*(torch.autograd.grad(out.sum(), tensors) for out in (ours, expected)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", ["padding", "nothing", "heads and sequences", "dilated", "heads of TorchScript"])
def test_masks(name):
    assert_same(compiled(), inputs(), blocks((INTERVALS | HOLES)[name]))


def test_changes_show():
    """Between calls, in place; a mask with holes may also become one of intervals."""
    reach, step, tensors = torch.tensor(5), torch.tensor(2), inputs()
    block_mask, function = (
        blocks(lambda b, h, i, j: ((i - j).abs() < reach) & (j % step == 0), 128),
        compiled("aot_eager"),
    )
    for size, number in ((5, 2), (30, 2), (30, 1)):
        reach.fill_(size), step.fill_(number)
        assert_same(function, tensors, block_mask)


def test_documents_of_each_batch():
    """New masks of one function: no graph is compiled for the third."""

    def of(ids):
        return lambda b, h, q_idx, kv_idx: (ids[b, q_idx] == ids[b, kv_idx]) & (q_idx >= kv_idx)

    function, tensors = compiled(), inputs()
    for number in range(4):
        block_mask = blocks(of(torch.randint(3, (2, LENGTH))))
        with torch._dynamo.config.patch(error_on_recompile=number > 1):
            assert_same(function, tensors, block_mask)


def test_what_a_graph_can_not_follow():
    reach, tensors = torch.tensor(5), inputs()
    block_mask = blocks(lambda b, h, i, j: ((i - j).abs() < reach) & (j >= 0), 128)
    assert_same(function := compiled(), tensors, block_mask)
    block_mask.mask_mod = lambda b, h, i, j: (i >= j) & (j % 3 == 0)
    with pytest.raises(Exception, match="must run outside of compiled graphs, got fullgraph=True"):
        function(*tensors, block_mask)
    for other in (
        torch_flex.create_block_mask(HOLES["dilated"], 2, 4, LENGTH, LENGTH, "cpu"),
        copy.deepcopy(blocks(HOLES["dilated"])),
    ):
        with pytest.raises(Exception, match="must run outside of compiled graphs, got fullgraph=True"):
            function(*tensors, other)
    block_mask = blocks(HOLES["dilated"])
    assert_same(function, tensors, block_mask)
    block_mask.mask_mod = functools.partial(HOLES["dilated"], step=2)
    with pytest.raises(RuntimeError, match="pyattn: block_mask must keep its mask_mod in compiled code, got functools"):
        function(*tensors, block_mask)
    holes = torch.zeros(LENGTH, dtype=torch.bool)
    block_mask = blocks(lambda b, h, i, j: ~holes[j] & (i >= 0), 128)
    assert_same(function, tensors, block_mask)
    holes[30:40] = True
    with pytest.raises(RuntimeError, match="at most as many intervals as when the function was compiled, 1, got 2"):
        function(*tensors, block_mask)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_changes_within_the_graph(compiler):
    """The mask is that of the place in the graph, before and after a change."""
    reach, tensors = torch.tensor(5), inputs()
    block_mask = blocks(lambda b, h, i, j: ((i - j).abs() < reach) & (j % 2 == 0), 128)

    def changes(q, k, v):
        first = step(q, k, v, block_mask)
        reach.add_(9)
        return first + 2 * step(q, k, v, block_mask)

    torch.compiler.reset()
    function = torch.compile(changes, backend=compiler, fullgraph=True)
    for _ in range(3):
        found = []
        for f in (function, changes):
            out = f(*tensors)
            found.append((out, *torch.autograd.grad(out.sum(), tensors)))
            reach.sub_(9)
        assert all(map(torch.equal, *found))
        reach.data += 2
