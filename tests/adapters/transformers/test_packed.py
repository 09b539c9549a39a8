"""Promise: documents packed into a row give the results they give alone, with or without a cache, masked or not."""

from typing import Any

import pytest
import torch
import transformers
from support.adapters.models import CACHE, DECODERS, IDS, ROUNDINGS, assert_gradients_near, assert_near, decoder
from support.cases import newer_compiler
from torch import Tensor

from pyattn.adapters import transformers as adapter
from pyattn.adapters.transformers import attention_function
from pyattn.adapters.transformers import packed as transformers_packed
from pyattn.adapters.transformers.mask import Mask
from pyattn.masks import KeyRanges

LENGTHS = [5, 1, 6]
WITHOUT_POSITIONS = ["llama4"]
"""Models whose layers don't pass position ids to attention."""

RESTARTING = hasattr(transformers.masking_utils, "remap_positions_for_packed_sequence")
CHUNKS: dict[str, Any] = {} if RESTARTING else {"attention_chunk_size": IDS.shape[1]}
"""Before 5.23, transformers counts chunks from the row's first token; one chunk has the results of documents alone."""

PACKED = [name for name in DECODERS if name not in WITHOUT_POSITIONS]
WAYS = [
    cache | mask
    for cache in ({}, {"use_cache": True}, {"use_cache": False})
    for mask in ({}, {"attention_mask": torch.ones_like(IDS[:1])})
]


def batch(**options: bool) -> dict[str, Any]:
    """Three documents, packed by transformers' own collator."""
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt", **options)
    packed: dict[str, Any] = collator([{"input_ids": part} for part in IDS[0].split(LENGTHS)])
    packed.pop("labels")
    return packed


def gradients(model: Any, out: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (out * dout).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(model: Any) -> Tensor:
    """The documents' logits from one call each, with eager attention."""
    model.set_attn_implementation("eager")
    out = torch.cat([model(part, use_cache=False).logits for part in IDS[:1].split(LENGTHS, 1)], 1)
    model.set_attn_implementation("pyattn")
    return out


@pytest.mark.usefixtures("softmax_in_its_own_dtype")
@pytest.mark.parametrize("name", PACKED)
def test_packed_documents(name):
    model = decoder(name).double()
    truth = alone(model)
    true_gradients = gradients(model, truth)
    for packed in (batch(), batch(return_seq_idx=True), batch(return_flash_attn_kwargs=True)):
        for way in WAYS:
            out = model(**packed, **way).logits
            assert_near(out, truth, way)
            assert_gradients_near(gradients(model, out), true_gradients, way)
    assert not adapter.fallbacks(model)[len(adapter.fallbacks()) :]


def packed_rows() -> dict[str, Tensor]:
    """Two rows: one of 5 + 7 tokens; one of 3 + 6 and padding whose positions continue."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ([5, 7], [3, 9])])
    mask = torch.ones_like(IDS)
    mask[1, 9:] = 0
    return {"input_ids": IDS, "position_ids": positions, "attention_mask": mask}


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_of_their_own_documents(name, static):
    """Padded, and with the slots of a cache longer than the prompt."""
    model = decoder(name)
    model.set_attn_implementation("pyattn")
    cache = transformers.StaticCache(model.config, max_cache_len=20) if static else None
    with torch.no_grad():
        out = model(**packed_rows(), **{CACHE: cache}, use_cache=True).logits
        for row, begin, end in ((0, 0, 5), (0, 5, 12), (1, 0, 3), (1, 3, 9)):
            truth = model(IDS[row : row + 1, begin:end]).logits
            assert_near(out[row, begin:end], truth)


@newer_compiler
@pytest.mark.filterwarnings("ignore::Warning")  # the compiler warns about its own parts
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiled(name):
    """Values can't be read, so masks are of queries x keys unless they are None."""
    model = decoder(name, num_hidden_layers=1)
    truth = alone(model)
    for way in WAYS[1:3] if name == "mistral" else WAYS[:1]:
        torch._dynamo.reset()
        out = torch.compile(model, fullgraph=True, backend="eager")(**batch(), **way).logits
        assert_near(out, truth, way)


@newer_compiler
@pytest.mark.filterwarnings("ignore::Warning")  # the compiler warns about its own parts
def test_compiled_with_a_static_cache_and_a_mask(monkeypatch):
    """Tokens that continue the cache see all of it, whether or not their values can be read.

    One layer has a window, the other sees every key.
    """
    monkeypatch.setattr(transformers_packed, "MIXED", type(transformers_packed.MIXED)())
    model = decoder("gemma3")
    model.set_attn_implementation("pyattn")
    more = {"input_ids": IDS[:, :3], "position_ids": torch.tensor([[7, 0, 1], [8, 9, 0]])}
    more["attention_mask"] = torch.cat([packed_rows()["attention_mask"], torch.ones_like(IDS[:, :3])], 1)
    sides = []
    with torch.no_grad():
        for run in (model, torch.compile(model, fullgraph=True, backend="eager")):
            cache = transformers.StaticCache(model.config, max_cache_len=20)
            sides.append([run(**tokens, **{CACHE: cache}, use_cache=True).logits for tokens in (packed_rows(), more)])
    rows = packed_rows()["attention_mask"].bool()
    assert (sides[0][0] - sides[1][0])[rows].abs().max() <= ROUNDINGS * sides[0][0].abs().max()
    assert_near(sides[1][1], sides[0][1])


def test_positions_after_a_cache_are_left_alone(monkeypatch):
    """Restarts there give one warning and are listed; left padding, whose positions mean nothing, does neither."""
    monkeypatch.setattr(transformers_packed, "MIXED", type(transformers_packed.MIXED)())
    q, k = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 9, 8)
    row, rows = torch.arange(4), torch.zeros(1, 4, 2, dtype=torch.int64)
    rows[..., 1] = row + 6
    ranges = Mask((1, 1, 4, 9), KeyRanges(rows, whole=True))
    plain = attention_function(torch.nn.Module(), q, k, k, ranges, position_ids=row[None] + 5)[0]
    padded = rows.clone()
    padded[..., 0] = torch.tensor([6, 7, 7, 7])
    padding = Mask((1, 1, 4, 9), KeyRanges(padded, whole=True))
    attention_function(torch.nn.Module(), q, k, k, padding, position_ids=torch.tensor([[1, 1, 0, 1]]))
    assert not any("packed" in line for line in adapter.fallbacks())
    restarting = torch.tensor([[5, 6, 0, 1]])
    with pytest.warns(UserWarning, match=r"^pyattn: packed documents see each other: the cache holds positions"):
        out = attention_function(torch.nn.Module(), q, k, k, ranges, position_ids=restarting)[0]
    assert torch.equal(out, plain)
    attention_function(torch.nn.Module(), q, k, k, ranges, position_ids=restarting)  # once is enough
    assert adapter.fallbacks()[-1].startswith("2 calls with packed documents that see each other: the cache holds")


