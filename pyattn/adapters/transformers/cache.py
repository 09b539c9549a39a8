"""A cache of transformers whose layers are :class:`pyattn.KVCache`: what ``generate`` decodes from, 8 bits or not.

A layer's ``update`` appends to its KVCache and returns, in place of keys and values, their shape and the KVCache. The
attention function of this package reads from it. Any other use of these raises, so no other implementation can take
them for keys.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyattn import AttentionOptions, KVCache
from pyattn.options.checks import check_size

_ATTRIBUTES = ("device", "dtype", "is_cpu", "is_cuda", "layout", "ndim", "requires_grad", "shape")
_METHODS = ("dim", "element_size", "is_floating_point", "numel", "size")
ALLOWED = {getattr(Tensor, name).__get__ for name in _ATTRIBUTES} | {getattr(Tensor, name) for name in _METHODS}
"""The functions of a tensor that :class:`CachedRows` answers."""


class CachedRows(Tensor):
    """The shape of the keys or values (B, Hkv, positions, columns) that a KVCache holds, and the cache.

    Attributes:
        cache: where they are.
    """

    cache: KVCache

    @classmethod
    def of(cls, cached: KVCache, positions: int, columns: int) -> "CachedRows":
        """The rows of the first ``positions``, of k or v by their columns."""
        heads = cached.k.shape[1 if cached.block_table is None else 2]
        shape = len(cached.lengths), heads, positions, columns
        nothing = torch.empty(1, dtype=cached.dtype, device=cached.lengths.device)
        rows: CachedRows = torch.Tensor._make_subclass(cls, nothing.expand(shape))
        rows.cache = cached
        return rows

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise NotImplementedError(
            'pyattn: keys of this cache are read by attn_implementation="pyattn" alone, in its attention function, got '
            f"{getattr(func, '__name__', func)} of them"
        )


def over_slots(cached: KVCache, options: AttentionOptions) -> AttentionOptions:
    """Options of a call over the positions so far for one over the cache, whose masks have a column for each slot."""
    found: dict[str, Any] = {**options}
    for name in ("mask", "bias"):
        t = found.get(name)
        if isinstance(t, Tensor) and t.shape[-1] > 1:
            found[name] = pad(t, (0, cached.max_seqlen - t.shape[-1]))
    return found  # type: ignore[return-value]


def kv_cache(max_seqlen: int, *, kv_dtype: torch.dtype | None = None, page_size: int | None = None) -> Any:
    """A cache for ``model.generate(..., cache=kv_cache(2048))`` of a model with our ``attn_implementation``.

    Before transformers 5.24 the argument is ``past_key_values``. It is a ``transformers.Cache`` whose layers are
    :class:`pyattn.KVCache`, made at their first tokens. Layers with a sliding window keep all positions. Beam search
    reorders it, and assisted generation crops it.

    Args:
        max_seqlen: the most positions of a sequence, the prompt's included.
        kv_dtype: torch.int8 or torch.float8_e4m3fn keeps keys and values in 8 bits; default: in the model's dtype.
        page_size: positions per page, as for :class:`pyattn.KVCache`; default: no pages.

    Raises:
        ImportError: transformers is missing.
        ValueError, TypeError, NotImplementedError: as for :class:`pyattn.KVCache`, at the first tokens; a text longer
            than ``max_seqlen``; another attn_implementation.
    """
    check_size("max_seqlen", max_seqlen)
    base, layer = _classes()
    return base(layer_class_to_replicate=partial(layer, max_seqlen, kv_dtype=kv_dtype, page_size=page_size))


@cache
def _classes() -> tuple[Any, Any]:
    """transformers' Cache, and the class of its layers, which exists once transformers is imported."""
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

    class KVCacheLayer(CacheLayerMixin):  # type: ignore[misc]
        is_sliding = False
        is_croppable = True
        supports_early_init = False

        def __init__(self, max_seqlen: int, **options: Any) -> None:
            super().__init__()
            self.max_seqlen, self.options, self.length = max_seqlen, options, 0
            self.cache: KVCache | None = None

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            batch, heads, _, columns = key_states.shape
            given: dict[str, Any] = {"dtype": key_states.dtype, "device": key_states.device}
            given |= {"head_dim_v": value_states.shape[-1], **self.options}
            self.cache = KVCache(batch, heads, self.max_seqlen, columns, **given)
            self.is_initialized = True

        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **named: Any
        ) -> tuple[CachedRows, CachedRows]:
            if self.cache is None:
                self.lazy_initialization(key_states, value_states)
            assert self.cache is not None
            if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
                raise NotImplementedError(
                    "pyattn: kv_cache() keeps no gradients: generate, or call the model under torch.no_grad(), got "
                    "keys that require them"
                )
            self.cache.append(key_states, value_states)
            self.length += key_states.shape[2]
            columns = key_states.shape[-1], value_states.shape[-1]
            keys, values = (CachedRows.of(self.cache, self.length, n) for n in columns)
            return keys, values

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.length + query_length, 0

        def get_seq_length(self) -> int:
            return self.length

        def get_max_length(self) -> int:
            return self.max_seqlen

        def reset(self) -> None:
            self.length = 0
            if self.cache is not None:
                self.cache.reset()

        def crop(self, tokens_to_remove: int) -> None:
            """Leaves as many tokens as transformers' own layer, whose versions differ in the meaning of the number."""
            layer, rows = DynamicLayer(), torch.empty(1, 1, self.length, 1)
            layer.update(rows, rows)
            layer.crop(tokens_to_remove)
            if self.cache is not None:
                self.cache.truncate(layer.get_seq_length())
            self.length = layer.get_seq_length()

        def reorder_cache(self, beam_idx: Tensor) -> None:
            if self.cache is not None:
                self.cache.reorder(beam_idx)

        def _refuse(self, *args: Any) -> None:
            raise NotImplementedError("pyattn: kv_cache() has a fixed batch and device, got a call that changes them")

        batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse

    return Cache, KVCacheLayer
