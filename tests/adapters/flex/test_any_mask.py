"""Promise: on a CPU, any mask_mod is evaluated exactly, as up to 4 intervals a row where it consists of them."""

import copy

import pytest
import torch
from support.adapters.any_masks import HOLES, INTERVALS, LENGTH, SEVERAL
from support.adapters.gradients import assert_accurate
from support.cases import exact_cuts, newer_compiler
from torch.nn.attention import flex_attention as torch_flex
from torch.utils import _pytree

from pyattn import reference
from pyattn.adapters.flex import AuxRequest, alibi, create_block_mask, flex_attention, softcap
from pyattn.adapters.flex.masks.block_mask import EVALUATED, mask_in
from pyattn.adapters.flex.native_forms import key_ranges_of
from pyattn.cli.timing import peak_memory

MASKS = INTERVALS | SEVERAL | HOLES
every_mask = pytest.mark.parametrize("name", MASKS)


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch):
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


def inputs(dtype=torch.float64):
    return tuple(torch.randn(2, heads, LENGTH, 8).to(dtype) for heads in (4, 2, 2))


def blocks(mask_mod, block_size=16, make=create_block_mask, heads=4):
    return make(mask_mod, 2, heads, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=block_size)


@every_mask
@pytest.mark.parametrize("make", [create_block_mask, torch_flex.create_block_mask], ids=["ours", "torch's"])
def test_masks(name, make):
    tensors, block_mask = inputs(), blocks(MASKS[name], make=make)
    asked = {"enable_gqa": True, "return_aux": AuxRequest(lse=True)}
    ours, theirs = (f(*tensors, None, block_mask, **asked) for f in (flex_attention, torch_flex.flex_attention))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    mask = mask_in(block_mask, 2, 4)
    assert (not mask.holes) == (name not in HOLES)
    if not mask.holes:
        assert (key_ranges_of(mask, LENGTH, LENGTH, tensors[0].device).dim() == 4) == (name in SEVERAL)
    for holes in mask.holes:
        assert (holes.sizes[0] == 2) == (name in ("heads and sequences", "heads of TorchScript"))
        assert (holes.sizes[1] == 4) == ("heads" in name)


@every_mask
@pytest.mark.parametrize("block_size", [128, (16, 32), (100, 9)], ids=str)
def test_blocks_are_torchs(name, block_size):
    ours, theirs = (blocks(MASKS[name], block_size, make) for make in (create_block_mask, torch_flex.create_block_mask))
    for mine, other in zip(ours.as_tuple()[:-1], theirs.as_tuple()[:-1], strict=True):
        assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["prefix", "rows of documents", "reaches of heads", "neighbourhood"])
@pytest.mark.parametrize("score", [None, "softcap", "alibi"])
def test_gradients(dtype, name, score):
    """By the rule of yardstick.py; torch's own function has no gradients on a CPU."""
    block_mask = blocks(MASKS[name])

    def native(q, k, v, slopes):
        score_mod = {"softcap": softcap(2.0), "alibi": alibi(slopes, 3)}.get(score)
        return flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True)

    def plain(q, k, v, slopes):
        scores = {"softcap": {"softcap": 2.0}, "alibi": {"alibi_slopes": slopes, "q_offset": 3}}
        mask = torch_flex.create_mask(MASKS[name], 2, 4, LENGTH, LENGTH, device="cpu")
        return reference.attention(q, k, v, causal=False, mask=mask, **scores.get(score, {}))

    assert_accurate(native, plain, *inputs(dtype), torch.rand(4).to(dtype))


def test_blocks_for_one_head():
    """The mask is evaluated for all heads of query; blocks made for head 0 must cover it."""
    q, k, v = inputs()
    same = blocks(SEVERAL["neighbourhood"], heads=None)
    expected = flex_attention(q, k, v, block_mask=blocks(SEVERAL["neighbourhood"]), enable_gqa=True)
    assert torch.equal(flex_attention(q, k, v, block_mask=same, enable_gqa=True), expected)
    with pytest.raises(ValueError, match=r"^pyattn: block_mask must list every block"):
        flex_attention(q, k, v, block_mask=blocks(HOLES["reaches of heads"], heads=None), enable_gqa=True)


class Counted:
    """A mask whose reach can change in several ways, and how often many pairs were evaluated."""

    def __init__(self):
        self.reach, self.step, self.table, self.both, self.runs = torch.tensor(9), 3, torch.arange(LENGTH), True, 0

    def __call__(self, b, h, q_idx, kv_idx):
        self.runs += 1
        near = (self.table[q_idx] - kv_idx).abs() < self.reach
        step = (q_idx - kv_idx) % self.step == 0
        return near & step if self.both else near


