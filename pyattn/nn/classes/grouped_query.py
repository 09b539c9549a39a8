"""Grouped-query attention as in the book, with a cache that the module manages."""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pyattn.nn.checks import check_input, quotient
from pyattn.nn.classes.projected import ProjectedHeads, QKNorm, check_unshared
from pyattn.nn.forward_options import Turned, takes
from pyattn.nn.growing_cache import SelfCaching
from pyattn.nn.heads import Heads, Output
from pyattn.nn.replace import make_dropout
from pyattn.nn.repr import described
from pyattn.options.checks import check_names


class GroupedQueryAttention(ProjectedHeads, SelfCaching, Heads):
    """Causal attention whose ``num_heads`` query heads share ``num_kv_groups`` KV heads (Ainslie et al. 2023).

    Query head h reads KV head ``h // (num_heads // num_kv_groups)``. ``num_heads`` divides ``d_out``, ``num_kv_groups``
    divides num_heads; ``dtype`` is the weights'. :class:`pyattn.nn.score_options.ScoreOptions` describes ``window`` and
    the other extras, :class:`pyattn.nn.classes.projected.ProjectedHeads` those from ``head_dim`` on.

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
        head_dim: int | None = None,
        qk_norm: QKNorm = False,
        softmax_scale: float | None = None,
        rotary_interleaved: bool = False,
    ) -> None:
        super().__init__()
        width, columns = self.set_heads(d_in, d_out, num_heads, head_dim)
        self.num_kv_groups = num_kv_groups
        self.group_size: int = quotient("num_heads", num_heads, "num_kv_groups", num_kv_groups)
        self.W_key: nn.Linear = nn.Linear(d_in, num_kv_groups * self.head_dim, bias=qkv_bias, dtype=dtype)
        self.W_value: nn.Linear = nn.Linear(d_in, num_kv_groups * self.head_dim, bias=qkv_bias, dtype=dtype)
        self.W_query: nn.Linear = nn.Linear(d_in, width, bias=qkv_bias, dtype=dtype)
        self.out_proj: nn.Linear = nn.Linear(width, columns, bias=False, dtype=dtype)
        self.dropout: nn.Module = make_dropout(dropout)
        self.set_score_options(num_heads, self.head_dim, window, softcap, alibi, sinks, rotary, dtype)
        self.set_score_changes(num_kv_groups, qk_norm, softmax_scale, rotary_interleaved, dtype)

    def extra_repr(self) -> str:  # noqa: D102
        heads = {"num_heads": self.num_heads, "num_kv_groups": self.num_kv_groups}
        return described(**heads, **self.described_options(), **self.described_changes())

    @check_names
    @takes(Turned)
    def forward(self, x: Tensor, use_cache: bool = False, **options: Unpack[Turned]) -> Output:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, d_out); x continues the tokens in a cache.

        With ``use_cache``, that is the module's own cache, which grows as needed and lasts until :meth:`reset_cache` or
        a call without ``use_cache``; ``mask`` and ``bias`` then have as many keys as the longest sequence has tokens,
        this call's included. ``kv_cache`` is the caller's, of a fixed size, so ``torch.compile`` compiles once.
        ``positions``, ``position_embeddings``, ``kv_from``: as in :class:`MultiHeadAttention`.
        """
        check_input(x, self.d_in, self.W_query)
        self.check_use(x, use_cache, options)
        rest: dict[str, Any] = {**options}
        kv_from = rest.pop("kv_from", None)
        own = self.score_options(self.num_heads, x)
        q = self.W_query(x)
        if kv_from is not None:
            check_unshared(use_cache)
            result = self.attend_shared(self.out_proj, q, kv_from, dropout=self.dropout, **own, **rest)
            self.reset_cache()
            return result
        k, v = self.W_key(x), self.W_value(x)
        if use_cache:
            self.take_own_cache(rest, q, k)
        result = self.attend(self.out_proj, q, k, v, dropout=self.dropout, **own, **rest)
        if not use_cache:
            self.reset_cache()
        return result
