"""The book's multi-head attention over bare parameters, which the plain module multiplies with ``torch.einsum``."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from typing_extensions import Unpack

from pyattn.nn.checks import check_cache, check_input
from pyattn.nn.forward_options import Cached, takes
from pyattn.nn.heads import Heads, Output
from pyattn.nn.mask_buffer import CausalMask
from pyattn.nn.replace import make_dropout
from pyattn.nn.repr import described
from pyattn.options.checks import check_names


class MHAEinsum(CausalMask, Heads):
    """Projections by parameters ``W_query W_key W_value`` (d_in, d_out) and ``bias_q bias_k bias_v``, and ``out_proj``.

    Editions of the book with (d_out, d_in) parameters accept only d_in = d_out, where both mean the same.

    >>> MHAEinsum(8, 8, context_length=6, dropout=0.0, num_heads=2)(torch.rand(2, 6, 8)).shape
    torch.Size([2, 6, 8])
    """

    bias_q: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None

    @check_names
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
        self.set_sizes(d_in, d_out, num_heads)
        self.W_query: nn.Parameter = nn.Parameter(torch.randn(d_in, d_out))
        self.W_key: nn.Parameter = nn.Parameter(torch.randn(d_in, d_out))
        self.W_value: nn.Parameter = nn.Parameter(torch.randn(d_in, d_out))
        for name in ("bias_q", "bias_k", "bias_v"):
            self.register_parameter(name, nn.Parameter(torch.zeros(d_out)) if qkv_bias else None)
        self.out_proj: nn.Linear = nn.Linear(d_out, d_out)
        self.dropout: nn.Module = make_dropout(dropout)
        self.reset_parameters()

    def extra_repr(self) -> str:  # noqa: D102
        sizes = {"d_in": self.d_in, "d_out": self.d_out, "qkv_bias": None if self.bias_q is None else True}
        return described(**sizes, num_heads=self.num_heads, **self.described_mask())

    def reset_parameters(self) -> None:
        """Redraws the projections, but not ``out_proj``, in the plain module's order."""
        for weight in (self.W_query, self.W_key, self.W_value):
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        bound = 1 / math.sqrt(self.W_query.shape[1])
        for bias in (self.bias_q, self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    @check_names
    @takes(Cached)
    def forward(self, x: Tensor, **options: Unpack[Cached]) -> Output:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, d_out); x continues the tokens in ``kv_cache``."""
        check_input(x, self.d_in, self.W_query, context_length=self.context_length)
        cache = check_cache(self, options, self.context_length)
        weights = (self.W_query, self.bias_q), (self.W_key, self.bias_k), (self.W_value, self.bias_v)
        q, k, v = (linear(x, weight.mT, bias) for weight, bias in weights)
        own = self.mask_options(x, cache is not None)
        return self.attend(self.out_proj, q, k, v, dropout=self.dropout, **own, **options)
