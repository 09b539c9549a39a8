"""Promise: on a CPU, FlexAttention's common masks and scores mean what they mean in torch, gradients included."""

import copy
import functools

import pytest
import torch
from support.adapters.gradients import assert_accurate
from support.cases import exact_cuts
from torch.nn.attention import flex_attention as torch_flex

from pyattn import reference
from pyattn.adapters.flex import (
    AuxRequest,
    alibi,
    and_masks,
    causal,
    create_block_mask,
    document,
    flex_attention,
    or_masks,
    prefix_lm,
    sliding_window,
    softcap,
)
from pyattn.adapters.flex.native_forms import mask_of, score_of

LENGTHS = [(90, 90), (40, 90), (90, 60)]

ONE_ROW = torch.tensor([4] * 20 + [1] * 30 + [2] + [0] * 39)
ROWS = torch.stack([ONE_ROW, torch.arange(90) // 7]).to(torch.int32)

MASKS = {
    "causal": lambda: causal(),
    "ahead": lambda: causal(5),
    "behind": lambda: causal(-17),
    "anywhere": lambda: causal(torch.tensor([3, -9])),
    "one offset": lambda: causal(torch.tensor(4, dtype=torch.int32)),
    "window": lambda: sliding_window(20),
    "both sides": lambda: sliding_window(6, 10, offset=3),
    "no left end": lambda: sliding_window(-1, 10),
    "no ends": lambda: sliding_window(-1, -1),
    "documents": lambda: document(ONE_ROW),
    "rows of documents": lambda: document(ROWS),
    "prefix": lambda: prefix_lm(50),
    "no prefix": lambda: prefix_lm(0),
    "prefixes": lambda: prefix_lm(torch.tensor([10, 70])),
    "causal documents": lambda: and_masks(causal(), document(ROWS)),
    "all of them": lambda: and_masks(sliding_window(-1, 9, 3), sliding_window(30, -1, 3), document(ONE_ROW), causal(3)),
    "two places": lambda: and_masks(causal(2), sliding_window(12, 30, -5), prefix_lm(3)),
    "nested": lambda: and_masks(and_masks(document(ROWS), causal()), and_masks(prefix_lm(torch.tensor([80, 20])))),
    "nothing hidden": lambda: and_masks(),
    "a union": lambda: or_masks(causal(), sliding_window(4, 9)),
}
every_mask = pytest.mark.parametrize("name", MASKS)

SCORES = {
    "softcap": lambda: softcap(2.0),
    "alibi": lambda: alibi(torch.rand(4)),
    "alibi elsewhere": lambda: alibi(torch.rand(2, 4), torch.tensor([1, 5])),
}


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch):
    """Runs torch's formula uncompiled: by default it is traced for each new mask, which takes a second."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


def inputs(lengths, dtype=torch.float64, head_dim=16):
    (seqlen_q, seqlen_k) = lengths
    sizes = (4, seqlen_q, head_dim), (2, seqlen_k, head_dim), (2, seqlen_k, 9)
    return tuple(torch.randn(2, *size).to(dtype) for size in sizes)


def by_torch(tensors, score_mod, block_mask):
    return torch_flex.flex_attention(*tensors, score_mod, block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True))


def assert_as_torch(tensors, score_mod, block_mask, tolerance=1e-12):
    out, aux = flex_attention(*tensors, score_mod, block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    expected, others = by_torch(tensors, score_mod, block_mask)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(aux.lse, others.lse, rtol=tolerance, atol=tolerance)
    assert aux.max_scores is None


FACTORIES = {
    "causal": lambda n: causal(n),
    "sliding_window": lambda n: sliding_window(n + 1),
    "document": lambda n: document(ROWS.to(torch.int64) // (n + 1)),
    "prefix_lm": lambda n: prefix_lm(n),
    "and_masks": lambda n: and_masks(causal(), sliding_window(n)),
    "or_masks": lambda n: or_masks(causal(n), sliding_window(n, 9)),
    "softcap": lambda n: softcap(n / 9 + 0.1),
    "alibi": lambda n: alibi(torch.full((4,), n / 9 + 0.1)),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_wrapped_by_another_of_its_kind(name):
    """functools.wraps copies attributes; both functions share their code, and their meaning is their own."""
    other, own = (FACTORIES[name](n) for n in (20, 3))
    is_score = name in ("softcap", "alibi")
    meaning = score_of if is_score else mask_of
    for copied in (copy.copy(own), copy.deepcopy(own)):
        assert meaning(copied) is meaning(own) is not None
    tensors, results = inputs((90, 90), torch.float32), []
    for mod in (own, functools.wraps(other)(FACTORIES[name](3)), functools.wraps(own)(FACTORIES[name](20)), other):
        block_mask = None if is_score else create_block_mask(mod, 2, None, 90, 90, "cpu")
        results.append(flex_attention(*tensors, mod if is_score else None, block_mask, enable_gqa=True))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[2], results[3])
    assert not torch.allclose(results[1], results[2])


def test_definitions():
    """Checks each mask_mod against its docstring: the other tests compare its native meaning with the function."""
    b, i, j = torch.arange(2)[:, None, None], torch.arange(90)[:, None], torch.arange(90)
    lengths, offsets = torch.tensor([10, 70])[:, None, None], torch.tensor([3, -9])[:, None, None]
    every = (b >= 0) & (i >= 0) & (j >= 0)
    expected = {
        "causal": i >= j,
        "behind": i - 17 >= j,
        "anywhere": i + offsets >= j,
        "window": (i >= j) & (i - j <= 20),
        "both sides": (j <= i + 13) & (j >= i - 3),
        "no left end": j <= i + 10,
        "no ends": every,
        "documents": ONE_ROW[:, None] == ONE_ROW,
        "rows of documents": ROWS[:, :, None] == ROWS[:, None],
        "prefix": (j < 50) | (i >= j),
        "prefixes": (j < lengths) | (i >= j),
        "causal documents": (ROWS[:, :, None] == ROWS[:, None]) & (i >= j),
        "nothing hidden": every,
        "a union": j <= i + 9,
    }
    for name, mask in expected.items():
        own = torch_flex.create_mask(MASKS[name](), 2, 1, 90, 90, device="cpu")
        assert torch.equal(own[:, 0], mask.expand(2, 90, 90)), name


@every_mask
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_masks(name, lengths):
    """Includes rows that see nothing: out 0 and lse -inf on both sides."""
    block_mask = create_block_mask(MASKS[name](), 2, None, *lengths, device="cpu")
    assert_as_torch(inputs(lengths), None, block_mask)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", ["causal", "both sides", "two places", "rows of documents", None])
def test_scores(score, name):
    mask_mod, score_mod = and_masks() if name is None else MASKS[name](), SCORES[score]()
    if score != "softcap":  # slopes of query's dtype
        tensors = inputs((40, 90), torch.float32)
        block_mask = create_block_mask(mask_mod, 2, None, 40, 90, device="cpu")
        assert_as_torch(tensors, score_mod, None if name is None else block_mask, 1e-5)
    else:
        assert_as_torch(inputs((40, 90)), score_mod, create_block_mask(mask_mod, 2, 4, 40, 90, device="cpu"))


@every_mask
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("heads", "block_size"), [(None, 128), (3, (16, 32))])
def test_blocks_are_torchs(name, lengths, heads, block_size):
    mask_mod = MASKS[name]()
    ours, theirs = (
        make(mask_mod, 2, heads, *lengths, device="cpu", BLOCK_SIZE=block_size)
        for make in (create_block_mask, torch_flex.create_block_mask)
    )
    assert ours.mask_mod is theirs.mask_mod is mask_mod
    for mine, other in zip(ours.as_tuple()[:-1], theirs.as_tuple()[:-1], strict=True):
        assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other
    together = create_block_mask(mask_mod, 2, heads, *lengths, "cpu", block_size, separate_full_blocks=False)
    assert together.full_kv_num_blocks is None
    assert torch.equal(together.to_dense(), theirs.to_dense())


def test_blocks_of_a_long_sequence():
    """torch's own function would create 16 GB of pairs."""
    mask_mod = and_masks(causal(), document(torch.arange(2**17) // 4096))
    block_mask = create_block_mask(mask_mod, None, None, 2**17, 2**17, "cpu", 1024)
    assert int(block_mask.kv_num_blocks.sum()) == 128
    assert int(block_mask.full_kv_num_blocks.sum()) == 32 * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["causal", "behind", "all of them", "nested", "prefixes"])
@pytest.mark.parametrize("score", [None, "softcap", "alibi"])
def test_gradients(dtype, name, score):
    """By the rule of yardstick.py; torch's own function has no gradients on a CPU."""
    mask_mod, slopes = MASKS[name](), torch.rand(4).to(dtype)
    block_mask = create_block_mask(mask_mod, 2, None, 40, 90, device="cpu")

    def native(q, k, v, slopes):
        score_mod = {"softcap": softcap(2.0), "alibi": alibi(slopes, 3)}.get(score)
        return flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True)

    def plain(q, k, v, slopes):
        scores = {"softcap": {"softcap": 2.0}, "alibi": {"alibi_slopes": slopes, "q_offset": 3}}
        mask = torch_flex.create_mask(mask_mod, 2, 1, 40, 90, device="cpu")
        return reference.attention(q, k, v, causal=False, mask=mask, **scores.get(score, {}))

    assert_accurate(native, plain, *inputs((40, 90), dtype), slopes)


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (0, 0)], ids=str)
def test_empty(lengths):
    q, k, v = inputs(lengths)
    out, lse = flex_attention(q, k, v, enable_gqa=True, return_lse=True)
    assert out.shape == (2, 4, lengths[0], 9)
    assert (lse == float("-inf")).all()
    assert not out.any()
    for mask_mod in (causal(), prefix_lm(2), document(torch.zeros(3, dtype=torch.int64))):
        block_mask = create_block_mask(mask_mod, None, None, *lengths, device="cpu")
        assert torch.equal(flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True), out)


