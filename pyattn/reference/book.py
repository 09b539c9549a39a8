"""The book's bonus classes in plain PyTorch: the specification of :mod:`pyattn.nn.book`.

Those of chapter 3 compute as the chapter's own classes do, whichever torch function the book calls. They differ in
their parameters, the parameters' order and their state dicts, which are specified here. Those of chapter 4 follow.
"""
# ruff: noqa: D101, D102

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from typing_extensions import Unpack

from pyattn.reference.heads import Masks, attend, causal_heads, future, merge, split
from pyattn.reference.modules import MultiHeadAttentionWrapper
from pyattn.reference.projected import CachedHeads, MultiHeadAttention
from pyattn.reference.sparse import LightningIndexer, MultiHeadAttentionWithDSA

__all__ = [
    "Ch03_MHA",
    "Ch03_MHA_Wrapper",
    "GatedMultiHeadAttention",
    "LightningIndexer",
    "MHAEinsum",
    "MHAPyTorchClass",
    "MHAPyTorchFlexAttention",
    "MHAPyTorchSDPAWithoutFlash",
    "MHAPyTorchScaledDotProduct",
    "MultiHeadAttentionCombinedQKV",
    "MultiHeadAttentionWithDSA",
    "MultiHeadAttentionWithSWA",
    "MultiHeadLatentAttention",
]

Ch03_MHA = MultiHeadAttention


class Ch03_MHA_Wrapper(MultiHeadAttentionWrapper):
    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__(d_in, d_out, context_length, dropout, num_heads, qkv_bias)
        self.out_proj: nn.Linear = nn.Linear(d_out * num_heads, d_out * num_heads)

    def forward(self, x: Tensor, **masks: Unpack[Masks]) -> Tensor:
        out: Tensor = self.out_proj(super().forward(x, **masks))
        return out


