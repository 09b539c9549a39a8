"""Promise: models of transformers with ``attn_implementation="pyattn"`` agree with eager attention in float64."""

from typing import Any

import pytest
import torch
from support.adapters.models import (
    BART,
    DECODERS,
    ENDS,
    IDS,
    PADDING,
    ROUNDINGS,
    SIZES,
    T5,
    assert_gradients_near,
    assert_near,
    decoder,
    made,
    results,
)
from support.cases import newer_compiler

from pyattn.adapters import transformers as adapter

exact = pytest.mark.usefixtures("softmax_in_its_own_dtype")


def assert_same(model: Any, rows: torch.Tensor, **inputs: Any) -> None:
    """Outputs and all gradients agree with eager attention."""
    out, gradients = results(model, "pyattn", rows, **inputs)
    truth, true_gradients = results(model, "eager", rows, **inputs)
    assert_near(out, truth)
    assert_gradients_near(gradients, true_gradients)


@exact
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name, padding):
    mask = PADDING[padding]
    model = decoder(name).double()
    assert_same(model, mask, input_ids=IDS, attention_mask=mask)
    model.set_attn_implementation("pyattn")
    lines = adapter.fallbacks(model)[len(adapter.fallbacks()) :]
    assert not lines or (name == "llama4" and "gets no position_ids" in lines[0])


@exact
@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4"])
def test_padding_between_tokens(name):
    """With windows and chunks: no mask of queries x keys is made."""
    before = adapter.fallbacks()
    assert_same(decoder(name).double(), HOLES["holes"], input_ids=IDS, attention_mask=HOLES["holes"])
    assert adapter.fallbacks() == before


@exact
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation(name, padding, cache):
    """Generates past the windows and chunks of four tokens."""
    model = decoder(name).double()
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True, "disable_compile": True}
    sides = []
    for implementation in ("pyattn", "eager"):
        model.set_attn_implementation(implementation)
        kind = None if cache == "dynamic" else cache
        sides.append(model.generate(IDS, attention_mask=PADDING[padding], cache_implementation=kind, **options))
    assert torch.equal(sides[0].sequences, sides[1].sequences)
    ours, truth = (torch.stack(side.logits) for side in sides)
    assert_near(ours, truth)


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEQ2SEQ = {
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "d_model": 32,
    "vocab_size": 64,
    "decoder_start_token_id": 1,
}
ENCODERS = {
    "bert": lambda: made("Bert", SIZES | NO_DROPOUT, "MaskedLM"),
    "modernbert": lambda: made("ModernBert", SIZES | {"local_attention": 4}, "MaskedLM"),
}
PAIRS = {
    "t5": lambda: made("T5", T5 | ENDS | {"dropout_rate": 0.0, "decoder_start_token_id": 1}, "Seq2SeqLM"),
    "bart": lambda: made("Bart", BART | ENDS | SEQ2SEQ | {"max_position_embeddings": 64}, "Seq2SeqLM"),
}


HOLES = PADDING | {"holes": PADDING["right"].index_fill(1, torch.tensor([3]), 0)}


@exact
@pytest.mark.parametrize("padding", HOLES)
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name, padding):
    mask = HOLES[padding]
    assert_same(ENCODERS[name]().double(), mask, input_ids=IDS, attention_mask=mask)


@exact
@pytest.mark.parametrize("padding", ["none", "left", "holes"])
@pytest.mark.parametrize("name", PAIRS)
def test_encoders_and_decoders(name, padding):
    """T5 adds a learned bias to the scores."""
    model = PAIRS[name]().double()
    decoded, right = IDS[:, :7], PADDING["right"][:, 3:10]
    inputs = {"input_ids": IDS, "attention_mask": HOLES[padding], "decoder_input_ids": decoded}
    assert_same(model, torch.ones_like(decoded), **inputs)
    assert_same(model, right, decoder_attention_mask=right, **inputs)
    options = {"max_new_tokens": 6, "num_beams": 3, "eos_token_id": None}
    beams = []
    for implementation in ("pyattn", "eager"):
        model.set_attn_implementation(implementation)
        beams.append(model.generate(IDS, attention_mask=HOLES[padding], **options))
    assert torch.equal(*beams)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    model = decoder("mistral")
    model.config.attention_dropout = 0.25
    inputs = {"input_ids": IDS, "attention_mask": PADDING["left"], "use_cache": False}
    model.train()
    sides = []
    for enable in (False, True):
        if enable:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(0)
        sides.append(results(model, "pyattn", PADDING["left"], **inputs)[1])
    for name, gradient in sides[0].items():
        assert torch.equal(gradient, sides[1][name]), name


@newer_compiler
@pytest.mark.filterwarnings("ignore::Warning")  # the compiler warns about its own parts
def test_compiled():
    model = decoder("llama", num_hidden_layers=1)
    model.set_attn_implementation("pyattn")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for mask in (PADDING["left"], None):
        inputs = {"input_ids": IDS, "attention_mask": mask, "use_cache": False}
        rows = torch.ones_like(IDS, dtype=torch.bool) if mask is None else mask.bool()
        out, truth = compiled(**inputs).logits[rows], model(**inputs).logits[rows]
        assert_near(out, truth)


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "opt"])  # gpt2 and opt don't pass the setting to their layers
def test_weights(name):
    model = decoder(name)
    sides = []
    for implementation in ("pyattn", "eager"):
        model.set_attn_implementation(implementation)
        sides.append(model(IDS, attention_mask=PADDING["left"], output_attentions=True).attentions)
        assert model(IDS).attentions is None
    assert len(sides[0]) == model.config.num_hidden_layers
    for ours, eager in zip(*sides, strict=True):
        rows = PADDING["left"].bool()
        assert (ours - eager).transpose(1, 2)[rows].abs().max() <= ROUNDINGS
