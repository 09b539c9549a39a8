"""The cache that a module keeps by itself."""

from torch import Tensor

from pyattn.cache import KVCache

FEWEST = 256
"""Positions of a new cache: a prompt and some lines, at head_dim 64 and 8 KV heads 1 MB in float32."""


class GrowingCache:
    """A :class:`KVCache` that is replaced by one of twice the size where it ends: a token moves once on average."""

    def __init__(self) -> None:
        self.cache: KVCache | None = None

    def reset(self) -> None:
        """Forgets everything; the next sequences may be others in number and dtype."""
        self.cache = None

    def with_room_for(self, k: Tensor, head_dim: int) -> KVCache:
        """The cache, with room for ``k`` (B, new, Hkv * head_dim), which is about to be appended.

        One that k does not fit is returned as it is, for the caller to refuse.
        """
        batch, new, width = k.shape
        old = self.cache
        used = int(old.lengths.max()) if old is not None and old.lengths.numel() else 0
        if old is not None and (used + new <= old.max_seqlen or len(old.lengths) != batch or old.k.dtype != k.dtype):
            return old
        size = max(FEWEST, 1 << (used + new - 1).bit_length())
        self.cache = KVCache(batch, width // head_dim, size, head_dim, dtype=k.dtype, device=k.device)
        if old is not None:
            self.cache.append(old.k[:, :, :used], old.v[:, :, :used], old.lengths)
        return self.cache