class MHAPyTorchScaledDotProduct(nn.Module):
    keeps_mask = False
    mask_dtype: torch.dtype | None = None
    dropout_type: type[float] | type[nn.Dropout] = float

    def __init__(
        self,
        d_in: int,
        d_out: int,
        num_heads: int,
        context_length: int,
        dropout: float = 0.0,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.context_length = context_length
        self.qkv: nn.Linear = nn.Linear(d_in, 3 * d_out, bias=qkv_bias)
        self.proj: nn.Linear = nn.Linear(d_out, d_out)
        self.dropout: float | nn.Module = self.dropout_type(dropout)
        if self.keeps_mask:
            self.register_buffer("mask", future(context_length).to(dtype=self.mask_dtype))

    def forward(self, x: Tensor, **masks: Unpack[Masks]) -> Tensor:
        dropout = self.dropout if isinstance(self.dropout, nn.Module) else nn.Dropout(self.dropout)
        q, k, v = self.qkv(x).chunk(3, -1)
        out: Tensor = self.proj(causal_heads(q, k, v, self.num_heads, dropout.train(self.training), **masks))
        return out


class MHAPyTorchFlexAttention(MHAPyTorchScaledDotProduct):
    pass


class MHAPyTorchSDPAWithoutFlash(MHAPyTorchScaledDotProduct):
    keeps_mask = True
    mask_dtype: torch.dtype | None = torch.bool


class MultiHeadAttentionCombinedQKV(MHAPyTorchScaledDotProduct):
    keeps_mask = True
    dropout_type: type[nn.Dropout] = nn.Dropout


class MHAEinsum(nn.Module):
    bias_q: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.W_query: nn.Parameter = nn.Parameter(torch.randn(d_in, d_out))
        self.W_key: nn.Parameter = nn.Parameter(torch.randn(d_in, d_out))
        self.W_value: nn.Parameter = nn.Parameter(torch.randn(d_in, d_out))
        for name in ("bias_q", "bias_k", "bias_v"):
            self.register_parameter(name, nn.Parameter(torch.zeros(d_out)) if qkv_bias else None)
        self.out_proj: nn.Linear = nn.Linear(d_out, d_out)
        self.dropout: nn.Dropout = nn.Dropout(dropout)
        self.register_buffer("mask", future(context_length))
        for weight in (self.W_query, self.W_key, self.W_value):
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        bound = 1 / math.sqrt(d_out)
        for bias in (self.bias_q, self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def forward(self, x: Tensor, **masks: Unpack[Masks]) -> Tensor:
        weights = (self.W_query, self.bias_q), (self.W_key, self.bias_k), (self.W_value, self.bias_v)
        q, k, v = (linear(x, weight.mT, bias) for weight, bias in weights)
        out: Tensor = self.out_proj(causal_heads(q, k, v, self.num_heads, self.dropout, **masks))
        return out


class MHAPyTorchClass(nn.Module):
    def __init__(
        self,
        d_in: int,
        d_out: int,
        num_heads: int,
        context_length: int,
        dropout: float = 0.0,
        qkv_bias: bool = False,
        need_weights: bool = True,
    ) -> None:
        super().__init__()
        self.multihead_attn: nn.MultiheadAttention = nn.MultiheadAttention(
            d_out, num_heads, dropout, bias=qkv_bias, add_bias_kv=qkv_bias, batch_first=True
        )
        self.need_weights = need_weights
        self.proj: nn.Linear = nn.Linear(d_out, d_out)
        self.register_buffer("mask", future(context_length).bool())

    def forward(self, x: Tensor, **masks: Unpack[Masks]) -> Tensor:
        inner = self.multihead_attn
        q, k, v = linear(x, inner.in_proj_weight, inner.in_proj_bias).chunk(3, -1)
        if inner.bias_k is not None and inner.bias_v is not None:
            if masks.get("key_ranges") is not None:
                raise NotImplementedError("pyattn: key_ranges do not say whether bias_k is seen, got qkv_bias=True")
            k = torch.cat([k, inner.bias_k.to(k.dtype).expand(len(x), 1, -1)], 1)
            v = torch.cat([v, inner.bias_v.to(v.dtype).expand(len(x), 1, -1)], 1)
            masks["mask"] = _with_last(masks.get("mask"), x.shape[1], True)
            masks["bias"] = _with_last(masks.get("bias"), x.shape[1], 0.0)
        dropout = nn.Dropout(inner.dropout).train(self.training)
        out: Tensor = self.proj(inner.out_proj(causal_heads(q, k, v, inner.num_heads, dropout, **masks)))
        return out


def _with_last(t: Tensor | None, seqlen: int, value: float) -> Tensor | None:
    """``t`` (..., seqlen or 1), then ``value`` for one more key."""
    return None if t is None else pad(t.expand(*t.shape[:-1], seqlen), (0, 1), value=value)


class MultiHeadAttentionWithSWA(CachedHeads):
    def __init__(
        self,
        d_in: int,
        d_out: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        sliding_window_size: int | None = None,
    ) -> None:
        super().__init__()
        self.mask: Tensor | None = None
        self.W_query: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj: nn.Linear = nn.Linear(d_out, d_out)
        self.dropout: nn.Dropout = nn.Dropout(dropout)
        self.sliding_window_size = sliding_window_size
        self.set_norms(num_heads, num_heads, d_out // num_heads, False)

    def forward(self, x: Tensor, use_cache: bool = False, **masks: Unpack[Masks]) -> Tensor:
        self.window_size: int | None = self.sliding_window_size
        out: Tensor = self.out_proj(self.heads(x, use_cache, None, masks))
        return out


class GatedMultiHeadAttention(nn.Module):
    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.W_query: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_gate: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj: nn.Linear = nn.Linear(d_out, d_out)
        self.dropout: nn.Dropout = nn.Dropout(dropout)
        self.register_buffer("mask", future(context_length), persistent=False)

    def forward(self, x: Tensor, **masks: Unpack[Masks]) -> Tensor:
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        heads = causal_heads(q, k, v, self.num_heads, self.dropout, **masks)
        out: Tensor = self.out_proj(heads * torch.sigmoid(self.W_gate(x)))
        return out


class MultiHeadLatentAttention(nn.Module):
    cache_c_kv: Tensor | None = None

    def __init__(
        self,
        d_in: int,
        d_out: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        latent_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.latent_dim: int = max(16, d_out // 8) if latent_dim is None else latent_dim
        self.W_query: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_DKV: nn.Linear = nn.Linear(d_in, self.latent_dim, bias=qkv_bias)
        self.W_UK: nn.Linear = nn.Linear(self.latent_dim, d_out, bias=qkv_bias)
        self.W_UV: nn.Linear = nn.Linear(self.latent_dim, d_out, bias=qkv_bias)
        self.out_proj: nn.Linear = nn.Linear(d_out, d_out)
        self.dropout: nn.Dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, use_cache: bool = False, **masks: Unpack[Masks]) -> Tensor:
        latent = self.W_DKV(x)
        if not use_cache:
            self.reset_cache()
        else:
            latent = latent if self.cache_c_kv is None else torch.cat([self.cache_c_kv, latent], dim=1)
            self.cache_c_kv = latent
        q, k, v = (split(t, self.num_heads) for t in (self.W_query(x), self.W_UK(latent), self.W_UV(latent)))
        masked = future(latent.shape[1])[-x.shape[1] :].to(x.device).bool()
        out: Tensor = self.out_proj(merge(attend(q, k, v, masked=masked, dropout=self.dropout, **masks)[0]))
        return out

    def reset_cache(self) -> None:
        self.cache_c_kv = None
