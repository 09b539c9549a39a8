"""Causal attention one head at a time."""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pyattn.nn.checks import check_added, check_alone, check_input
from pyattn.nn.forward_options import Masked, takes
from pyattn.nn.heads import Heads, Output, attend_single, out_and_weights
from pyattn.nn.mask_buffer import CausalMask
from pyattn.nn.replace import make_dropout
from pyattn.nn.repr import described
from pyattn.options.checks import check_names, check_sizes


class CausalAttention(CausalMask):
    """One causal head over sequences of at most ``context_length``.

    :class:`pyattn.nn.mask_buffer.CausalMask` describes its ``mask``, in state dicts and when assigned.

    >>> CausalAttention(d_in=3, d_out=2, context_length=6, dropout=0.0)(torch.rand(8, 6, 3)).shape
    torch.Size([8, 6, 2])
    """

    @check_names
    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        qkv_bias: bool = False,
        *,
        persistent_mask: bool | None = None,
    ) -> None:
        super().__init__(context_length, persistent_mask)
        check_sizes(1, d_in=d_in, d_out=d_out)
        self.d_in = d_in
        self.d_out = d_out
        self.W_query: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.dropout: nn.Module = make_dropout(dropout)

    def extra_repr(self) -> str:  # noqa: D102
        return described(**self.described_mask())

    @check_names
    @takes(Masked)
    def forward(self, x: Tensor, **options: Unpack[Masked]) -> Output:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, d_out)."""
        check_input(x, self.d_in, self.W_query, context_length=self.context_length)
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        return self.attend(q, k, v, dropout=self.dropout, **self.mask_options(x), **options)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Output:
        """The result of ``forward``: :func:`pyattn.nn.heads.attend_single`."""
        return attend_single(q, k, v, **options)


class MultiHeadAttentionWrapper(Heads):
    """``num_heads`` :class:`CausalAttention` side by side, their outputs concatenated, each d_out wide.

    >>> MultiHeadAttentionWrapper(3, 2, context_length=6, dropout=0.0, num_heads=2)(torch.rand(8, 6, 3)).shape
    torch.Size([8, 6, 4])
    """

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
        super().__init__()
        check_sizes(1, num_heads=num_heads)
        self.heads: nn.ModuleList = nn.ModuleList(
            CausalAttention(d_in, d_out, context_length, dropout, qkv_bias, persistent_mask=persistent_mask)
            for _ in range(num_heads)
        )

    def extra_repr(self) -> str:  # noqa: D102
        return described(num_heads=len(self.heads))

    @check_names
    @takes(Masked)
    def forward(self, x: Tensor, **options: Unpack[Masked]) -> Output:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, num_heads * d_out)."""
        check_input(x)
        mask, bias, need_weights = options.get("mask"), options.get("bias"), options.get("need_weights", False)
        check_alone(x, mask=mask, bias=bias, need_weights=need_weights)
        check_added(mask, bias, (x.shape[0], len(self.heads), x.shape[1], x.shape[1]))
        results = [
            head(x, **options | {"mask": _row(mask, h), "bias": _row(bias, h)}) for h, head in enumerate(self.heads)
        ]
        if not need_weights:
            return torch.cat(results, dim=-1)
        outs, weights = zip(*results, strict=True)
        return torch.cat(outs, dim=-1), torch.stack(weights, dim=1)


def _row(t: Tensor | None, head: int) -> Tensor | None:
    """One head's part of ``t`` (..., num_heads or 1, seqlen, seqlen)."""
    return t if t is None or t.dim() < 3 or t.shape[-3] == 1 else t[..., head : head + 1, :, :]


class SingleHeadSelfAttention(nn.Module):
    """One causal head that also returns its weights, over Linears ``q k v`` without bias.

    ``trace_shapes`` prints the shapes of intermediate tensors. The weights take seqlen x seqlen memory, which
    ``need_weights=False`` saves.

    >>> attention = SingleHeadSelfAttention(d_model=4, d_k=2, trace_shapes=True)
    >>> out, weights = attention(torch.rand(1, 5, 4))
    q torch.Size([1, 5, 2])  k torch.Size([1, 5, 2])  v torch.Size([1, 5, 2])
    weights torch.Size([1, 5, 5])  out torch.Size([1, 5, 2])
    """

    @check_names
    def __init__(self, d_model: int, d_k: int, dropout: float = 0.0, trace_shapes: bool = False) -> None:
        super().__init__()
        check_sizes(1, d_model=d_model, d_k=d_k)
        self.d_model = d_model
        self.q: nn.Linear = nn.Linear(d_model, d_k, bias=False)
        self.k: nn.Linear = nn.Linear(d_model, d_k, bias=False)
        self.v: nn.Linear = nn.Linear(d_model, d_k, bias=False)
        self.dropout: nn.Module = make_dropout(dropout)
        self.trace_shapes = trace_shapes

    def extra_repr(self) -> str:  # noqa: D102
        return described(trace_shapes=self.trace_shapes or None)

    @check_names
    def forward(self, x: Tensor, *, need_weights: bool = True) -> Output:
        """``x`` (batch, seqlen, d_model), out (batch, seqlen, d_k), weights (batch, seqlen, seqlen)."""
        check_input(x, self.d_model, self.q)
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.trace_shapes:
            print(f"q {q.shape}  k {k.shape}  v {v.shape}")
        result = attend_single(q, k, v, dropout=self.dropout, need_weights=need_weights)
        if self.trace_shapes:
            out, weights = out_and_weights(result)
            print(f"out {out.shape}" if weights is None else f"weights {weights.shape}  out {out.shape}")
        return result
