"""Storage of keys and values between calls: in one piece, as a ring buffer, in pages."""

from pyattn.cache.kv_cache import KVCache

__all__ = ["KVCache"]
