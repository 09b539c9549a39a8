"""Promise: transformers' masks become ranges in linear memory, equal to the masks that it makes itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adapters.transformers_masks import shown
from support.cases import memory_needed
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import masking_utils as theirs

from pyattn.adapters import transformers as adapter
from pyattn.adapters.transformers import mask_function, rules
from pyattn.adapters.transformers import masks as transformers_masks
from pyattn.adapters.transformers.mask import Mask
from pyattn.masks import KeyRanges

LEFT = torch.tensor([2, 0])


def image(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Tokens 1 to 3 see each other, as an image's tokens do."""
    return (q >= 1) & (q <= 3) & (k >= 1) & (k <= 3)


def far_key(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k == q + 3


def every_other(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Five intervals of nine keys."""
    return (q + k) % 2 == 0


IMAGES = torch.tensor([[-1, 0, 0, -1, -1, 0, 0, -1, 0, -1, 0, 0, -1, -1]]).expand(2, -1)
"""Molmo2's block_sequence_ids of four images among 14 tokens."""

RULES: dict[str, Callable[..., Tensor]] = {
    "causal": theirs.causal_mask_function,
    "full": theirs.bidirectional_mask_function,
    "window": theirs.sliding_window_causal_mask_function(3),
    "both ways": theirs.sliding_window_bidirectional_mask_function(2),
    "chunks": theirs.chunked_causal_mask_function(3, LEFT),
    "image": theirs.or_masks(theirs.causal_mask_function, image),
    "holes": theirs.or_masks(theirs.causal_mask_function, far_key),
    "bits": every_other,
}
SHAPES = [(7, 7, 0, 0), (5, 9, 0, 0), (3, 6, 5, 2), (1, 7, 6, 0), (3, 7, 4, 0), (2, 2, 0, 0), (7, 4, 0, 0)]
"""Queries, keys, and the position of the first of each: a prompt, a static cache, a window's, a token, ..."""


@pytest.mark.parametrize("padding", ["none", "ones", "left", "right", "hole", "short"])
@pytest.mark.parametrize("one_by_one", [False, True], ids=["", "vmap"])
@pytest.mark.parametrize("rule", RULES)
def test_masks_are_those_of_transformers(rule, one_by_one, padding):
    kept = {"causal": True, "full": False, "window": True}
    for q_length, kv_length, q_offset, kv_offset in SHAPES[: 4 if one_by_one else None]:  # vmap takes milliseconds
        tokens = None if padding == "none" else torch.ones(2, q_offset + q_length, dtype=torch.bool)
        if tokens is not None and padding != "ones":
            at = {"left": slice(2), "right": slice(-2, None), "hole": slice(1, 2), "short": slice(0)}[padding]
            tokens[0, at] = False
        arguments: dict[str, Any] = {"q_offset": q_offset, "kv_offset": kv_offset, "mask_function": RULES[rule]}
        arguments["attention_mask"] = tokens
        sizes = 2, q_length, kv_length
        truth = theirs.sdpa_mask(*sizes, allow_is_causal_skip=False, **arguments).expand(2, 1, q_length, kv_length)
        arguments["use_vmap"] = one_by_one
        for skip in {False, kept.get(rule, False)}:
            size = 3 if rule == "window" else None
            mask = mask_function(*sizes, allow_is_causal_skip=skip, local_size=size, **arguments)
            assert torch.equal(shown(mask, q_length, kv_length, causal=True), truth)
        if rule in ("full", "both ways"):
            arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
            mask = mask_function(*sizes, local_size=3 if rule == "both ways" else None, **arguments)
            assert torch.equal(shown(mask, q_length, kv_length, causal=False), truth)


def packed(lengths: list[int], rule: Callable[..., Tensor]) -> dict[str, Any]:
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    sequences = theirs.find_packed_sequence_indices(positions)
    if hasattr(theirs, "packed_sequence_compatibility_function"):  # transformers before 5.24
        rule = theirs.packed_sequence_compatibility_function(rule, positions, sequences)
    else:
        if hasattr(theirs, "remap_positions_for_packed_sequence"):  # from 5.24 on
            rule = theirs.remap_positions_for_packed_sequence(rule, positions)
        rule = theirs.and_masks(rule, theirs.packed_sequence_mask_function(sequences))
    return {"mask_function": rule, "allow_is_causal_skip": False}


@pytest.mark.parametrize("rule", ["causal", "window", "chunks"])
def test_packed_masks(rule):
    arguments = packed([4, 1, 7], theirs.chunked_causal_mask_function(3, LEFT[1:]) if rule == "chunks" else RULES[rule])
    mask = mask_function(1, 12, 12, **arguments)
    assert isinstance(mask, Mask)
    assert mask.ranges is not None
    assert torch.equal(shown(mask, 12, 12, causal=True)[:1], theirs.sdpa_mask(1, 12, 12, **arguments))


@pytest.mark.parametrize("rule", ["causal", "full", "window", "both ways", "chunks"])
def test_rules_of_transformers_are_known(rule):
    """Only the rows that are compared are evaluated."""
    interval = rules.interval(RULES[rule], torch.arange(9))
    assert interval is not None
    ranges = torch.stack(interval, -1).clamp(0, 9)
    truth = theirs.sdpa_mask(2, 9, 9, mask_function=RULES[rule], allow_is_causal_skip=False)
    assert torch.equal(shown(Mask((2, 1, 9, 9), KeyRanges(ranges)), 9, 9, causal=True), truth)
    assert rules.interval(theirs.and_masks(RULES[rule], RULES["image"]), torch.arange(9)) is None


@pytest.mark.parametrize(
    ("sizes", "arguments", "intervals"),
    [
        ((2, 12, 12), {}, 3),
        ((2, 3, 14), {"q_offset": 11}, 3),
        ((2, 12, 12), {"mask_function": RULES["full"], "allow_is_causal_skip": False, "use_vmap": True}, 3),
        ((2, 12, 12), {"mask_function": RULES["window"], "local_size": 3}, 2),
        ((2, 12, 12), {"mask_function": RULES["chunks"], "local_size": 3}, 2),
        ((2, 12, 12), {"mask_function": RULES["holes"], "use_vmap": True}, 4),
        ((2, 12, 12), {"mask_function": theirs.or_masks(RULES["causal"], theirs.blockwise_overlay(IMAGES))}, 4),
    ],
    ids=["causal", "cache", "full", "window", "chunks", "holes", "images"],
)
def test_rows_with_holes_are_several_intervals(sizes, arguments, intervals):
    """The padding is in the middle; Molmo2's images see each other."""
    transformers_masks.DENSE.clear()
    tokens = torch.ones(2, 14, dtype=torch.bool)
    tokens[0, [2, 7]] = tokens[1, [4, 10]] = False
    mask = mask_function(*sizes, attention_mask=tokens, **arguments)
    assert isinstance(mask, Mask)
    assert mask.ranges is not None
    assert mask.ranges.shape == (2, sizes[1], intervals, 2)
    truth = theirs.sdpa_mask(*sizes, attention_mask=tokens, **arguments | {"allow_is_causal_skip": False})
    assert torch.equal(shown(mask, *sizes[1:], causal=True), truth)
    assert not adapter.fallbacks()


def test_more_intervals_than_ranges_hold():
    """Every other token is padding: a window still sees few intervals, full attention has one row for all queries."""
    tokens = torch.arange(12).expand(2, -1) % 2 == 0
    full = {"mask_function": RULES["full"], "allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    for arguments, pairs in (({"mask_function": RULES["window"]}, None), (full, 1), ({}, 12)):
        mask = mask_function(2, 12, 12, attention_mask=tokens, **arguments)
        assert isinstance(mask, Mask)
        assert (mask.pairs is None) == (pairs is None)
        assert mask.pairs is None or mask.pairs.shape == (2, 1, pairs, 12)
        arguments = arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        truth = theirs.sdpa_mask(2, 12, 12, attention_mask=tokens, **arguments)
        assert torch.equal(shown(mask, 12, 12, causal=True), truth)
    transformers_masks.DENSE.clear()


def test_plain_masks_are_left_out():
    ones = torch.ones(2, 6, dtype=torch.bool)
    for tokens in (None, ones):
        for made in (
            mask_function(2, 6, 6, attention_mask=tokens),
            mask_function(2, 6, 9, q_offset=torch.tensor(0), attention_mask=tokens),
        ):
            assert isinstance(made, Mask)
            assert made.is_causal
        assert mask_function(2, 1, 6, q_offset=5, attention_mask=tokens) is None
        full = {"mask_function": RULES["full"], "allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
        assert mask_function(2, 6, 6, attention_mask=tokens, **full) is None
    assert mask_function(2, 1, 9, q_offset=5) is not None  # unfilled slots of a static cache
    assert mask_function(2, 6, 6, attention_mask=ones, allow_is_causal_skip=False) is not None


@pytest.mark.parametrize(
    ("seqlen", "arguments"),
    [
        (32768, packed([10000, 20000, 2768], RULES["window"])),
        (32768, {"attention_mask": torch.arange(32768).ge(9)[None]}),
        (32768, {"attention_mask": torch.arange(32768).sub(9000).abs().ge(9)[None]}),
        (8192, {"mask_function": RULES["image"]}),
        (8192, {"mask_function": RULES["holes"]}),
    ],
    ids=["packed", "padded", "padded in the middle", "evaluated", "evaluated with holes"],
)
def test_memory_is_linear(seqlen, arguments):
    """Resident memory: bools for all pairs would take 1 GiB, and evaluating some rows at a time takes 64 MiB."""
    mask_function(1, 64, 64, mask_function=RULES["image"])  # does all one-time loading
    assert memory_needed(lambda: mask_function(1, seqlen, seqlen, **arguments)) < 32 * 2**20


def test_dense_masks_are_counted():
    def lines(*sizes, **arguments):
        transformers_masks.DENSE.clear()
        mask = mask_function(*sizes, **arguments)
        assert not (isinstance(mask, Mask) and mask.pairs is None and adapter.fallbacks())
        return adapter.fallbacks()

    assert lines(1, 6, 9, mask_function=RULES["bits"]) == [
        "1 masks of queries x keys: a row of the mask has more than 4 intervals of keys"
    ]
    wanted = ["1 masks of queries x keys: the model works with the mask itself"]
    assert lines(1, 6, 6, allow_is_causal_skip=False) == wanted
    for rule in ("image", "holes"):
        assert lines(1, 6, 6, mask_function=RULES[rule], allow_is_causal_skip=False, use_vmap=True) == []
    blocks = theirs.or_masks(RULES["causal"], theirs.blockwise_overlay(torch.tensor([[-1, 0, 0, 0, -1, -1]])))
    assert lines(1, 6, 6, mask_function=blocks, allow_is_causal_skip=False) == []
    assert lines(1, 1, 6, q_offset=3) == []
    transformers_masks.DENSE.clear()


def test_traced_masks_are_dense():
    """No value can be read there, so ranges would keep the values of the example."""

    def traced(tokens):
        mask = mask_function(2, 6, 6, attention_mask=tokens)
        assert isinstance(mask, Mask)
        assert mask.pairs is not None
        return mask.pairs

    tokens = torch.ones(2, 6, dtype=torch.bool)
    graph = make_fx(traced, tracing_mode="fake")(tokens)
    assert adapter.fallbacks()[-1].endswith("made while tracing or compiling, where values cannot be read")
    tokens[0, :2] = False
    assert torch.equal(graph(tokens), theirs.sdpa_mask(2, 6, 6, attention_mask=tokens, allow_is_causal_skip=False))
    transformers_masks.DENSE.clear()


@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_empty_masks(sizes):
    for rule in RULES.values():
        for skip in (False, True):
            mask = mask_function(*sizes, mask_function=rule, allow_is_causal_skip=skip)
            assert mask is not None
            assert mask.shape[-1] == sizes[2]


def test_a_mask_goes_where_a_tensor_goes():
    """``generate`` passes masks back, and hooks move them to a layer's device."""
    masks = [mask_function(1, 9, 9, mask_function=RULES[rule]) for rule in ("window", "holes", "bits")]
    for mask in (*masks, mask_function(1, 9, 9)):
        assert isinstance(mask, Mask)
        assert mask_function(1, 9, 9, attention_mask=mask) is mask
        moved = mask.contiguous().to("meta")
        assert (moved.shape, moved.ndim, moved.is_causal) == (mask.shape, len(mask.shape), mask.is_causal)
        assert all(x is None or x.is_meta for x in (moved.ranges, moved.pairs))
        assert moved.ranges is None or moved.ranges.whole
    transformers_masks.DENSE.clear()
