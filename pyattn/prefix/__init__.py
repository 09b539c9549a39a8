"""Attention over a prefix that several sequences share."""

from pyattn.prefix.attention import attention_with_prefix

__all__ = ["attention_with_prefix"]
