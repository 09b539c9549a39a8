"""The book's multi-head attention over the parameters of torch's ``nn.MultiheadAttention``."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from typing_extensions import Unpack

from pyattn.nn.checks import check_added, check_alone, check_input, quotient
from pyattn.nn.forward_options import Masked, takes
from pyattn.nn.heads import Heads, Output, out_and_weights, output_of
from pyattn.nn.mask_buffer import CausalMask
from pyattn.nn.replace import check_dropout
from pyattn.nn.repr import described
from pyattn.options.checks import check_names, check_sizes, shown
from pyattn.options.tensor_types import check_outside


class MHAPyTorchClass(CausalMask, Heads):
    """The parameters of torch's ``nn.MultiheadAttention``, in ``multihead_attn``, then the Linear ``proj``.

    With ``qkv_bias``, that module also has an extra key and value, ``bias_k`` and ``bias_v``, which come after all
    others and are visible to every query. The constructor's ``need_weights`` selects how the plain module computes and
    changes no result: for the weights, call ``forward(x, need_weights=True)``.

    >>> MHAPyTorchClass(d_in=8, d_out=8, num_heads=2, context_length=6)(torch.rand(2, 6, 8)).shape
    torch.Size([2, 6, 8])
    """

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
        need_weights: bool = True,
        *,
        persistent_mask: bool | None = None,
    ) -> None:
        super().__init__(context_length, persistent_mask)
        check_sizes(1, d_in=d_in, d_out=d_out)
        if d_in != d_out:
            raise ValueError(f"pyattn: d_in must equal d_out for nn.MultiheadAttention, got {d_in} and {d_out}")
        self.d_in = d_in
        self.head_dim: int = quotient("d_out", d_out, "num_heads", num_heads)
        self.multihead_attn: nn.MultiheadAttention = nn.MultiheadAttention(
            d_out, num_heads, check_dropout(dropout), bias=qkv_bias, add_bias_kv=qkv_bias, batch_first=True
        )
        self.need_weights = need_weights
        self.proj: nn.Linear = nn.Linear(d_out, d_out)

    def extra_repr(self) -> str:  # noqa: D102
        inner = self.multihead_attn
        return described(
            num_heads=inner.num_heads,
            **self.described_mask(),
            dropout=inner.dropout or None,
            qkv_bias=None if inner.bias_k is None else True,
            need_weights=None if self.need_weights else False,
        )

    @check_names
    @takes(Masked)
    def forward(self, x: Tensor, **options: Unpack[Masked]) -> Output:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, d_out); the weights' last key is that of ``bias_k``.

        ``mask`` and ``bias`` cover x's own keys: with ``qkv_bias``, ``bias_k`` is visible to every query, with no bias
        added.

        NotImplementedError for ``key_ranges`` with ``qkv_bias``: a range together with ``bias_k`` is not a range.
        """
        check_input(x, self.d_in, self.proj, context_length=self.context_length)
        inner, own = self.multihead_attn, self.mask_options(x)
        q, k, v = linear(x, inner.in_proj_weight, inner.in_proj_bias).chunk(3, dim=-1)
        if inner.bias_k is not None and inner.bias_v is not None:
            check_alone(x, qkv_bias=True)
            check_outside("a module with bias_k")
            if (key_ranges := options.get("key_ranges")) is not None:
                raise NotImplementedError(
                    "pyattn: key_ranges are not supported with qkv_bias=True, where every query also sees bias_k, got "
                    f"{shown(key_ranges)}"
                )
            k, v = (_before(bias, x) for bias, x in ((inner.bias_k, k), (inner.bias_v, v)))
            seqlen, mask, bias = x.shape[1], options.get("mask"), options.get("bias")
            check_added(mask, bias, (x.shape[0], inner.num_heads, seqlen, seqlen))
            options["mask"], options["bias"] = _with_first(mask, seqlen, True), _with_first(bias, seqlen, 0.0)
            own["own_mask"] = _with_first(own.get("own_mask"), seqlen, True)
        own["dropout"] = inner.dropout * self.training
        out, weights = out_and_weights(self.attend(inner.out_proj, q, k, v, **own, **options))
        if weights is not None and inner.bias_k is not None:
            weights = weights.roll(-1, -1)
        return output_of(self.proj(out), weights)


def _before(row: Tensor, x: Tensor) -> Tensor:
    """``row`` (1, 1, E), then x (batch, seqlen, E): under a causal mask the first key is visible to every query."""
    return torch.cat([row.to(x.dtype).expand(x.shape[0], 1, -1), x], dim=1)


def _with_first(t: Tensor | None, seqlen: int, value: float) -> Tensor | None:
    """``value`` for one key, then ``t`` (..., seqlen or 1) for the other keys."""
    return None if t is None else pad(t.expand(*t.shape[:-1], seqlen), (1, 0), value=value)