CHANGES = {
    "in place": lambda mask: mask.reach.fill_(20),
    "another tensor": lambda mask: setattr(mask, "table", mask.table.flip(0)),
    "a number": lambda mask: setattr(mask, "step", 2),
    "another branch": lambda mask: setattr(mask, "both", False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_masks_are_evaluated_when_they_change(change):
    mask_mod, tensors = Counted(), inputs()
    everything = blocks(torch_flex.noop_mask)
    block_mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, "cpu", 128, separate_full_blocks=False)
    evaluated = EVALUATED[block_mask]
    for _ in range(2):
        mask_mod.runs = 0
        flex_attention(*tensors, block_mask=block_mask, enable_gqa=True)
        assert mask_mod.runs == 1  # a single pair
        assert EVALUATED[block_mask] is evaluated
    CHANGES[change](mask_mod)
    expected, _ = torch_flex.flex_attention(
        *tensors, block_mask=block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    out = flex_attention(*tensors, block_mask=block_mask, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(out, flex_attention(*tensors, block_mask=everything, enable_gqa=True))


@exact_cuts
def test_a_mask_cut_to_shorter_lengths():
    """Full blocks then extend past the last query and key."""

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= 16) | (kv_idx % 2 == 0)

    tensors, block_mask = inputs(), create_block_mask(mask_mod, 2, 4, 80, 80, "cpu", 16)._adjust(LENGTH, LENGTH)
    ours, theirs = (f(*tensors, None, block_mask, enable_gqa=True) for f in (flex_attention, torch_flex.flex_attention))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_masks_that_moved():
    tensors, block_mask = inputs(), blocks(SEVERAL["rows of documents"])
    expected = flex_attention(*tensors, block_mask=block_mask, enable_gqa=True)
    for moved in (block_mask.to("cpu"), copy.deepcopy(block_mask), _pytree.tree_map(lambda t: t, block_mask)):
        assert torch.equal(flex_attention(*tensors, block_mask=moved, enable_gqa=True), expected)


def test_memory():
    """Blocks of rows are evaluated: 8,192 x 8,192 pairs would take 64 MB as bits, 512 MB as integers."""
    peak = peak_memory(
        lambda: create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 99), None, None, 8192, 8192, "cpu")
    )
    assert peak < 25e6


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (0, 0)], ids=str)
def test_empty(lengths):
    q, k, v = torch.randn(2, 2, lengths[0], 8), *torch.randn(2, 2, 2, lengths[1], 8)
    for mask_mod in (INTERVALS["causal"], HOLES["checkerboard"]):
        block_mask = create_block_mask(mask_mod, None, None, *lengths, device="cpu")
        out, lse = flex_attention(q, k, v, block_mask=block_mask, return_lse=True)
        assert out.shape == q.shape
        assert not out.any()
        assert (lse == float("-inf")).all()


@pytest.mark.parametrize("name", ["padding", "nothing", "dilated"])
def test_a_mask_evaluated_in_inference_mode(name):
    """Training uses it afterwards."""
    with torch.inference_mode():
        block_mask = blocks((INTERVALS | HOLES)[name], 128)
        flex_attention(*inputs(), block_mask=block_mask, enable_gqa=True)
    tensors = [t.requires_grad_() for t in inputs()]
    flex_attention(*tensors, block_mask=block_mask, enable_gqa=True).sum().backward()


@newer_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
def test_compiled():
    """The mask of a BlockMask made by torch is evaluated outside of the graph, so changes in place take effect."""
    reach, tensors = torch.tensor(5), [t.requires_grad_() for t in inputs()]

    def mask_mod(b, h, q_idx, kv_idx):
        return ((q_idx - kv_idx).abs() < reach) & (kv_idx % 2 == 0)

    block_mask = blocks(mask_mod, 128, torch_flex.create_block_mask)

    def step(q, k, v):
        return flex_attention(q * 2, k, v, block_mask=block_mask, enable_gqa=True) * 2

    compiled = torch.compile(step, backend="aot_eager")
    for size in (5, 30):
        reach.fill_(size)
        ours, expected = compiled(*tensors), step(*tensors)
        assert torch.equal(ours, expected)
        assert torch.equal(
            torch.autograd.grad(ours.sum(), tensors[0])[0], torch.autograd.grad(expected.sum(), tensors[0])[0]
        )
    with pytest.raises(
        Exception,
        match="pyattn: mask_mods and score_mods of your own must run outside of compiled graphs, got fullgraph=True",
    ):
        torch.compile(step, backend="eager", fullgraph=True)(*inputs())
    torch.compiler.reset()  # flex_attention was compiled as a separate frame, where other tests allow one graph
