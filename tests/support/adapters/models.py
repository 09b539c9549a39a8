"""Small models of transformers, built from configurations, and how the tests run them."""

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import create_causal_mask

from pyattn.adapters import transformers as adapter

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
WINDOWED = GROUPED | {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
LATENT = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "first_k_dense_replace": 1}
LATENT |= {"n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
LATENT |= {"num_key_value_heads": 4}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
BART = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "dropout": 0.0}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2 | ENDS | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "llama": ("Llama", GROUPED),
    "mistral": ("Mistral", GROUPED | {"sliding_window": 4}),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 8}),
    "gemma2": ("Gemma2", WINDOWED | {"attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3Text", WINDOWED),
    "gpt-oss": ("GptOss", WINDOWED | EXPERTS | {"rope_parameters": ROPE}),
    "phi": ("Phi", SIZES),
    "opt": ("OPT", SIZES | OPT),
    "deepseek-v2": ("DeepseekV2", SIZES | LATENT | {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek-v3": ("DeepseekV3", SIZES | LATENT | {"q_lora_rank": 10, "rope_parameters": YARN}),
    "kimi-linear": ("KimiLinear", SIZES | LATENT | {"num_local_experts": 4, "layer_types": ["full_attention"] * 2}),
    "llama4": ("Llama4Text", WINDOWED | {"num_local_experts": 2, "intermediate_size_mlp": 48}),
}
"""The configuration's name without ``Config``, and its arguments."""

DECODERS["llama4"][1].update(layer_types=["chunked_attention", "full_attention"], attention_chunk_size=4)

CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
"""The name of a cache in models and mask functions; the second name is from before transformers 5.24."""

LENGTH = 12
IDS = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
PADDING = {
    "none": torch.ones(2, LENGTH, dtype=torch.int64),
    "left": torch.arange(LENGTH).ge(torch.tensor([[5], [0]])).long(),
    "right": torch.arange(LENGTH).lt(torch.tensor([[LENGTH], [8]])).long(),
}


def made(config: str, arguments: dict[str, Any], kind: str = "CausalLM") -> Any:
    """A model without dropout, with weights large enough for attention to matter."""
    adapter.register()
    torch.manual_seed(0)
    configuration = getattr(transformers, f"{config}Config")(**arguments)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(configuration).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others don't support float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def decoder(name: str, **changes: Any) -> Any:
    config, arguments = DECODERS[name]
    return made(config, arguments | changes)


def results(model: Any, implementation: str, rows: Tensor, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The outputs at these rows, bool (B, S), and the gradient of each parameter."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    outputs = model(**inputs)
    out = (outputs.logits if "logits" in outputs else outputs.last_hidden_state)[rows.bool()]
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (out * dout.to(out.dtype)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out.detach(), gradients


ROUNDINGS = 2**-17
"""Norms and rotary tables compute in float32 even in float64 models, where one rounding may differ: 2^-24, amplified up
to 2^7 by two layers. A wrong mask or scale changes results by some 2^-3."""


def assert_near(out: Tensor, truth: Tensor, what: Any = None) -> None:
    assert (out - truth).abs().max() <= ROUNDINGS * truth.abs().max(), what


def assert_gradients_near(found: dict[str, Tensor], truth: dict[str, Tensor], what: Any = None) -> None:
    """Relative to the largest gradient of any parameter."""
    assert found.keys() == truth.keys()
    largest = max(gradient.abs().max() for gradient in truth.values())
    for name, gradient in found.items():
        assert (gradient - truth[name]).abs().max() <= ROUNDINGS * largest, (what, name)
