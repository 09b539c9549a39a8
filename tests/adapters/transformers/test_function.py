"""Promise: transformers' attention function honours each argument or refuses it by name."""

import re
import runpy
import sys
from typing import Any

import pytest
import torch
from support.cases import each_dtype, memory_needed
from torch import Tensor, nn
from transformers import masking_utils

from pyattn import attention, masks
from pyattn.adapters import transformers as adapter
from pyattn.adapters.transformers import attention_function, rules
from pyattn.adapters.transformers import masks as transformers_masks
from pyattn.adapters.transformers.attention import NOT_ABOUT_ATTENTION
from pyattn.adapters.transformers.mask import Mask


def inputs(dtype: torch.dtype = torch.float32, batch: int = 2, queries: int = 6, keys: int = 6) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    sizes = (batch, 4, queries, 8), (batch, 2, keys, 8), (batch, 2, keys, 8)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in sizes)


DECODER, ENCODER = nn.Module(), nn.Module()
ENCODER.is_causal = False


@each_dtype
def test_the_function_renames(dtype):
    """Equal to :func:`pyattn.attention` bit for bit."""
    q, k, v = inputs(dtype)
    sinks, bias = torch.randn(4), torch.randn(1, 4, 6, 6)
    seen, ranges = torch.rand(2, 1, 6, 6) < 0.7, masks.padding([6, 4], 6)
    whole = masks.KeyRanges(ranges, whole=True)
    rows = Mask((2, 1, 6, 6), whole)
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"q_offset": 0}),
        ({"is_causal": False}, {"causal": False}),
        ({"scaling": 0.3, "softcap": 2.0}, {"softmax_scale": 0.3, "softcap": 2.0}),
        ({"sliding_window": 2}, {"window": (1, 0)}),
        ({"s_aux": sinks}, {"sinks": sinks}),
        ({"attention_mask": seen}, {"causal": False, "mask": seen}),
        ({"attention_mask": bias}, {"causal": False, "bias": bias}),
        ({"attention_mask": rows}, {"causal": False, "key_ranges": ranges}),
        ({"attention_mask": whole}, {"causal": False, "key_ranges": ranges}),
        ({"attention_mask": ranges}, {"q_offset": 0, "key_ranges": ranges}),
        ({"attention_mask": ranges, "sliding_window": 2}, {"window": (1, 0), "key_ranges": ranges}),
        ({"attention_mask": ranges, "is_causal": False}, {"causal": False, "key_ranges": ranges}),
        ({"attention_mask": rows, "is_causal": True, "sliding_window": 2}, {"causal": False, "key_ranges": ranges}),
        ({"position_bias": bias}, {"bias": bias}),
        ({"attention_mask": rows, "position_bias": bias}, {"causal": False, "key_ranges": ranges, "bias": bias}),
        ({"attention_mask": seen, "position_bias": bias}, {"causal": False, "mask": seen, "bias": bias}),
        ({"attention_mask": bias, "position_bias": bias}, {"causal": False, "bias": bias + bias}),
        ({"attention_mask": Mask((2, 1, 6, 6), pairs=seen)}, {"causal": False, "mask": seen}),
        ({"attention_mask": Mask((2, 1, 6, 6))}, {"q_offset": 0}),
        ({"attention_mask": Mask((2, 1, 6, 6)), "is_causal": False}, {"q_offset": 0}),
        ({"position_ids": torch.arange(6)[None]}, {"q_offset": 0}),
        (dict.fromkeys(NOT_ABOUT_ATTENTION, torch.arange(6)), {}),
        ({"use_cache": True}, {}),
    ]
    for theirs_, ours in pairs:
        out, weights = attention_function(DECODER, q, k, v, **({"attention_mask": None} | theirs_))
        assert weights is None
        assert out.is_contiguous()
        assert torch.equal(out, attention(q, k, v, **ours).transpose(1, 2))
    plain = attention(q, k, v, causal=False).transpose(1, 2)
    assert torch.equal(attention_function(ENCODER, q, k, v, None)[0], plain)
    assert torch.equal(attention_function(ENCODER, q, k, v, None, sliding_window=6)[0], plain)
    out = attention_function(ENCODER, q[:1], k, v, None)[0]  # learned queries have batch 1
    assert torch.equal(out, attention(q[:1].expand(2, -1, -1, -1), k, v, causal=False).transpose(1, 2))


