"""The cache that a module manages itself."""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from pyattn.cache import KVCache
from pyattn.nn.checks import check_added, check_alone, check_cache
from pyattn.options.checks import check_type

FEWEST = 256
"""Positions of a new cache: a prompt and a few lines; 1 MB in float32 with 8 KV heads of head_dim 64."""


class GrowingCache:
    """A :class:`KVCache` that is replaced by one of twice the size when full: a token moves once on average.

    A ring buffer only grows for a longer chunk of text.
    """

    def __init__(self) -> None:
        self.cache: KVCache | None = None

    def reset(self) -> None:
        """Forgets everything; the next sequences may differ in number and dtype."""
        self.cache = None

    def with_room_for(
        self, k: Tensor, window: tuple[int, int] | None = None, shared_values: bool = False
    ) -> tuple[KVCache, int]:
        """The cache, with room for ``k`` (B, new, Hkv, D), which is about to be appended.

        Also returns the length of the longest sequence after that. A cache that k does not fit is returned as it is,
        for the caller to refuse. ``window``: of a ring buffer; ``shared_values``: as for :class:`KVCache`.
        """
        batch, new, num_heads_kv, head_dim = k.shape
        old = self.cache
        used = int(old.lengths.max()) if old is not None and old.lengths.numel() else 0
        if not used:  # tokens of a refused or empty call left it empty: the next ones may differ in number
            old = None
        if old is not None and old.window != window:
            raise ValueError(
                "pyattn: a module's window must not change before reset_cache(), because its cache has dropped or kept "
                f"keys for it, got {window} and before {old.window}"
            )
        needed = new + (used if window is None else window[0])
        if old is not None and (needed <= old.max_seqlen or len(old.lengths) != batch or old.dtype != k.dtype):
            return old, used + new
        size = max(FEWEST, 1 << (needed - 1).bit_length())
        kind: dict[str, Any] = {"window": window, "shared_values": shared_values}
        self.cache = KVCache(batch, num_heads_kv, size, head_dim, dtype=k.dtype, device=k.device, **kind)
        if old is not None:
            _move(old, self.cache)
        return self.cache, used + new


def _move(old: KVCache, made: KVCache) -> None:
    """Copies the sequences of ``old`` into the same slots of a larger cache."""
    slots = old.k.shape[2]
    for source, target in [(old.k, made.k)] if old.shared_values else [(old.k, made.k), (old.v, made.v)]:
        target[:, :, :slots] = source
    made.lengths.copy_(old.lengths)
    made.starts.copy_(old.starts)


def as_wide_as(cache: KVCache, t: Tensor | None) -> Tensor | None:
    """A mask or bias ``t`` (..., positions so far, or 1), padded to a column for each position of ``cache``."""
    if t is None or t.shape[-1] == 1:
        return t
    return pad(t, (0, max(0, cache.max_seqlen - t.shape[-1])))


class SelfCaching(nn.Module):
    """A module that keeps its own cache: calls with ``use_cache=True`` continue one another's tokens.

    The cache grows as needed and lasts until :meth:`reset_cache` or a call without ``use_cache``. ``mask`` and ``bias``
    then have as many keys as the longest sequence has tokens, this call's included. The tokens of earlier calls are
    constants for gradients, as :class:`KVCache` keeps them.
    """

    head_dim: int

    def __init__(self) -> None:
        super().__init__()
        self._own_cache = GrowingCache()

    def reset_cache(self) -> None:
        """Forgets the tokens of calls with ``use_cache``."""
        self._own_cache.reset()

    def check_use(self, x: Tensor, use_cache: bool, options: Any, context_length: int | None = None) -> KVCache | None:
        """The caller's cache of ``options``, if any; TypeError or ValueError unless ``use_cache`` goes with them."""
        check_type("use_cache", use_cache, bool)
        check_alone(x, use_cache=use_cache)
        if use_cache and (cache := options.get("kv_cache")) is not None:
            raise ValueError(f"pyattn: use_cache=True must come without kv_cache, got {cache!r}")
        return None if use_cache else check_cache(self, options, context_length)

    def take_own_cache(
        self,
        options: Any,
        q: Tensor,
        k: Tensor,
        *,
        most: int | None = None,
        window: tuple[int, int] | None = None,
        shared_values: bool = False,
    ) -> None:
        """Makes the module's cache the ``kv_cache`` of ``options``, with room for ``k``.

        ValueError if a sequence then had more than ``most`` tokens. ``window`` makes the cache a ring buffer.
        ``shared_values``: the rows of k are one head's, and the values are parts of them.
        """
        cache = self._own_cache.cache
        before = 0 if cache is None or not len(cache.lengths) else int(cache.lengths.max())
        if most is not None and before + k.shape[1] > most:
            raise ValueError(
                f"pyattn: the module's cache must hold at most {most} tokens, its max_seq_len or context_length, got "
                f"{before} and {k.shape[1]} more; reset_cache() starts anew, window_size keeps the newest tokens alone"
            )
        heads = k.unflatten(-1, (1 if shared_values else -1, k.shape[-1] if shared_values else self.head_dim))
        own, tokens = self._own_cache.with_room_for(heads, window, shared_values)
        if window is None:
            mask, bias = options.get("mask"), options.get("bias")
            check_added(mask, bias, (k.shape[0], q.shape[-1] // self.head_dim, k.shape[1], tokens))
            options["mask"], options["bias"] = as_wide_as(own, mask), as_wide_as(own, bias)
        options["kv_cache"] = own
