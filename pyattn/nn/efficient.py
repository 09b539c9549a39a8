"""The book's efficient multi-head attention, nine ways to write the same: those that :mod:`pyattn.nn` lacks otherwise.

The first two of S. Raschka's comparison (chapter 3, "Comparing Efficient Multi-Head Attention Implementations") are the
chapter's own classes, under other names; the others differ in where their weights are. Here all compute natively.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from pyattn.arguments import check_sizes, shown
from pyattn.cache import KVCache
from pyattn.nn.causal import MultiHeadAttentionWrapper
from pyattn.nn.checks import Lengths, check_cache, check_input, quotient
from pyattn.nn.described import described
from pyattn.nn.heads import Output, attend_heads, check_dropout, make_dropout, output_of
from pyattn.nn.mask import CausalMask
from pyattn.nn.multi_head import MultiHeadAttention

Ch03_MHA = MultiHeadAttention


class Ch03_MHA_Wrapper(MultiHeadAttentionWrapper):
    """:class:`MultiHeadAttentionWrapper` with a Linear ``out_proj`` over the concatenated heads.

    >>> Ch03_MHA_Wrapper(3, 2, context_length=6, dropout=0.0, num_heads=2)(torch.rand(8, 6, 3)).shape
    torch.Size([8, 6, 4])
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        *,
        persistent_mask: bool | None = None,
    ) -> None:
        super().__init__(d_in, d_out, context_length, dropout, num_heads, qkv_bias, persistent_mask=persistent_mask)
        self.out_proj = nn.Linear(d_out * num_heads, d_out * num_heads)

    def forward(self, x: Tensor, *, key_ranges: Tensor | None = None, need_weights: bool = False) -> Output:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, num_heads * d_out)."""
        result = super().forward(x, key_ranges=key_ranges, need_weights=need_weights)
        out, weights = result if isinstance(result, tuple) else (result, None)
        return output_of(self.out_proj(out), weights)


class MHAPyTorchScaledDotProduct(CausalMask):
    """One Linear ``qkv`` for queries, keys and values, and one, ``proj``, for the output; ``dropout`` is a number.

    The plain module calls torch's ``scaled_dot_product_attention`` and has no mask, so its states have none.

    >>> MHAPyTorchScaledDotProduct(d_in=8, d_out=12, num_heads=3, context_length=6)(torch.rand(2, 6, 8)).shape
    torch.Size([2, 6, 12])
    """

    mask_in_plain_states = False

    def __init__(
        self,
        d_in: int,
        d_out: int,
        num_heads: int,
        context_length: int,
        dropout: float = 0.0,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__(context_length)
        check_sizes(1, d_in=d_in)
        self.d_in = d_in
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = quotient("d_out", d_out, "num_heads", num_heads)
        self.qkv = nn.Linear(d_in, 3 * d_out, bias=qkv_bias)
        self.proj = nn.Linear(d_out, d_out)
        self.dropout: float | nn.Module = check_dropout(dropout)

    def extra_repr(self) -> str:  # noqa: D102
        p = None if isinstance(self.dropout, nn.Module) else self.dropout or None
        return described(num_heads=self.num_heads, **self.described_mask(), dropout=p)

    def forward(
        self,
        x: Tensor,
        *,
        key_ranges: Tensor | None = None,
        kv_cache: KVCache | None = None,
        lengths: Lengths | None = None,
        need_weights: bool = False,
    ) -> Output:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, d_out); x continues the tokens in ``kv_cache``."""
        check_input(x, self.d_in, self.qkv, context_length=self.context_length)
        check_cache(kv_cache, lengths, self.context_length)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        dropout = self.dropout if isinstance(self.dropout, nn.Module) else self.dropout * self.training
        options = self.mask_options(x, kv_cache is not None) | {"dropout": dropout, "need_weights": need_weights}
        options |= {"key_ranges": key_ranges, "kv_cache": kv_cache, "lengths": lengths}
        out, weights = attend_heads(q, k, v, self.head_dim, **options)
        return output_of(self.proj(out), weights)


