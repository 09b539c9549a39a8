"""Promise: models of several parts, some with their own attention, run with this one and agree with eager attention."""

from typing import Any

import pytest
import torch
from support.adapters.models import assert_gradients_near, assert_near
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedModel,
    Siglip2VisionConfig,
    Siglip2VisionModel,
)
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.gemma4 import Gemma4AudioConfig, Gemma4Config, Gemma4TextConfig

from pyattn.adapters import transformers as adapter

AUDIO_TOKEN = 7
TEXT: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "pad_token_id": 0}
TEXT |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "num_kv_shared_layers": 0}
TEXT |= {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
AUDIO: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "output_proj_dims": 32}
AUDIO |= {"subsampling_conv_channels": [16, 8], "conv_kernel_size": 3, "attention_chunk_size": 4}
AUDIO |= {"attention_context_left": 5, "attention_context_right": 0, "use_clipped_linears": False}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
VISION |= {"num_patches": 16, "patch_size": 2}

exact = pytest.mark.usefixtures("softmax_in_its_own_dtype")


def both(model: PreTrainedModel, **inputs: Any) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """The model's loss, or its sum of squared states, and all gradients, with this attention and with eager."""
    sides = []
    for implementation in ("pyattn", "eager"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        found = model(**inputs)
        out = found.loss if "labels" in inputs else found.pooler_output
        out.square().sum().backward()
        gradients = {name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None}
        sides.append((out.detach(), gradients))
    return sides


@exact
@pytest.mark.parametrize("audio", [False, True], ids=["text", "audio"])
def test_gemma4_trains(audio):
    """Its labels travel through every layer's arguments; its audio encoder cuts an eager mask into blocks."""
    adapter.register()
    torch.manual_seed(0)
    parts = {"text_config": Gemma4TextConfig(**TEXT), "vision_config": None}
    config = Gemma4Config(**parts, audio_config=Gemma4AudioConfig(**AUDIO), audio_token_id=AUDIO_TOKEN)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="pyattn")
    model = model if audio else model.double()  # the audio encoder multiplies in float32
    assert model.model.audio_tower.config._attn_implementation == "eager"
    assert model.model.language_model.config._attn_implementation == "pyattn"
    ids = torch.randint(11, 64, (2, 20))
    padding = torch.ones_like(ids).index_fill_(1, torch.arange(3), 0)
    labels = ids.index_fill(1, torch.arange(4), -100)  # padding sees no key, which eager attention averages
    inputs: dict[str, Any] = {"attention_mask": padding}
    if audio:
        ids[:, 3:11] = AUDIO_TOKEN
        inputs["input_features"] = torch.randn(2, 32, 16)
        inputs["input_features_mask"] = torch.ones(2, 32, dtype=torch.bool)
    sides = both(model.train(), input_ids=ids, labels=labels, **inputs)
    assert_near(sides[0][0], sides[1][0])
    assert_gradients_near(sides[0][1], sides[1][1])


@exact
def test_siglip2_pools_padded_images():
    """The encoder's mask becomes intervals; the pooling head repeats the bool mask of its query for every head."""
    adapter.register()
    torch.manual_seed(0)
    model = Siglip2VisionModel(Siglip2VisionConfig(**VISION)).double()
    seen = torch.arange(16) < torch.tensor([[12], [16]])
    shapes = torch.tensor([[3, 4], [4, 4]])
    pixels = torch.randn(2, 16, 12, dtype=torch.float64)
    sides = both(model, pixel_values=pixels, pixel_attention_mask=seen, spatial_shapes=shapes)
    assert_near(sides[0][0], sides[1][0])
    assert_gradients_near(sides[0][1], sides[1][1])


def test_convolutions_of_nemotron_read_a_bool_mask():
    """It has all queries, as with "sdpa"; None still means that nothing is hidden."""
    adapter.register()
    config = AutoConfig.for_model("nemotron_asr_streaming_encoder")
    x = torch.randn(2, 6, 8)
    padding = torch.arange(6) < torch.tensor([[4], [6]])
    masks = []
    for implementation in ("pyattn", "sdpa"):
        config._attn_implementation = implementation
        assert create_bidirectional_mask(config, x, torch.ones_like(padding)) is None
        masks.append(create_bidirectional_mask(config, x, padding))
    assert masks[0].dtype == torch.bool
    assert torch.equal(*masks)
