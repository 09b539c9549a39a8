"""Attention over a cache of 8 bits, whose values and scales the kernels read in place."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyattn import ops
from pyattn.derivatives.transforms import transforming
from pyattn.options.autocast import cast
from pyattn.options.parse import parse
from pyattn.options.schema import LEARNED, PLACES
from pyattn.weights.max_score import of_heads, with_largest_scores


def check_no_gradient(q: Tensor, kv_dtype: torch.dtype, known: tuple[Any, ...]) -> None:
    """NotImplementedError for what only caches in their own dtype compute."""
    learned = [known[PLACES[name]] for name in LEARNED if PLACES[name] < len(known)]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, *learned)):
        raise NotImplementedError(
            f"pyattn: a cache with kv_dtype={kv_dtype} has no gradients: read it under torch.no_grad(), got q or a "
            "learned option that requires them"
        )
    if not torch.compiler.is_compiling() and transforming():
        raise NotImplementedError(
            f"pyattn: a cache with kv_dtype={kv_dtype} takes no transforms of torch.func, got a call within one"
        )
    if len(known) > PLACES["selected"] and (selected := known[PLACES["selected"]]) is not None:
        raise NotImplementedError(
            f"pyattn: a cache with kv_dtype={kv_dtype} takes no selected, got one of shape {tuple(selected.shape)}"
        )


def attention(q: Tensor, cache: Any, return_max_score: bool, **options: Any) -> tuple[Tensor, ...]:
    """``(out, lse)`` or ``(out, lse, max_score)`` over a cache of 8 bits; masks in ``options`` count its slots."""
    known = parse(attention, options, q.device)
    check_no_gradient(q, cache.kv_dtype, known)
    if torch._C._is_any_autocast_enabled():
        q = cast(q)
    if q.dtype != cache.dtype or q.dim() != 4:
        raise TypeError(f"pyattn: q must have the cache's dtype and 4 dimensions, got {q.dtype} and {tuple(q.shape)}")
    values = list(known)
    for name in LEARNED:
        if PLACES[name] < len(values) and (t := values[PLACES[name]]) is not None:
            values[PLACES[name]] = t.to(torch.float32)
    q32 = q.to(torch.float32)
    if cache.rotation > 1 and q.shape[3] == cache.k.shape[3]:
        q32 = ops.cache_rotate(q32, cache.rotation, False)
    seqlen_k = cache.k.shape[2] if cache.block_table is None else cache.max_seqlen
    scales = cache.k_scale.squeeze(-1), cache.v_scale.squeeze(-1)
    attend = partial(_attend, q32, cache.k, cache.v, *scales, cache.block_table, seqlen_k)
    if return_max_score:
        out, lse, largest = with_largest_scores(attend, tuple(values))
        most: tuple[Tensor, ...] = (of_heads(largest),)
    else:
        out, lse, _, _ = attend(tuple(values))
        most = ()
    if cache.shared_values and cache.rotation > 1:
        out = ops.cache_rotate(out, cache.rotation, True)
    return out.to(q.dtype), lse, *most


def _attend(*tensors_and_options: Any) -> tuple[Tensor, ...]:
    *tensors, known = tensors_and_options
    return ops.attention_bytes_forward(*tensors, *known)