class MHAPyTorchFlexAttention(MHAPyTorchScaledDotProduct):
    """The same as the plain module writes it with FlexAttention, which has no dropout: here it counts."""


class MHAPyTorchSDPAWithoutFlash(MHAPyTorchScaledDotProduct):
    """The same with a bool ``mask``, which the plain module keeps in its states."""

    mask_in_plain_states = True
    mask_dtype = torch.bool

    def __init__(
        self,
        d_in: int,
        d_out: int,
        num_heads: int,
        context_length: int,
        dropout: float = 0.0,
        qkv_bias: bool = False,
        *,
        persistent_mask: bool | None = None,
    ) -> None:
        super().__init__(d_in, d_out, num_heads, context_length, dropout, qkv_bias)
        self.persistent_mask = persistent_mask


class MultiHeadAttentionCombinedQKV(MHAPyTorchScaledDotProduct):
    """The same with a ``mask`` in its states, and a module ``dropout``."""

    mask_in_plain_states = True

    def __init__(
        self,
        d_in: int,
        d_out: int,
        num_heads: int,
        context_length: int,
        dropout: float = 0.0,
        qkv_bias: bool = False,
        *,
        persistent_mask: bool | None = None,
    ) -> None:
        super().__init__(d_in, d_out, num_heads, context_length, dropout, qkv_bias)
        self.persistent_mask = persistent_mask
        self.dropout = make_dropout(dropout)


