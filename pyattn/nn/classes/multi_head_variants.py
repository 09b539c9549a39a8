"""Multi-head attention of the book's chapter 4 with a sliding window, and with a gate."""

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pyattn.nn.checks import check_cache, check_input
from pyattn.nn.classes.projected import window_of
from pyattn.nn.forward_options import Cached, takes
from pyattn.nn.growing_cache import SelfCaching
from pyattn.nn.heads import Heads, Output, attend_heads, output_of
from pyattn.nn.mask_buffer import CausalMask
from pyattn.nn.replace import make_dropout
from pyattn.nn.repr import described
from pyattn.options.checks import check_names, check_sizes


class MultiHeadAttentionWithSWA(SelfCaching, Heads):
    """Causal attention within a sliding window: each query sees its own key and ``sliding_window_size - 1`` before it.

    None, the default, is no window; models set the attribute ``sliding_window_size`` of some layers to it afterwards.
    With a window, the module's cache keeps no more keys than that needs. ``sliding_window_size=3`` masks keys as
    follows, 1 = takes part::

        1 0 0 0 0
        1 1 0 0 0
        1 1 1 0 0
        0 1 1 1 0
        0 0 1 1 1

    >>> MultiHeadAttentionWithSWA(8, 8, dropout=0.0, num_heads=2, sliding_window_size=3)(torch.rand(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    @check_names
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
        self.set_sizes(d_in, d_out, num_heads)
        self.W_query: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj: nn.Linear = nn.Linear(d_out, d_out)
        self.dropout: nn.Module = make_dropout(dropout)
        if sliding_window_size is not None:
            check_sizes(1, sliding_window_size=sliding_window_size)
        self.sliding_window_size = sliding_window_size

    def extra_repr(self) -> str:  # noqa: D102
        return described(num_heads=self.num_heads, sliding_window_size=self.sliding_window_size)

    @check_names
    @takes(Cached)
    def forward(self, x: Tensor, use_cache: bool = False, **options: Unpack[Cached]) -> Output:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, d_out); x continues the tokens in a cache.

        With ``use_cache``, that is the module's own, until :meth:`reset_cache` or a call without ``use_cache``.
        """
        check_input(x, self.d_in, self.W_query)
        self.check_use(x, use_cache, options)
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        window = None if self.sliding_window_size is None else window_of(self.sliding_window_size)
        if use_cache:
            self.take_own_cache(options, q, k, window=window)
        result = self.attend(self.out_proj, q, k, v, dropout=self.dropout, window=window, **options)
        if not use_cache:
            self.reset_cache()
        return result


class GatedMultiHeadAttention(CausalMask, Heads):
    """Causal attention whose heads' results are multiplied by ``sigmoid(W_gate(x))`` before ``out_proj``.

    Qwen3-Next's full attention has such a gate (Qiu et al. 2025, arXiv 2505.06708). The book's class registers its
    ``mask`` with ``persistent=False``, so states have none: :class:`pyattn.nn.mask_buffer.CausalMask`.

    >>> GatedMultiHeadAttention(8, 8, context_length=6, dropout=0.0, num_heads=2)(torch.rand(1, 6, 8)).shape
    torch.Size([1, 6, 8])
    """

    mask_in_plain_states = False

    @check_names
    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__(context_length)
        self.set_sizes(d_in, d_out, num_heads)
        self.W_query: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_gate: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj: nn.Linear = nn.Linear(d_out, d_out)
        self.dropout: nn.Module = make_dropout(dropout)

    def extra_repr(self) -> str:  # noqa: D102
        return described(num_heads=self.num_heads, **self.described_mask())

    @check_names
    @takes(Cached)
    def forward(self, x: Tensor, **options: Unpack[Cached]) -> Output:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, d_out); x continues the tokens in ``kv_cache``."""
        check_input(x, self.d_in, self.W_query, context_length=self.context_length)
        cache = check_cache(self, options, self.context_length)
        q, k, v, gate = self.W_query(x), self.W_key(x), self.W_value(x), self.W_gate(x)
        own = self.mask_options(x, cache is not None)
        drawn = self.drawn({"dropout": self.dropout, **own, **options}, x.device)
        out, weights = attend_heads(q, k, v, self.head_dim, **drawn)
        return output_of(self.project(self.out_proj, out * torch.sigmoid(gate)), weights)