def test_a_mask_of_queries_and_keys_is_the_whole_mask():
    """A tree is one: documents that restart share the tokens before them."""
    q = torch.randn(1, 4, 4, 8)
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)[None, None]
    truth = attention_function(torch.nn.Module(), q, q, q, tree)[0]
    positions = torch.tensor([[0, 1, 1, 2]])
    assert torch.equal(attention_function(torch.nn.Module(), q, q, q, tree, position_ids=positions)[0], truth)


@pytest.mark.parametrize("slots", [6, 9])
@pytest.mark.parametrize("padding", [[0, 1], [1], [4]], ids=str)
def test_padding_of_documents(padding, slots):
    """It lies before the first one or between tokens; keys after the queries are unfilled slots of a static cache."""
    q, kv, keys = torch.randn(1, 4, 6, 8), torch.randn(1, 4, slots, 8), torch.arange(slots)
    tokens = ~torch.isin(keys, torch.tensor(padding))
    mask = adapter.mask_function(1, 6, slots, attention_mask=tokens[None])
    assert isinstance(mask, Mask)
    assert mask.ranges is not None
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    seen = (keys <= keys[:6, None]) & (keys // 3 == keys[:6, None] // 3) & tokens
    truth = attention_function(torch.nn.Module(), q, kv, kv, seen[None, None])[0]
    found = attention_function(torch.nn.Module(), q, kv, kv, mask, position_ids=positions)[0]
    torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("positions", [torch.arange(4).flip(0), torch.zeros(3, 1, 4).long(), torch.zeros(2, 4).long()])
def test_positions_of_other_shapes_say_nothing(positions):
    q = torch.randn(1, 4, 4, 8)
    truth = attention_function(torch.nn.Module(), q, q, q, None)[0]
    assert torch.equal(attention_function(torch.nn.Module(), q, q, q, None, position_ids=positions)[0], truth)


@pytest.mark.parametrize("name", WITHOUT_POSITIONS)
def test_lengths_reach_models_that_keep_their_positions(name):
    """Chunks of four tokens restart with each document."""
    model = decoder(name, **CHUNKS)
    truth = alone(model)
    for way in WAYS:
        out = model(**batch(return_flash_attn_kwargs=True), **way).logits
        assert_near(out, truth, way)


@pytest.mark.parametrize("name", WITHOUT_POSITIONS)
def test_models_that_keep_their_positions_are_listed(name):
    model = decoder(name, **CHUNKS)
    model.set_attn_implementation("pyattn")
    truth = alone(model)
    out = model(**batch(), use_cache=False).logits
    assert_near(out, truth)
    model(IDS)
    assert adapter.fallbacks(model)[-1] == (
        "model.layers.0.self_attn (Llama4TextAttention): it gets no position_ids, so packed documents need "
        "use_cache=False and no attention_mask"
    )
