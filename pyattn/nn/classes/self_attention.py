"""Self-attention without a mask: chapter 3's first three classes, over one head."""

import torch
from torch import Tensor, nn

from pyattn.nn.checks import check_input
from pyattn.nn.heads import Output, attend_single
from pyattn.nn.repr import described
from pyattn.options.checks import check_names, check_sizes


class SimplifiedSelfAttention(nn.Module):
    """``softmax(x x^T) x``: no weights, no scale, no mask.

    >>> SimplifiedSelfAttention()(torch.rand(6, 3)).shape
    torch.Size([6, 3])
    """

    @check_names
    def forward(self, x: Tensor, *, need_weights: bool = False) -> Output:
        """``x`` (batch, seqlen, d) or (seqlen, d); out the same."""
        check_input(x, unbatched=True)
        return attend_single(x, x, x, causal=False, softmax_scale=1.0, need_weights=need_weights)


class SelfAttention_v1(nn.Module):
    """Unmasked self-attention over bare matrices ``W_query W_key W_value`` (d_in, d_out), drawn by :func:`torch.rand`.

    >>> SelfAttention_v1(3, 2)(torch.rand(6, 3)).shape
    torch.Size([6, 2])
    """

    @check_names
    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        check_sizes(1, d_in=d_in, d_out=d_out)
        self.W_query: nn.Parameter = nn.Parameter(torch.rand(d_in, d_out))
        self.W_key: nn.Parameter = nn.Parameter(torch.rand(d_in, d_out))
        self.W_value: nn.Parameter = nn.Parameter(torch.rand(d_in, d_out))

    def extra_repr(self) -> str:  # noqa: D102
        d_in, d_out = self.W_query.shape
        return described(d_in=d_in, d_out=d_out)

    @check_names
    def forward(self, x: Tensor, *, need_weights: bool = False) -> Output:
        """``x`` (batch, seqlen, d_in) or (seqlen, d_in); out the same with d_out columns."""
        check_input(x, self.W_query.shape[0], self.W_query, unbatched=True)
        q, k, v = x @ self.W_query, x @ self.W_key, x @ self.W_value
        return attend_single(q, k, v, causal=False, need_weights=need_weights)


class SelfAttention_v2(nn.Module):
    """Unmasked self-attention over Linears ``W_query W_key W_value``; :data:`SelfAttention` is another name for it.

    >>> SelfAttention_v2(3, 2)(torch.rand(8, 6, 3)).shape
    torch.Size([8, 6, 2])
    """

    @check_names
    def __init__(self, d_in: int, d_out: int, qkv_bias: bool = False) -> None:
        super().__init__()
        check_sizes(1, d_in=d_in, d_out=d_out)
        self.d_in = d_in
        self.W_query: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)

    @check_names
    def forward(self, x: Tensor, *, need_weights: bool = False) -> Output:
        """``x`` (batch, seqlen, d_in) or (seqlen, d_in); out the same with d_out columns."""
        check_input(x, self.d_in, self.W_query, unbatched=True)
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        return attend_single(q, k, v, causal=False, need_weights=need_weights)


SelfAttention = SelfAttention_v2