def test_every_way_to_pass_arguments():
    q, k, v = inputs((90, 90), torch.float32)
    block_mask = torch_flex.create_block_mask(MASKS["nested"](), 2, None, 90, 90, device="cpu")
    expected = by_torch((q * 0.5, k, v), None, block_mask)[0]
    options = {"num_warps": 4, "fwd_BLOCK_M": 64, "bwd_BLOCK_M1": 32, "PRESCALE_QK": True}
    out, lse = flex_attention(q, k, v, None, block_mask, 0.125, True, True, options)
    torch.testing.assert_close(out, expected)
    assert torch.equal(flex_attention(q, k, v, block_mask=block_mask, scale=0.125, enable_gqa=True), out)
    _, aux = flex_attention(
        q, k, v, block_mask=block_mask, scale=0.125, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    assert torch.equal(aux.lse, lse)
    assert flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest())[1] == (None, None)


def test_one_sequence_of_keys_for_all_queries():
    q, k, v = inputs((90, 90))
    block_mask = create_block_mask(MASKS["rows of documents"](), 2, None, 90, 90, device="cpu")
    assert_as_torch((q, k[:1], v[:1]), None, block_mask)


@exact_cuts
def test_a_mask_cut_to_shorter_lengths():
    """Full blocks then extend past the last query and key."""
    q, k, v = inputs((90, 60))
    block_mask = create_block_mask(sliding_window(-1, 40), None, None, 96, 64, "cpu", 16)._adjust(90, 60)
    assert_as_torch((q, k, v), None, block_mask)


def test_decoding_with_rows_of_a_mask():
    """One row of blocks of a large mask, at a position that changes in place, as in generation."""
    q, k, v = inputs((90, 90))
    full = flex_attention(
        q, k, v, block_mask=create_block_mask(causal(), None, None, 90, 90, "cpu", 16), enable_gqa=True
    )
    base, at = create_block_mask(causal(), None, None, 90, 90, "cpu", (16, 16)), torch.tensor(0)
    for position in (0, 40, 89):
        at.fill_(position)
        row = base[:, :, position // 16]
        row.seq_lengths, row.mask_mod = (1, 90), causal(at)
        out = flex_attention(q[:, :, position : position + 1], k, v, block_mask=row, enable_gqa=True)
        torch.testing.assert_close(out, full[:, :, position : position + 1], rtol=1e-12, atol=1e-12)
