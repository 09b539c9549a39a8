"""The book's multi-head attention with one Linear for queries, keys and values."""

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pyattn.nn.checks import check_cache, check_input
from pyattn.nn.forward_options import Cached, takes
from pyattn.nn.heads import Heads, Output
from pyattn.nn.mask_buffer import CausalMask
from pyattn.nn.replace import check_dropout, make_dropout
from pyattn.nn.repr import described
from pyattn.options.checks import check_names


class MHAPyTorchScaledDotProduct(CausalMask, Heads):
    """One Linear, ``qkv``, for queries, keys and values, and one, ``proj``, for the output; ``dropout`` is a number.

    The plain module calls torch's ``scaled_dot_product_attention`` and has no mask, so its state dicts have none.

    >>> MHAPyTorchScaledDotProduct(d_in=8, d_out=12, num_heads=3, context_length=6)(torch.rand(2, 6, 8)).shape
    torch.Size([2, 6, 12])
    """

    mask_in_plain_states = False

    @check_names
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
        self.set_sizes(d_in, d_out, num_heads)
        self.qkv: nn.Linear = nn.Linear(d_in, 3 * d_out, bias=qkv_bias)
        self.proj: nn.Linear = nn.Linear(d_out, d_out)
        self.dropout: float | nn.Module = check_dropout(dropout)

    def extra_repr(self) -> str:  # noqa: D102
        p = None if isinstance(self.dropout, nn.Module) else self.dropout or None
        return described(num_heads=self.num_heads, **self.described_mask(), dropout=p)

    @check_names
    @takes(Cached)
    def forward(self, x: Tensor, **options: Unpack[Cached]) -> Output:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, d_out); x continues the tokens in ``kv_cache``."""
        check_input(x, self.d_in, self.qkv, context_length=self.context_length)
        cache = check_cache(self, options, self.context_length)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        dropout = self.dropout if isinstance(self.dropout, nn.Module) else self.dropout * self.training
        own = self.mask_options(x, cache is not None)
        return self.attend(self.proj, q, k, v, dropout=dropout, **own, **options)


class MHAPyTorchFlexAttention(MHAPyTorchScaledDotProduct):
    """The same. The plain module calls FlexAttention, which has no dropout: here ``dropout`` takes effect."""


class MHAPyTorchSDPAWithoutFlash(MHAPyTorchScaledDotProduct):
    """The same with a bool ``mask``, which the plain module keeps in its state dicts."""

    mask_in_plain_states = True
    mask_dtype: torch.dtype | None = torch.bool

    @check_names
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
    """The same with a ``mask`` in its state dicts, and ``dropout`` as a module."""

    mask_in_plain_states = True

    @check_names
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
        self.dropout: nn.Module = make_dropout(dropout)
