"""Attention weights, sums of them, and the largest scores."""

from pyattn.weights.attention_weights import attention_weights

__all__ = ["attention_weights"]
