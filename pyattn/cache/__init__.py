"""Storage of keys and values between calls: contiguous, as a ring buffer or in pages."""

from pyattn.cache.kv_cache import KVCache

__all__ = ["KVCache"]
