"""Grouped-query attention as in the book, with a cache that the module manages."""

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pyattn.nn.checks import check_added, check_alone, check_cache, check_input, quotient
from pyattn.nn.forward_options import Positioned, takes
from pyattn.nn.growing_cache import GrowingCache, as_wide_as
from pyattn.nn.heads import Heads, Output, make_dropout
from pyattn.nn.repr import described
from pyattn.nn.score_options import ScoreOptions
from pyattn.options.checks import check_names, check_type


class GroupedQueryAttention(ScoreOptions, Heads):
    """Causal attention whose ``num_heads`` query heads share ``num_kv_groups`` KV heads (Ainslie et al. 2023).

    Query head h reads KV head ``h // (num_heads // num_kv_groups)``. ``num_heads`` divides ``d_out``, ``num_kv_groups``
    divides num_heads; ``dtype`` is the weights'. :class:`pyattn.nn.score_options.ScoreOptions` describes ``window`` and
    the other extras.

    >>> GroupedQueryAttention(8, 8, dropout=0.0, num_heads=4, num_kv_groups=2)(torch.rand(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    @check_names
    def __init__(
        self,
        d_in: int,
        d_out: int,
        dropout: float,
        num_heads: int,
        num_kv_groups: int,
        dtype: torch.dtype | None = None,
        qkv_bias: bool = False,
        *,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        alibi: bool = False,
        sinks: bool = False,
        rotary: float | None = None,
    ) -> None:
        super().__init__()
        self.set_sizes(d_in, d_out, num_heads)
        self.num_kv_groups = num_kv_groups
        self.group_size: int = quotient("num_heads", num_heads, "num_kv_groups", num_kv_groups)
        self.W_key: nn.Linear = nn.Linear(d_in, num_kv_groups * self.head_dim, bias=qkv_bias, dtype=dtype)
        self.W_value: nn.Linear = nn.Linear(d_in, num_kv_groups * self.head_dim, bias=qkv_bias, dtype=dtype)
        self.W_query: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias, dtype=dtype)
        self.out_proj: nn.Linear = nn.Linear(d_out, d_out, bias=False, dtype=dtype)
        self.dropout: nn.Module = make_dropout(dropout)
        self.set_score_options(num_heads, self.head_dim, window, softcap, alibi, sinks, rotary, dtype)
        self._own_cache = GrowingCache()

    def extra_repr(self) -> str:  # noqa: D102
        return described(num_heads=self.num_heads, num_kv_groups=self.num_kv_groups, **self.described_options())

    @check_names
    @takes(Positioned)
    def forward(self, x: Tensor, use_cache: bool = False, **options: Unpack[Positioned]) -> Output:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, d_out); x continues the tokens in a cache.

        With ``use_cache``, that is the module's own cache, which grows as needed and lasts until :meth:`reset_cache` or
        a call without ``use_cache``; ``mask`` and ``bias`` then have as many keys as the longest sequence has tokens,
        this call's included. ``kv_cache`` is the caller's, of a fixed size, so ``torch.compile`` compiles once.
        ``positions``: as in :class:`MultiHeadAttention`.
        """
        check_input(x, self.d_in, self.W_query)
        check_type("use_cache", use_cache, bool)
        check_alone(x, use_cache=use_cache)
        if use_cache and (cache := options.get("kv_cache")) is not None:
            raise ValueError(f"pyattn: use_cache=True must come without kv_cache, got {cache!r}")
        if not use_cache:
            check_cache(options)
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        if use_cache:
            mask, bias = options.get("mask"), options.get("bias")
            own_cache, tokens = self._own_cache.with_room_for(k, self.head_dim)
            check_added(mask, bias, (x.shape[0], q.shape[-1] // self.head_dim, x.shape[1], tokens))
            options["mask"], options["bias"] = as_wide_as(own_cache, mask), as_wide_as(own_cache, bias)
            options["kv_cache"] = own_cache
        own = self.score_options(self.num_heads, x)
        result = self.attend(self.out_proj, q, k, v, dropout=self.dropout, **own, **options)
        if not use_cache:
            self.reset_cache()
        return result

    def reset_cache(self) -> None:
        """Forgets the tokens of calls with ``use_cache``."""
        self._own_cache.reset()
