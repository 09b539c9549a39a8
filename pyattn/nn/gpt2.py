"""GPT-2's sizes, and its attention in each of them."""

from typing import Any

from pyattn.nn.classes.multi_head import MultiHeadAttention
from pyattn.options.checks import check_names

GPT2_CONFIGS: dict[str, dict[str, Any]] = {
    f"gpt2-{size}": {
        "vocab_size": 50257,
        "context_length": 1024,
        "d_model": d_model,
        "num_heads": num_heads,
        "num_layers": num_layers,
        "dropout": 0.1,
        "qkv_bias": False,
    }
    for size, d_model, num_heads, num_layers in (
        ("small", 768, 12, 12),
        ("medium", 1024, 16, 24),
        ("large", 1280, 20, 36),
        ("xl", 1600, 25, 48),
    )
}
"""The four sizes of GPT-2 (Radford et al. 2019), with real head counts. OpenAI's weights have ``qkv_bias=True``."""


def _create_gpt2_attention(size: str, dropout: float, qkv_bias: bool) -> MultiHeadAttention:
    config = GPT2_CONFIGS[f"gpt2-{size}"]
    d_model = config["d_model"]
    return MultiHeadAttention(d_model, d_model, config["context_length"], dropout, config["num_heads"], qkv_bias)


@check_names
def create_gpt2_small_attention(dropout: float = 0.1, *, qkv_bias: bool = False) -> MultiHeadAttention:
    """GPT-2 small's attention: width 768, 12 heads, context 1024. OpenAI's weights need ``qkv_bias=True``."""
    return _create_gpt2_attention("small", dropout, qkv_bias)


@check_names
def create_gpt2_medium_attention(dropout: float = 0.1, *, qkv_bias: bool = False) -> MultiHeadAttention:
    """GPT-2 medium's attention: width 1024, 16 heads, context 1024. OpenAI's weights need ``qkv_bias=True``."""
    return _create_gpt2_attention("medium", dropout, qkv_bias)


@check_names
def create_gpt2_large_attention(dropout: float = 0.1, *, qkv_bias: bool = False) -> MultiHeadAttention:
    """GPT-2 large's attention: width 1280, 20 heads, context 1024. OpenAI's weights need ``qkv_bias=True``."""
    return _create_gpt2_attention("large", dropout, qkv_bias)


@check_names
def create_gpt2_xl_attention(dropout: float = 0.1, *, qkv_bias: bool = False) -> MultiHeadAttention:
    """GPT-2 XL's attention: width 1600, 25 heads, context 1024. OpenAI's weights need ``qkv_bias=True``."""
    return _create_gpt2_attention("xl", dropout, qkv_bias)
