"""Promise: the FlexAttention adapter follows a BlockMask's mask_mod, compiles, and leaves GPUs to torch."""

import copy

import pytest
import torch
from support.assertions import refused
from support.cases import assert_equal
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree

from pyattn import attention
from pyattn.adapters.flex import (
    AuxRequest,
    alibi,
    and_masks,
    causal,
    create_block_mask,
    document,
    flex_attention,
    sliding_window,
)
from pyattn.adapters.flex.masks.block_mask import EVALUATED

IDS = torch.tensor([0] * 20 + [1] * 30 + [2] * 14)


def tensors(batch=2, heads=2):
    return tuple(torch.randn(batch, heads, 64, 16) for _ in range(3))


def blocks(mask_mod, batch=None, make=create_block_mask):
    return make(mask_mod, batch, None, 64, 64, device="cpu", BLOCK_SIZE=16)


def own_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def own_score(score, b, h, q_idx, kv_idx):
    return score * 2


def test_rows_of_a_mask_without_its_mask_mod():
    """torch drops the mask_mod when a part of a mask may have another meaning."""
    with pytest.raises(RuntimeError, match="Cannot use mask_mod from a sliced BlockMask"):
        flex_attention(*tensors(), block_mask=blocks(causal())[:, :, :])


@pytest.mark.parametrize("heads", [1, 2])
def test_blocks_without_a_mask_mod(heads):
    """Listed blocks, partial or full, are visible as a whole, as in torch's kernels; a query may see none."""
    q, k, v = tensors()
    columns = torch.tensor([[0, 1, 2, 3], [1, 3, 0, 2], [3, 0, 1, 2], [2, 0, 3, 1]], dtype=torch.int32)
    columns = torch.stack([columns, columns.flip(0)])[None, :heads]
    part, full = (torch.tensor(n, dtype=torch.int32).expand(1, heads, -1) for n in ([1, 2, 1, 0], [0, 1, 2, 0]))
    seen = torch.zeros(1, heads, 4, 4, dtype=torch.bool)
    for number, order in ((part, columns), (full, columns.flip(-1))):
        first = torch.arange(4) < number[..., None]
        seen |= torch.zeros_like(seen).scatter(-1, order.long(), first)
    block_mask = BlockMask.from_kv_blocks(part.clone(), columns, full, columns.flip(-1), 16)
    mask = seen.repeat_interleave(16, 2).repeat_interleave(16, 3)
    out, lse = flex_attention(q, k, v, block_mask=block_mask, return_lse=True)
    assert_equal((out, lse), attention(q, k, v, causal=False, mask=mask, return_lse=True))
    assert (lse[:, 0, 48:] == -torch.inf).all()
    evaluated = EVALUATED[block_mask]
    assert torch.equal(flex_attention(q, k, v, block_mask=block_mask), out)
    assert EVALUATED[block_mask] is evaluated
    block_mask.kv_num_blocks[:, :, 0] = 2
    mask[:, 0, :16, 16:32] = mask[:, -1, :16, :16] = True
    assert torch.equal(flex_attention(q, k, v, block_mask=block_mask), attention(q, k, v, causal=False, mask=mask))


