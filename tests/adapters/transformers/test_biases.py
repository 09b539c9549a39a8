"""Promise: models with T5's position biases compute them as tables, with results and gradients of eager attention."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.adapters.models import ENDS, IDS, LENGTH, PADDING, T5, assert_near, made, results
from support.cases import newer_compiler

import pyattn.adapters.transformers as adapter
from pyattn.adapters.transformers import attention as layers
from pyattn.adapters.transformers.position_bias import CLASSES, PositionBias

BUCKETS = {"relative_attention_num_buckets": 6, "relative_attention_max_distance": 5}
PAIR = T5 | ENDS | BUCKETS | {"dropout_rate": 0.0, "decoder_start_token_id": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", PAIR),
    "mt5": ("MT5", PAIR),
    "umt5": ("UMT5", PAIR),
    "longt5": ("LongT5", PAIR | {"local_radius": 3}),
    "switch_transformers": ("SwitchTransformers", PAIR | {"num_experts": 2}),
}
"""The rest of CLASSES takes images or sound."""

INPUTS = {"input_ids": IDS, "attention_mask": PADDING["right"], "decoder_input_ids": IDS[:, :9]}
ROWS = torch.ones(2, 9, dtype=torch.bool)


def model_of(name: str) -> Any:
    config, arguments = MODELS[name]
    return made(config, arguments, "Seq2SeqLM").double()


@pytest.fixture
def biases(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The shapes of relative_bias and bias in each call of attention."""
    shapes = []

    def recorded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        shapes.append(tuple(None if options.get(n) is None else options[n].shape for n in ("relative_bias", "bias")))
        return attention(q, k, v, **options)

    attention = layers.attention
    monkeypatch.setattr(layers, "attention", recorded)
    return shapes


@pytest.mark.parametrize("name", MODELS)
def test_results(name: str, biases: list[tuple[Any, ...]]) -> None:
    """Distances go beyond the last bucket in both directions; no layer has a bias of queries x keys."""
    model = model_of(name)
    out, gradients = results(model, "pyattn", ROWS, **INPUTS)
    assert {table for table, _ in biases} == {(4, 11), None}
    assert all(bias is None or bias[2] == 1 for _, bias in biases)  # Switch adds its padding
    truth, expected = results(model, "eager", ROWS, **INPUTS)
    assert_near(out, truth)
    largest = max(gradient.abs().max() for gradient in expected.values())
    assert any("relative_attention_bias" in key for key in expected)
    for key, gradient in expected.items():
        assert (gradients[key] - gradient).abs().max() <= 2**-17 * largest, key


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_generation(name: str, cache: str) -> None:
    model = model_of(name)
    options = {"max_new_tokens": 10, "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    sides = []
    for implementation in ("pyattn", "eager"):
        model.set_attn_implementation(implementation)
        kind = None if cache == "dynamic" else cache
        sides.append(model.generate(IDS, attention_mask=PADDING["left"], cache_implementation=kind, **options))
    assert torch.equal(sides[0].sequences, sides[1].sequences)
    assert_near(torch.stack(sides[0].logits), torch.stack(sides[1].logits))


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool, biases: list[tuple[Any, ...]]) -> None:
    """Checkpoints that are re-entrant return tensors only, so there the bias has S x S."""
    model = model_of("t5").train()
    sides = []
    for enable in (False, True):
        if enable:
            biases.clear()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        sides.append(results(model, "pyattn", ROWS, **INPUTS, use_cache=False)[1])
    assert any(bias is not None for _, bias in biases) == reentrant
    for key, gradient in sides[0].items():
        torch.testing.assert_close(sides[1][key], gradient, rtol=1e-12, atol=1e-12)


def test_weights() -> None:
    model = model_of("t5")
    sides = []
    for implementation in ("pyattn", "eager"):
        model.set_attn_implementation(implementation)
        outputs = model(**INPUTS, output_attentions=True)
        sides.append([*outputs.encoder_attentions, *outputs.decoder_attentions, *outputs.cross_attentions])
    assert len(sides[0]) == len(sides[1]) == 6
    for ours, eager in zip(*sides, strict=True):
        assert_near(ours, eager)


@newer_compiler
@pytest.mark.filterwarnings("ignore::Warning")  # the compiler warns about its own parts
def test_compiled() -> None:
    model = model_of("t5")
    model.set_attn_implementation("pyattn")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_near(compiled(**INPUTS, use_cache=False).logits, model(**INPUTS, use_cache=False).logits)


def test_other_implementations_are_unchanged() -> None:
    """Also after a call of ours."""
    layer = model_of("t5").encoder.block[0].layer[0].SelfAttention
    own = layer.compute_bias.__wrapped__
    for implementation in ("pyattn", "eager", "sdpa"):
        layer.config._attn_implementation = implementation
        bias = layer.compute_bias(LENGTH, LENGTH)
        assert isinstance(bias, PositionBias) if implementation == "pyattn" else torch.equal(bias, own(layer, 12, 12))


def test_every_class_is_known() -> None:
    """transformers has no other class with T5's compute_bias, and calls of register() wrap each once."""
    folder = Path(transformers.models.__file__).parent
    found = [
        path for path in folder.glob("*/modeling_*.py") if "def compute_bias(self, query_" in path.read_text("utf-8")
    ]
    known = {folder / name / f"modeling_{name}.py" for name in CLASSES}
    assert {path for path in found if "past_seen_tokens" in path.read_text("utf-8")} == known
    kinds = [
        getattr(import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
        for folder, name in CLASSES.items()
    ]
    adapter.register()
    wrapped = [(kind.compute_bias, kind.forward) for kind in kinds]
    adapter.register()
    assert wrapped == [(kind.compute_bias, kind.forward) for kind in kinds]
    assert all(hasattr(function, "__wrapped__") for functions in wrapped for function in functions)
