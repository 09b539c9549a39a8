"""Multi-head attention of the book's chapter 4 with a sliding window, with selected keys, and with a gate."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nested._internal.nested_tensor import NestedTensor
from typing_extensions import Unpack

from pyattn.cache.call_gradients import withdraw
from pyattn.nn.checks import check_cache, check_input
from pyattn.nn.classes.projected import window_of
from pyattn.nn.forward_options import Cached, takes
from pyattn.nn.growing_cache import GrowingCache, SelfCaching
from pyattn.nn.heads import Heads, Output, attend_heads, output_of
from pyattn.nn.mask_buffer import CausalMask
from pyattn.nn.replace import has_hooks, make_dropout
from pyattn.nn.repr import described
from pyattn.options.checks import check_names, check_sizes, check_type
from pyattn.options.selected_keys import as_mask
from pyattn.selection import top_keys
from pyattn.selection.indexer import LightningIndexer


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


class MultiHeadAttentionWithDSA(SelfCaching, Heads):
    """Causal attention in which each token sees the ``topk`` keys that its :class:`LightningIndexer` scores highest.

    Time and memory follow ``topk``: :func:`pyattn.selection.top_keys` and ``selected`` of :func:`pyattn.attention`. The
    book's class computes all pairs and masks. The module takes no masks, because its indexer would not know them. With
    hooks on ``dropout`` or ``need_weights``, which returns weights of all keys, it computes all pairs too.

    >>> layer = MultiHeadAttentionWithDSA(64, 64, dropout=0.0, num_heads=4, index_n_heads=2, index_head_dim=16, topk=8)
    >>> layer(torch.rand(1, 20, 64)).shape
    torch.Size([1, 20, 64])
    """

    @check_names
    def __init__(
        self,
        d_in: int,
        d_out: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        index_n_heads: int = 4,
        index_head_dim: int = 64,
        topk: int = 64,
    ) -> None:
        super().__init__()
        self.set_sizes(d_in, d_out, num_heads)
        check_sizes(1, topk=topk)
        self.topk = topk
        self.W_query: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj: nn.Linear = nn.Linear(d_out, d_out)
        self.dropout: nn.Module = make_dropout(dropout)
        self.indexer: LightningIndexer = LightningIndexer(d_in, index_n_heads, index_head_dim)
        self._index_cache = GrowingCache()

    def extra_repr(self) -> str:  # noqa: D102
        return described(num_heads=self.num_heads, topk=self.topk)

    def reset_cache(self) -> None:
        """Forgets the tokens of calls with ``use_cache``, and the indexer's keys."""
        super().reset_cache()
        self._index_cache.reset()

    @check_names
    def forward(self, x: Tensor, use_cache: bool = False, *, need_weights: bool = False) -> Output:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, d_out); x continues the tokens in the module's cache.

        With ``need_weights``, also the weights (batch, num_heads, seqlen, keys).
        """
        if isinstance(x, NestedTensor):
            raise NotImplementedError("pyattn: MultiHeadAttentionWithDSA takes no jagged x, pad it on the right")
        check_input(x, self.d_in, self.W_query)
        check_type("need_weights", need_weights, bool)
        options: dict[str, Any] = {"need_weights": need_weights}
        self.check_use(x, use_cache, {})
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        if use_cache:
            self.take_own_cache(options, q, k)
        selected = self._selected(x, use_cache)
        if need_weights or has_hooks(self.dropout):
            keys = options["kv_cache"].max_seqlen if use_cache else x.shape[1]
            options["mask"] = as_mask(selected, 1, keys, self.num_heads)
        else:
            options["selected"] = selected
        try:
            result = self.attend(self.out_proj, q, k, v, dropout=self.dropout, **options)
        except Exception:
            if use_cache and (index := self._index_cache.cache) is not None:
                withdraw(index, x.shape[1])  # both caches hold the same tokens
            raise
        if not use_cache:
            self.reset_cache()
        return result

    def _selected(self, x: Tensor, use_cache: bool) -> Tensor:
        """int32 (B, 1, T, topk): the keys of each token, among those of the cache if there is one."""
        q, k, weights = self.indexer.projections(x, x)
        if not use_cache:
            return top_keys(q, k, weights, self.topk)
        cache, _ = self._index_cache.with_room_for(k.unsqueeze(2), shared_values=True)
        cache.append(k.unsqueeze(1))
        return top_keys(q, cache.k[:, 0], weights, self.topk, k_lengths=cache.lengths)


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
