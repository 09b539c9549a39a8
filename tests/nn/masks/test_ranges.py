"""Promise: key_ranges of a module hide padding and other documents, in training and over a cache."""

import re

import pytest
import torch
from support.assertions import Refusals, assert_close, each_refusal, refused
from support.modules import (
    D_IN,
    EXTRAS,
    ROWS,
    WITH_EXTRAS,
    WITH_RANGES,
    assert_same,
    cache_for,
    doubles,
    gradients,
    made,
    pair,
    plain,
    sequences,
)
from torch import Tensor

from pyattn import masks, nn
from pyattn.masks.key_ranges import by_interval

RANGES: dict[str, Tensor] = {
    "documents": masks.documents([4, 0, 5]),
    "two packings": torch.cat([masks.documents([4, 5]), masks.documents([2, 3, 4])]),
    "padding": masks.padding([ROWS, 5], ROWS),
    "padding on the left": masks.padding([ROWS, 5], ROWS, side="left"),
    "chunks": masks.chunked(ROWS, 4),
    "nothing": torch.zeros(1, ROWS, 2, dtype=torch.int32),
    "streaming": masks.streaming(ROWS, 1, (2, 0)),
}
each_module = pytest.mark.parametrize("name", WITH_RANGES)
each_range = pytest.mark.parametrize("ranges", RANGES)


@each_module
@each_range
def test_equals_plain(name, ranges):
    native, reference = doubles(name, *WITH_RANGES[name])
    x = sequences(2, ROWS).requires_grad_()
    ours, exact = native(x, key_ranges=RANGES[ranges]), reference(x, key_ranges=RANGES[ranges])
    assert_same(ours, exact)
    found, expected = (gradients(out, [x, *m.parameters()]) for out, m in ((ours, native), (exact, reference)))
    assert_close(found, expected)
    out, weights = native(x, key_ranges=RANGES[ranges], need_weights=True)
    assert torch.equal(out, ours)
    key = torch.arange(ROWS)
    begin, end = by_interval(RANGES[ranges])[..., None].unbind(-2)
    outside = ((key < begin) | (key >= end)).all(2).expand(2, ROWS, ROWS)
    wide = weights if weights.dim() == 4 else weights[:, None]
    assert not wide.masked_select(outside[:, None]).any()


@each_module
def test_a_padded_batch_is_its_sequences(name):
    """Whatever the padding holds, even NaN."""
    module, _ = pair(name, *WITH_RANGES[name])
    module = module.double()
    x, tokens = sequences(2, ROWS), [ROWS, 5]
    for side, own in (("right", slice(None, 5)), ("left", slice(-5, None))):
        filled = x.clone()
        filled[1] = torch.nan
        filled[1, own] = x[1, own]
        out = module(filled, key_ranges=masks.padding(tokens, ROWS, side))
        assert_same(out[0], module(x[:1])[0])
        assert_same(out[1, own], module(x[1:, own])[0])


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_prefix_of_what_is_not_causal(extra):
    module, x, ranges = made("Attention", extra), sequences(2, ROWS), masks.prefix_lm(torch.tensor([3, 6]), ROWS)
    assert_same(module(x, key_ranges=ranges), plain(module, x, key_ranges=ranges)[0])


@pytest.mark.parametrize("name", WITH_EXTRAS)
@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_a_packed_row_is_its_documents(name, extra):
    """Scores depend only on distances, with rotary and ALiBi too."""
    module, x = made(name, extra), sequences(1, ROWS)
    packed = module(x, key_ranges=masks.documents([4, 5]))
    assert_same(packed, torch.cat([module(x[:, :4]), module(x[:, 4:])], 1))


SHAPE = "key_ranges must have shape (2 or 1, 9 or 1, 2) or (2 or 1, 9 or 1, 1 to 4, 2), got "
BAD: Refusals = [
    ([[0, 1]], TypeError, "key_ranges must be Tensor, got [[0, 1]]"),
    (RANGES["padding"].repeat(2, 1, 1), ValueError, SHAPE + "[4, 9, 2]"),
    (RANGES["padding"][:, 1:], ValueError, SHAPE + "[2, 8, 2]"),
    (torch.zeros(2, ROWS, 2), TypeError, "key_ranges must have dtype int32 or int64, got float32"),
    (torch.tensor([[[3, 2]] * ROWS]), ValueError, "key_ranges must hold 0 <= begin <= end <= seqlen_k = "),
    (torch.tensor([[[0, 20]] * ROWS]), ValueError, "key_ranges must hold 0 <= begin <= end <= seqlen_k = "),
    (torch.tensor([[[[0, 3], [2, 4]]] * ROWS]), ValueError, "key_ranges must hold sorted, disjoint intervals 0 <="),
]


@each_refusal(BAD)
@pytest.mark.parametrize("page_size", [None, 16])
def test_wrong_ranges_leave_a_cache_as_it_was(changes, kind, message, page_size):
    module = made("MultiHeadAttention")
    cached = cache_for(module, page_size=page_size)
    for options in ({}, {"kv_cache": cached}):
        with refused(kind, message):
            module(sequences(2, ROWS), key_ranges=changes, **options)
    assert cached.lengths.tolist() == [0, 0]


def test_a_key_that_is_always_seen_is_in_no_range():
    module = nn.book.MHAPyTorchClass(D_IN, D_IN, 3, ROWS, qkv_bias=True).double()
    message = "pyattn: key_ranges are not supported with qkv_bias=True, where every query also sees bias_k, got "
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}"):
        module(sequences(2, ROWS), key_ranges=RANGES["padding"])
