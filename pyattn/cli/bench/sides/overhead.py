"""The fixed cost of small calls: ``pyattn bench --only overhead``, beside torch's SDPA over the same tensors.

The kernels have next to nothing to do, so a time is that of Python, the dispatcher, checks and allocations.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import pyattn
from pyattn import KVCache
from pyattn.adapters import sdpa as switch
from pyattn.adapters.flash_attn.kv_cache import flash_attn_with_kvcache
from pyattn.cli.bench.sides.calls import Calls, Run, Side, Sizes
from pyattn.cli.bench.sides.contenders import sdpa

BASE = "torch sdpa"

SIZES = (
    ("attention", (1, 2, 6, 2)),
    ("attention", (1, 4, 32, 16)),
    ("attention", (1, 8, 16, 64)),
    ("attention_with_cache", (1, 2, 6, 2)),
    ("F.sdpa under the switch", (1, 2, 6, 2)),
    ("flash_attn_with_kvcache", (1, 2, 6, 2)),
)
"""The call, and its batch, heads, tokens and head_dim; with a cache, one token over all of them."""

Call = Callable[[], Any]


def _switched(on: bool, call: Call) -> Call:
    """``call`` after SDPA's switch has been set, which takes a hundred times as long as the call: see ``in_turn``."""

    def switched() -> Any:
        if switch.is_enabled() != on:
            (switch.enable if on else switch.disable)()
        return call()

    return switched


def _over_cache(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    batch, heads, tokens, head_dim = k.shape
    cache = KVCache(batch, heads, tokens, head_dim, dtype=k.dtype, device=k.device)
    cache.append(k, v)
    return {
        "pyattn": lambda: pyattn.attention_with_cache(q, cache),
        BASE: lambda: functional.scaled_dot_product_attention(q, k, v),
    }


def _over_tensors(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    """Caches in flash-attn's layout (B, S, H, D), to whose last position both sides write the new token."""
    query, keys, values = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    token, before = (keys[:, -1:].clone(), values[:, -1:].clone()), k.shape[2] - 1

    def theirs() -> Tensor:
        keys[:, before:], values[:, before:] = token
        q, k, v = (t.transpose(1, 2) for t in (query, keys, values))
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    return {
        "pyattn": lambda: flash_attn_with_kvcache(query, keys, values, *token, cache_seqlens=before),
        BASE: theirs,
    }


def sides(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> tuple[dict[str, Call], dict[str, Call]]:
    """The forwards of ours and BASE, and their forward and backward where the call has one."""
    q, k, v, dout = torch.randn(4, *shape, dtype=dtype, device=device).unbind()
    if name == "attention":
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        both = {"pyattn": Side(pyattn.attention, leaves, dout), BASE: Side(sdpa, leaves, dout)}
        return {n: side.forward for n, side in both.items()}, {n: side.gradients for n, side in both.items()}
    if name == "F.sdpa under the switch":
        return {n: _switched(n != BASE, lambda: sdpa(q, k, v)) for n in ("pyattn", BASE)}, {}
    make = {"attention_with_cache": _over_cache, "flash_attn_with_kvcache": _over_tensors}[name]
    return make(q[:, :, -1:], k, v), {}


def calls(run: Run, sizes: tuple[str, Sizes]) -> Calls:
    """A small call: its name and its shape."""
    return Calls(*sides(*sizes, *run.place))
