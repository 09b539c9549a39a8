"""A call's own keys and values over a cache, which keeps no graph: their gradients, and their removal after an error.

A cache is memory that calls write in place; what earlier calls appended takes part as a constant. A training step that
runs over a cache still needs the gradients of the keys and values that it appends itself, as without a cache.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyattn import ops
from pyattn.cache.kv_cache import KVCache
from pyattn.derivatives.transforms import transforming


def lengths_before(cache: KVCache) -> Tensor:
    """The lengths (B,) before an append.

    A compiled backward may not save a clone of a graph's input, but clone the input again, when it holds later changes.
    It saves what an operator of this library returns.
    """
    if not torch.compiler.is_compiling():
        return cache.lengths.clone()
    before: Tensor = ops.cache_newest(cache.lengths, None, 0, 0, sys.maxsize)
    return before


def keys_and_values(cache: KVCache, q: Tensor, options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """``cache.k`` and ``cache.v``; in a compiled graph with gradients, copies.

    Eager backward raises if the cache has changed since. A compiled one would read the changes: see
    :func:`lengths_before`.
    """
    k, v = cache.k, cache.v
    if not torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return k, v
    if any(isinstance(t, Tensor) and t.requires_grad for t in (q, k, v, *options.values())):
        columns = v.shape[-1] if cache.shared_values else None
        k = k if k.requires_grad else ops.cache_copy(k)
        v = k[..., :columns] if columns is not None else v if v.requires_grad else ops.cache_copy(v)
    return k, v


class _Written(torch.autograd.Function):
    """``storage``, into which the rows ``new`` (B, Hkv, n, D) have just been written: the same memory, not copied.

    Row i of sequence b is storage[first[b, i], second[b, i]], the dimension of heads being moved after both; its
    gradient is that of the row, or 0 where the row was not kept.
    """

    @staticmethod
    def forward(storage: Tensor, new: Tensor, first: Tensor, second: Tensor, kept: Tensor, paged: bool) -> Tensor:
        return storage.view_as(storage)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *_, first, second, kept, ctx.paged = inputs
        ctx.save_for_backward(first, second, kept)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        first, second, kept = ctx.saved_tensors
        rows = (gradient if ctx.paged else gradient.transpose(1, 2))[first, second]  # (B, n, Hkv, D)
        return None, torch.where(kept[..., None, None], rows, 0.0).transpose(1, 2), None, None, None, None


def _copied(storage: Tensor, new: Tensor, first: Tensor, second: Tensor, kept: Tensor, paged: bool) -> Tensor:
    """:class:`_Written` as torch operations on a copy: compiled graphs lose the gradient of memory written in place."""
    storage = ops.cache_copy(storage) if torch.compiler.is_compiling() else storage
    rows = torch.where(kept[..., None, None], new.transpose(1, 2), 0.0)
    whole = storage if paged else storage.transpose(1, 2)
    written = torch.zeros_like(whole).index_put((first, second), rows, accumulate=True)
    at = torch.zeros(whole.shape[:2], dtype=torch.int32, device=whole.device)
    at = at.index_put((first, second), kept.to(torch.int32), accumulate=True) > 0
    result = torch.where(at[..., None, None], written, whole)
    return result if paged else result.transpose(1, 2)


def appended(cache: KVCache, k: Tensor, v: Tensor | None, lengths: Sequence[int] | Tensor | None = None) -> KVCache:
    """Appends to ``cache`` and returns it, or a view of it through which gradients reach ``k`` and ``v``.

    Arguments are those of :meth:`KVCache.append`. The view serves this call: appending again invalidates its graph.
    """
    transformed = not torch.compiler.is_compiling() and transforming()  # tensors may have tangents, or gradients inside
    required = torch.is_grad_enabled() and (k.requires_grad or (v is not None and v.requires_grad))
    if not (transformed or required):
        cache.append(k, v, lengths)
        return cache
    if cache.kv_dtype is not None:
        raise NotImplementedError(
            f"pyattn: a cache with kv_dtype={cache.kv_dtype} has no gradients: append under torch.no_grad(), got "
            + ("a transform of torch.func or forward mode" if transformed else "k or v that requires them")
        )
    before = lengths_before(cache)
    cache.append(k, v, lengths)
    position = before[:, None] + torch.arange(k.shape[2], device=before.device)
    slot = position - cache.starts[:, None]
    kept = (position < cache.lengths[:, None]) & (slot >= 0)
    slot = slot.masked_fill(~kept, 0)
    if cache.block_table is None:
        at = torch.arange(len(before), device=before.device)[:, None].expand_as(slot), slot
    else:
        page = cache.k.shape[1]
        at = cache.block_table.gather(1, slot // page), slot % page
    view = object.__new__(type(cache))
    vars(view).update(vars(cache))
    rows = *at, kept, cache.block_table is not None
    written: Callable[..., Tensor] = _copied if transformed or torch.compiler.is_compiling() else _Written.apply
    if transformed or k.requires_grad:
        view.k = written(cache.k, k, *rows)
    if v is not None and (transformed or v.requires_grad):
        view.v = written(cache.v, v, *rows)
    return view


def withdraw(cache: KVCache, new: int) -> None:
    """Takes back the last append, of ``new`` rows, after an error.

    A ring buffer may have dropped keys for it, but none that a later token sees: a call has at most max_seqlen - left.
    """
    before = cache.lengths - new if cache.last_append is None else cache.last_append[1]
    cache.lengths.copy_(before)
