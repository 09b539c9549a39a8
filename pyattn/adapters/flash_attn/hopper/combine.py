"""FlashAttention 3's functions around a split of the keys: flash_attn_combine and get_scheduler_metadata."""

import torch
from torch import Tensor

from pyattn.adapters.flash_attn.arguments import Window, WrongValueError, check_dimensions, check_int32, window_of
from pyattn.adapters.flash_attn.hopper.arguments import check_hints
from pyattn.options import UNBOUNDED
from pyattn.options.checks import check_sizes, check_tensor, check_type


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The out and lse over all keys from those of its parts::

        lse = log(sum_n exp(lse_partial_n))        out = sum_n exp(lse_partial_n - lse) out_partial_n

    Args:
        out_partial: (n, B, S, H, D) float32, out of each part.
        lse_partial: (n, B, S, H) float32, lse of each part; -inf for a query that sees none of its keys.
        out: where to write the result, (B, S, H, D) in out_dtype.
        out_dtype: float32, bfloat16 or float16; default float32.

    Returns:
        ``(out, lse)``, (B, S, H, D) and (B, S, H); 0 and -inf for a query that sees no key.

    >>> out, lse = flash_attn_combine(torch.ones(2, 1, 3, 4, 8), torch.zeros(2, 1, 3, 4))
    >>> out.mean().item(), lse.exp().mean().round().item()
    (1.0, 2.0)
    """
    dtype = torch.float32 if out_dtype is None else out_dtype
    for name, tensor in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        check_tensor(name, tensor)
        if tensor.dtype != torch.float32:
            raise TypeError(f"pyattn: {name} must be float32, got {tensor.dtype}")
    check_dimensions("out_partial", out_partial, "splits, batch, seqlen, num_heads, head_dim")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"pyattn: out_dtype must be float32, bfloat16 or float16, got {dtype}")
    if lse_partial.shape != out_partial.shape[:-1]:
        raise WrongValueError(
            f"pyattn: lse_partial must have shape {tuple(out_partial.shape[:-1])}, got {tuple(lse_partial.shape)}"
        )
    lse = torch.logsumexp(lse_partial, 0)
    # A part without keys is left out, not multiplied by 0, which its NaN would survive.
    weights = torch.where(lse_partial == -torch.inf, 0.0, torch.exp(lse_partial - lse))[..., None]
    found = torch.where(weights == 0, 0.0, weights * out_partial).sum(0).to(dtype)
    if out is None:
        return found, lse
    check_tensor("out", out)
    if out.shape != found.shape or out.dtype != dtype:
        raise WrongValueError(
            f"pyattn: out must be {dtype} of shape {tuple(found.shape)}, got {out.dtype} of shape {tuple(out.shape)}"
        )
    return out.copy_(found), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """A plan for a GPU's blocks, which flash_attn_with_kvcache takes and does not read here: one int32, 0."""
    check_sizes(batch_size=batch_size, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, num_heads_q=num_heads_q)
    check_sizes(num_heads_kv=num_heads_kv, headdim=headdim, max_seqlen_k_new=max_seqlen_k_new)
    check_sizes(attention_chunk=attention_chunk, headdim_v=headdim if headdim_v is None else headdim_v)
    check_int32("cache_seqlens", cache_seqlens, (batch_size,))
    window_of(window_size)
    check_type("causal", causal, bool)
    check_hints(num_splits, pack_gqa, sm_margin)
    return torch.zeros(1, dtype=torch.int32, device=cache_seqlens.device)