def test_blocks_that_say_something_else():
    """torch's GPU kernels would follow the blocks, and its CPU formula the mask_mod."""
    rule = (
        "^pyattn: block_mask must list every block that its mask_mod shows, and as full only what it shows entirely, "
    )
    narrow, wide = blocks(sliding_window(3)), blocks(causal(), make=torch_flex.create_block_mask)
    narrow.mask_mod = causal()
    with pytest.raises(ValueError, match=rule):
        flex_attention(*tensors(), block_mask=narrow)
    wide.mask_mod = sliding_window(3)
    with pytest.raises(ValueError, match=rule):
        flex_attention(*tensors(), block_mask=wide)
    first_sequence = blocks(document(torch.stack([IDS, IDS.flip(0)])), make=torch_flex.create_block_mask)
    with pytest.raises(ValueError, match=rule):
        flex_attention(*tensors(), block_mask=first_sequence)
    too_many = create_block_mask(causal(), None, None, 64, 64, "cpu", 16, separate_full_blocks=False)
    too_many.mask_mod = sliding_window(3)
    q, k, v = tensors()
    expected = attention(q, k, v, window=(3, 0))
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=too_many), expected)
    few = BlockMask.from_kv_blocks(
        torch.ones(1, 1, 2, dtype=torch.int32),
        torch.zeros(1, 1, 2, 2, dtype=torch.int32),
        BLOCK_SIZE=16,
        mask_mod=causal(),
        seq_lengths=(64, 64),
    )
    with refused(ValueError, "block_mask must have (4, 4) blocks, got kv_indices of "):
        flex_attention(q, k, v, block_mask=few)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [create_block_mask, torch_flex.create_block_mask], ids=["ours", "torch"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled(make, dynamic):
    slopes = torch.rand(2, requires_grad=True)

    def step(q, k, v, block_mask):
        return flex_attention(q, k, v, alibi(slopes), block_mask, return_aux=AuxRequest(lse=True))

    backend = "eager" if dynamic else "aot_eager"
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic)
    block_mask = blocks(and_masks(causal(), document(IDS)), make=make)
    results = []
    inputs = [t.requires_grad_() for t in tensors()]
    for function in (step, compiled):
        out, aux = function(*inputs, copy.copy(block_mask))
        results.append((out, aux.lse, *torch.autograd.grad(out.sum() + aux.lse.sum(), [*inputs, slopes])))
    assert_equal(*results)
    wrong = blocks(sliding_window(3), make=torch_flex.create_block_mask)
    wrong.mask_mod = block_mask.mask_mod
    with refused(RuntimeError, "block_mask must list every block"):
        compiled(*inputs, wrong)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_mask_made_in_a_compiled_function():
    mask_mod = and_masks(causal(), document(IDS))

    @torch.compile(backend="eager", fullgraph=True)
    def step(q, k, v):
        return flex_attention(q, k, v, block_mask=blocks(mask_mod))

    inputs = tensors()
    assert torch.equal(step(*inputs), flex_attention(*inputs, block_mask=blocks(mask_mod)))
    with pytest.raises(Exception, match=r"document must be called outside of torch\.compile"):
        torch.compile(lambda ids: flex_attention(*inputs, block_mask=blocks(document(ids))), backend="eager")(IDS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_positions_that_change_compile_once():
    at, inputs = torch.tensor(0), tensors()
    base = create_block_mask(sliding_window(-1, -1), None, None, 64, 64, device="cpu", separate_full_blocks=False)
    base.mask_mod = causal(at)
    step = torch.compile(flex_attention, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for position in (0, 3, -2):
            at.fill_(position)
            expected = attention(*inputs, q_offset=position)
            torch.testing.assert_close(step(*inputs, block_mask=base), expected)


def test_masks_that_moved():
    inputs, block_mask = tensors(), blocks(and_masks(causal(), document(IDS)))
    expected = flex_attention(*inputs, block_mask=block_mask)
    for moved in (block_mask.to("cpu"), copy.deepcopy(block_mask), _pytree.tree_map(lambda t: t, block_mask)):
        assert torch.equal(flex_attention(*inputs, block_mask=moved), expected)


def test_documents_stay_what_they_are():
    inputs, ids = tensors(), IDS.clone()
    mask_mod = document(ids)
    expected = flex_attention(*inputs, block_mask=blocks(mask_mod))
    ids.zero_()
    block_mask = blocks(mask_mod, make=torch_flex.create_block_mask)
    assert torch.equal(flex_attention(*inputs, block_mask=block_mask), expected)


def test_plain_causal_has_the_bits_of_attention():
    inputs = tensors()
    assert torch.equal(flex_attention(*inputs, block_mask=blocks(causal())), attention(*inputs))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(flex_attention(*inputs, block_mask=blocks(causal())), attention(*inputs))


def test_other_devices_are_torchs(monkeypatch):
    calls = []
    for name in ("flex_attention", "create_block_mask"):
        monkeypatch.setattr(torch_flex, name, lambda *given, **named: calls.append((given, named)))
    q, k, v = (t.to("meta") for t in tensors())
    flex_attention(q, k, v, own_score, "mask", 0.5, True, True, {"num_warps": 4})
    create_block_mask(own_mask, None, 4, 64, 32, "meta", 64, compute_dq_write_order=True)
    create_block_mask(own_mask, 2, None, 64, 32, "meta", (64, 32), True, False)
    meta = torch.device("meta")
    assert calls == [
        ((q, k, v, own_score, "mask", 0.5, True, True, {"num_warps": 4}), {"return_aux": None}),
        ((own_mask, None, 4, 64, 32, meta, 64, False), {"compute_dq_write_order": True}),
        ((own_mask, 2, None, 64, 32, meta, (64, 32), True), {"separate_full_blocks": False}),
    ]