class MHAEinsum(CausalMask):
    """Projections by parameters ``W_query W_key W_value`` (d_in, d_out) and ``bias_q bias_k bias_v``, and ``out_proj``.

    Editions of the book in which the parameters are (d_out, d_in) take d_in = d_out alone; they mean the same there.

    >>> MHAEinsum(8, 8, context_length=6, dropout=0.0, num_heads=2)(torch.rand(2, 6, 8)).shape
    torch.Size([2, 6, 8])
    """

    bias_q: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        *,
        persistent_mask: bool | None = None,
    ) -> None:
        super().__init__(context_length, persistent_mask)
        check_sizes(1, d_in=d_in)
        self.d_in = d_in
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = quotient("d_out", d_out, "num_heads", num_heads)
        self.W_query = nn.Parameter(torch.randn(d_in, d_out))
        self.W_key = nn.Parameter(torch.randn(d_in, d_out))
        self.W_value = nn.Parameter(torch.randn(d_in, d_out))
        for name in ("bias_q", "bias_k", "bias_v"):
            self.register_parameter(name, nn.Parameter(torch.zeros(d_out)) if qkv_bias else None)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout: nn.Module = make_dropout(dropout)
        self.reset_parameters()

    def extra_repr(self) -> str:  # noqa: D102
        sizes = {"d_in": self.d_in, "d_out": self.d_out, "qkv_bias": None if self.bias_q is None else True}
        return described(**sizes, num_heads=self.num_heads, **self.described_mask())

    def reset_parameters(self) -> None:
        """Draws the projections anew, in the plain module's order; not ``out_proj``."""
        for weight in (self.W_query, self.W_key, self.W_value):
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        bound = 1 / math.sqrt(self.W_query.shape[1])
        for bias in (self.bias_q, self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def forward(
        self,
        x: Tensor,
        *,
        key_ranges: Tensor | None = None,
        kv_cache: KVCache | None = None,
        lengths: Lengths | None = None,
        need_weights: bool = False,
    ) -> Output:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, d_out); x continues the tokens in ``kv_cache``."""
        check_input(x, self.d_in, self.W_query, context_length=self.context_length)
        check_cache(kv_cache, lengths, self.context_length)
        weights = (self.W_query, self.bias_q), (self.W_key, self.bias_k), (self.W_value, self.bias_v)
        q, k, v = (linear(x, weight.mT, bias) for weight, bias in weights)
        options = self.mask_options(x, kv_cache is not None) | {"dropout": self.dropout, "need_weights": need_weights}
        options |= {"key_ranges": key_ranges, "kv_cache": kv_cache, "lengths": lengths}
        out, attended = attend_heads(q, k, v, self.head_dim, **options)
        return output_of(self.out_proj(out), attended)


class MHAPyTorchClass(CausalMask):
    """The parameters of torch's ``nn.MultiheadAttention``, in ``multihead_attn``, then the Linear ``proj``.

    With ``qkv_bias``, that module also has a key and a value, ``bias_k`` and ``bias_v``, which every query sees after
    all others. ``need_weights`` chooses the plain module's way to compute and changes no result: the weights come with
    ``forward(x, need_weights=True)``.

    >>> MHAPyTorchClass(d_in=8, d_out=8, num_heads=2, context_length=6)(torch.rand(2, 6, 8)).shape
    torch.Size([2, 6, 8])
    """

    mask_dtype = torch.bool

    def __init__(
        self,
        d_in: int,
        d_out: int,
        num_heads: int,
        context_length: int,
        dropout: float = 0.0,
        qkv_bias: bool = False,
        need_weights: bool = True,
        *,
        persistent_mask: bool | None = None,
    ) -> None:
        super().__init__(context_length, persistent_mask)
        check_sizes(1, d_in=d_in, d_out=d_out)
        if d_in != d_out:
            raise ValueError(f"pyattn: d_in must equal d_out for nn.MultiheadAttention, got {d_in} and {d_out}")
        self.d_in = d_in
        self.head_dim = quotient("d_out", d_out, "num_heads", num_heads)
        self.multihead_attn = nn.MultiheadAttention(
            d_out, num_heads, check_dropout(dropout), bias=qkv_bias, add_bias_kv=qkv_bias, batch_first=True
        )
        self.need_weights = need_weights
        self.proj = nn.Linear(d_out, d_out)

    def extra_repr(self) -> str:  # noqa: D102
        inner = self.multihead_attn
        return described(
            num_heads=inner.num_heads,
            **self.described_mask(),
            dropout=inner.dropout or None,
            qkv_bias=None if inner.bias_k is None else True,
            need_weights=None if self.need_weights else False,
        )

    def forward(self, x: Tensor, *, key_ranges: Tensor | None = None, need_weights: bool = False) -> Output:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, d_out); the weights' last key is that of ``bias_k``.

        NotImplementedError for ``key_ranges`` with ``qkv_bias``: the keys of a range and ``bias_k`` are no range.
        """
        check_input(x, self.d_in, self.proj, context_length=self.context_length)
        inner, options = self.multihead_attn, self.mask_options(x) | {"key_ranges": key_ranges}
        q, k, v = linear(x, inner.in_proj_weight, inner.in_proj_bias).chunk(3, dim=-1)
        if inner.bias_k is not None and inner.bias_v is not None:
            if key_ranges is not None:
                raise NotImplementedError(
                    "pyattn: key_ranges are not supported with qkv_bias=True, where every query also sees bias_k, got "
                    f"{shown(key_ranges)}"
                )
            k, v = (_before(bias, x) for bias, x in ((inner.bias_k, k), (inner.bias_v, v)))
            if "bias" in options:
                options["bias"] = pad(options["bias"], (1, 0), value=True)
        options |= {"dropout": inner.dropout * self.training, "need_weights": need_weights}
        out, weights = attend_heads(q, k, v, self.head_dim, **options)
        if weights is not None and inner.bias_k is not None:
            weights = weights.roll(-1, -1)
        return output_of(self.proj(inner.out_proj(out)), weights)


def _before(row: Tensor, x: Tensor) -> Tensor:
    """``row`` (1, 1, E), then x (batch, seqlen, E): the causal mask shows the first key to all."""
    return torch.cat([row.to(x.dtype).expand(x.shape[0], 1, -1), x], dim=1)
