"""The cache that a module manages itself."""

from torch import Tensor
from torch.nn.functional import pad

from pyattn.cache import KVCache

FEWEST = 256
"""Positions of a new cache: a prompt and a few lines; 1 MB in float32 with 8 KV heads of head_dim 64."""


class GrowingCache:
    """A :class:`KVCache` that is replaced by one of twice the size when full: a token moves once on average."""

    def __init__(self) -> None:
        self.cache: KVCache | None = None

    def reset(self) -> None:
        """Forgets everything; the next sequences may differ in number and dtype."""
        self.cache = None

    def with_room_for(self, k: Tensor, head_dim: int) -> tuple[KVCache, int]:
        """The cache, with room for ``k`` (B, new, Hkv * head_dim), which is about to be appended.

        Also returns the length of the longest sequence after that. A cache that k does not fit is returned as it is,
        for the caller to refuse.
        """
        batch, new, width = k.shape
        old = self.cache
        used = int(old.lengths.max()) if old is not None and old.lengths.numel() else 0
        if old is not None and (used + new <= old.max_seqlen or len(old.lengths) != batch or old.k.dtype != k.dtype):
            return old, used + new
        size = max(FEWEST, 1 << (used + new - 1).bit_length())
        self.cache = KVCache(batch, width // head_dim, size, head_dim, dtype=k.dtype, device=k.device)
        if old is not None:
            self.cache.append(old.k[:, :, :used], old.v[:, :, :used], old.lengths)
        return self.cache, used + new


def as_wide_as(cache: KVCache, t: Tensor | None) -> Tensor | None:
    """A mask or bias ``t`` (..., positions so far, or 1), padded to a column for each position of ``cache``."""
    if t is None or t.shape[-1] == 1:
        return t
    return pad(t, (0, max(0, cache.max_seqlen - t.shape[-1])))