def test_a_position_bias_beside_a_mask_is_not_copied():
    """Combined into one float32 tensor (4, 4, 1024, 1024), they would take 64 MiB."""
    q, k, v = inputs(batch=4, queries=1024, keys=1024)
    seen, bias = torch.rand(4, 1, 1024, 1024) < 0.7, torch.randn(1, 4, 1024, 1024)
    mask = Mask((4, 1, 1024, 1024), pairs=seen)

    def run():
        return attention_function(ENCODER, q, k, v, mask, position_bias=bias)[0]

    out = run()  # does all one-time loading
    assert memory_needed(run) < 32 * 2**20
    assert torch.equal(out, attention(q, k, v, causal=False, bias=bias.where(seen, -torch.inf)).transpose(1, 2))


def test_a_query_among_slots():
    """A single query without a mask sees every key; several start at the first, before the cache's unfilled slots."""
    q, k, v = inputs(queries=1)
    assert torch.equal(attention_function(DECODER, q, k, v, None)[0], attention(q, k, v).transpose(1, 2))
    out = attention_function(DECODER, q, k, v, None, sliding_window=2)[0]
    assert torch.equal(out, attention(q, k, v, window=(1, 0)).transpose(1, 2))
    q, k, v = inputs(queries=3)
    k[:, :, 3:] = torch.nan
    assert torch.equal(attention_function(DECODER, q, k, v, None)[0], attention(q, k, v, q_offset=0).transpose(1, 2))


def test_packed_sequences():
    q, k, v = inputs(batch=1)
    sizes = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    for module in (DECODER, ENCODER):
        out = attention_function(module, q, k, v, None, cu_seq_lens_q=sizes, cu_seq_lens_k=sizes)[0]
        causal = module is DECODER
        for part in (slice(2), slice(2, 5)):
            alone = attention(q[:, :, part], k[:, :, part], v[:, :, part], causal=causal).transpose(1, 2)
            torch.testing.assert_close(out[:, part], alone)
        assert not out[:, 5].any()
    seen = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    ranges = masks.KeyRanges(torch.tensor([[0, i + 1] for i in range(6)])[None], whole=True)
    alone = attention_function(DECODER, q, k, v, None, cu_seq_lens_q=sizes)[0]
    for mask in (seen, ranges):
        out = attention_function(DECODER, q, k, v, mask, cu_seq_lens_q=sizes, cu_seq_lens_k=sizes)[0]
        torch.testing.assert_close(out, alone)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "no tensor argument positions, got torch.Tensor of shape", {"positions": torch.ones(2)}),
        (
            TypeError,
            "attention_mask must be bool or float, got torch.int",
            {"attention_mask": torch.ones(2, 1, 6, 6).int()},
        ),
        (TypeError, "attention_mask must be Tensor, got 'causal'", {"attention_mask": "causal"}),
        (ValueError, "attention_mask must have 4 dimensions, got shape (6, 6)", {"attention_mask": torch.ones(6, 6)}),
        (ValueError, "sliding_window must be at least the number of keys", {"is_causal": False, "sliding_window": 3}),
        (ValueError, "sliding_window must be at least 1, got 0", {"sliding_window": 0}),
        (ValueError, "cu_seq_lens_q must come with batch 1, got batch 2", {"cu_seq_lens_q": torch.tensor([0, 6])}),
        (NotImplementedError, "cache must be None", {"cache": object()}),
    ],
)
def test_errors(error, message, arguments):
    with pytest.raises(error, match=r"^pyattn: ") as caught:
        attention_function(DECODER, *inputs(), **({"attention_mask": None} | arguments))
    assert message in str(caught.value)


@pytest.mark.parametrize(("name", "wrong"), [("position_bias", torch.zeros(1, 4, 6, 6)), ("output_attentions", True)])
def test_packed_sequences_refuse(name, wrong):
    with pytest.raises(NotImplementedError, match=re.escape(f"cu_seq_lens_q must come with a mask if {name} is given")):
        attention_function(DECODER, *inputs(batch=1), None, cu_seq_lens_q=torch.tensor([0, 6]), **{name: wrong})


def test_weights_are_those_used():
    q, k, v = inputs(torch.float64)
    out, weights = attention_function(DECODER, q, k, v, None, dropout=0.5, output_attentions=True)
    assert weights is not None
    assert (weights == 0).sum() > 2 * 4 * 15
    torch.testing.assert_close(out, (weights @ v.repeat_interleave(2, 1)).transpose(1, 2))


def test_transformers_is_imported_by_register_alone(monkeypatch):
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(ImportError, match=r"^pyattn: register\(\) needs transformers 5.6 or later .*, got 5"):
        adapter.register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"^pyattn: register\(\) needs transformers 5.6 or later .*, got "):
        adapter.register()
    for module in (adapter, transformers_masks, rules):
        runpy.run_path(str(module.__file__))
