"""Caches of 8 bits, as in FlashAttention-3, with a factor for each sequence and KV head.

The factor of k enters with q and that of v with out, so the kernels, which take a scale for each position, take 1.
"""

from typing import Any

import torch
from torch import Tensor

from pyattn import ops
from pyattn.adapters.flash_attn.arguments import WrongValueError
from pyattn.options.checks import check_tensor
from pyattn.options.parse import parse
from pyattn.options.schema import LEARNED, PLACES

DTYPES = (torch.int8, torch.float8_e4m3fn)


def check_descale(q: Tensor, k_cache: Tensor, k: Tensor | None, rotated: bool, **given: Tensor | None) -> None:
    """Raises unless the factors of k and v go with the cache: float32 (B, Hkv), for 8 bits alone."""
    for name, factor in given.items():
        if factor is None:
            continue
        check_tensor(name, factor)
        if k_cache.dtype not in DTYPES:
            raise TypeError(f"pyattn: {name} must come with a cache of int8 or float8_e4m3fn, got {k_cache.dtype}")
        shape = q.shape[0], k_cache.shape[2]
        if factor.dtype != torch.float32 or tuple(factor.shape) != shape:
            raise WrongValueError(
                f"pyattn: {name} must be float32 of shape {shape}, got {factor.dtype} and {tuple(factor.shape)}"
            )
    if k_cache.dtype not in DTYPES:
        return
    if not q.is_cpu or q.dtype == torch.float64:
        raise NotImplementedError(
            "pyattn: a cache of 8 bits must be on the CPU, and q float32, bfloat16 or float16, got "
            f"{q.dtype} on {q.device}"
        )
    if rotated and k is not None:
        raise NotImplementedError(
            f"pyattn: k of a cache of 8 bits must be rotated already, got {k.dtype} and rotary_cos"
        )


def attention_in_8_bits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factors: tuple[Tensor | None, Tensor | None],
    block_table: Tensor | None,
    seqlen_k: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of q (B, Hq, Sq, D) over k and v of 8 bits, (B, Hkv, slots, columns) or in pages."""
    known = list(parse(attention_in_8_bits, options, q.device))
    for name in LEARNED:
        if PLACES[name] < len(known) and (t := known[PLACES[name]]) is not None:
            known[PLACES[name]] = t.to(torch.float32)
    of_k, of_v = (None if f is None else f.repeat_interleave(_group(q, f), 1)[..., None, None] for f in factors)
    q32 = q.to(torch.float32)
    ones = torch.ones((), device=q.device).expand(k.shape[:-1])
    arguments = q32 if of_k is None else q32 * of_k, k, v, ones, ones, block_table, seqlen_k
    out, lse, _, _ = ops.attention_bytes_forward(*arguments, *known)
    return (out if of_v is None else out * of_v).to(q.dtype), lse


def _group(q: Tensor, factor: Tensor) -> int:
    return q.shape[1] // max(1, factor.shape[1])
