"""Multi-head attention with one set of projections."""

from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from pyattn.nn.checks import check_alone, check_cache, check_input, check_mask, keys_of, quotient
from pyattn.nn.classes.projected import ProjectedHeads, QKNorm, check_unshared, window_of
from pyattn.nn.forward_options import Turned, Unmasked, takes
from pyattn.nn.growing_cache import SelfCaching
from pyattn.nn.heads import Heads, Output
from pyattn.nn.mask_buffer import CausalMask
from pyattn.nn.replace import make_dropout
from pyattn.nn.repr import described
from pyattn.nn.score_options import ScoreOptions
from pyattn.options.checks import check_names, check_sizes


class MultiHeadAttention(CausalMask, ProjectedHeads, SelfCaching, Heads):
    """Causal multi-head attention over sequences of at most ``context_length``, then the Linear ``out_proj``.

    ``num_heads`` must divide ``d_out``, and ``num_heads_kv`` (default: num_heads) must divide num_heads. Query
    head h reads KV head ``h // (num_heads // num_heads_kv)``; W_key and W_value return num_heads_kv * head_dim columns.
    :class:`pyattn.nn.score_options.ScoreOptions` describes ``window`` and the other extra options, and
    :class:`pyattn.nn.classes.projected.ProjectedHeads` those from ``head_dim`` on. ``window=(2, 0)`` masks keys as
    follows, 1 = takes part::

        1 0 0 0 0
        1 1 0 0 0
        1 1 1 0 0
        0 1 1 1 0
        0 0 1 1 1

    ``max_seq_len`` and ``window_size`` are those of the class that chapter 4 of the book gives a cache. A sequence over
    the module's cache has at most ``max_seq_len`` tokens (default: context_length). ``window_size=W`` is the window
    (W - 1, 0): a query sees its own key and the W - 1 before it, with and without a cache, the cache keeps no more keys
    than that needs, and text may continue forever. The book's class is causal without a cache, and with one it drops
    the oldest keys for all queries of a chunk as soon as its cache is full; here each query has its own window. With
    either argument, states have no ``mask``, like those of the book's class.

    :class:`pyattn.nn.mask_buffer.CausalMask` describes the module's ``mask`` in state dicts and what assigning it does.

    >>> attention = MultiHeadAttention(d_in=768, d_out=768, context_length=1024, dropout=0.0, num_heads=12)
    >>> attention(torch.rand(2, 16, 768)).shape
    torch.Size([2, 16, 768])
    >>> modern = MultiHeadAttention(64, 64, 32, 0.0, 8, num_heads_kv=2, window=(15, 0), sinks=True, rotary=10000.0)
    >>> modern(torch.rand(2, 16, 64)).shape
    torch.Size([2, 16, 64])
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
        max_seq_len: int | None = None,
        window_size: int | None = None,
        *,
        num_heads_kv: int | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        alibi: bool = False,
        sinks: bool = False,
        rotary: float | None = None,
        head_dim: int | None = None,
        qk_norm: QKNorm = False,
        softmax_scale: float | None = None,
        rotary_interleaved: bool = False,
        persistent_mask: bool | None = None,
    ) -> None:
        super().__init__(context_length, persistent_mask)
        width, columns = self.set_heads(d_in, d_out, num_heads, head_dim)
        self.num_heads_kv: int = num_heads if num_heads_kv is None else num_heads_kv
        quotient("num_heads", num_heads, "num_heads_kv", self.num_heads_kv)
        if max_seq_len is not None:
            check_sizes(1, max_seq_len=max_seq_len)
        if window_size is not None and window is not None:
            raise ValueError(f"pyattn: window_size must come without window, got {window_size} and {window}")
        self.max_seq_len = max_seq_len
        self.mask_in_plain_states: bool = max_seq_len is None and window_size is None
        self.W_query: nn.Linear = nn.Linear(d_in, width, bias=qkv_bias)
        self.W_key: nn.Linear = nn.Linear(d_in, self.num_heads_kv * self.head_dim, bias=qkv_bias)
        self.W_value: nn.Linear = nn.Linear(d_in, self.num_heads_kv * self.head_dim, bias=qkv_bias)
        self.out_proj: nn.Linear = nn.Linear(width, columns)
        self.dropout: nn.Module = make_dropout(dropout)
        self.set_score_options(num_heads, self.head_dim, window, softcap, alibi, sinks, rotary)
        self.set_score_changes(self.num_heads_kv, qk_norm, softmax_scale, rotary_interleaved)
        self.window_size = window_size

    @property
    def window_size(self) -> int | None:
        """How many keys a query sees at most, its own included, over a cache that keeps no more than that needs."""
        return self._window_size

    @window_size.setter
    def window_size(self, window_size: int | None) -> None:
        if window_size is not None:
            self.window: tuple[int, ...] = window_of(window_size)
        self._window_size = window_size

    def extra_repr(self) -> str:  # noqa: D102
        shared = None if self.num_heads_kv == self.num_heads else self.num_heads_kv
        heads = {"num_heads": self.num_heads, "num_heads_kv": shared}
        own_cache = {"max_seq_len": self.max_seq_len, "window_size": self.window_size}
        scores = self.described_options() | ({} if self.window_size is None else {"window": None})
        return described(**heads, **self.described_mask(), **own_cache, **scores, **self.described_changes())

    @check_names
    @takes(Turned)
    def forward(self, x: Tensor, use_cache: bool = False, **options: Unpack[Turned]) -> Output:
        """``x`` (batch, seqlen, d_in) -> out (batch, seqlen, d_out); x continues the tokens in a cache.

        With ``use_cache``, that is the module's own, until :meth:`reset_cache` or a call without ``use_cache``:
        :class:`pyattn.nn.growing_cache.SelfCaching`. ``kv_cache`` is the caller's.

        ``positions``: int (batch or 1, seqlen), those of the tokens for the rotary embedding, such as the depths in a
        drafted tree; default: each token is one after that before it. Masks and windows count places in the cache.
        ``position_embeddings``: the model's tables of angles; ``kv_from``: another layer's keys and values. Both are
        described by :class:`pyattn.nn.forward_options.Turned`.
        """
        check_input(x, self.d_in, self.W_query, context_length=self.context_length)
        cache = self.check_use(x, use_cache, options, self.context_length)
        rest: dict[str, Any] = {**options}
        kv_from = rest.pop("kv_from", None)
        own = self.mask_options(x, use_cache or cache is not None or kv_from is not None)
        own |= self.score_options(self.num_heads, x)
        q = self.W_query(x)
        if kv_from is not None:
            check_unshared(use_cache)
            result = self.attend_shared(self.out_proj, q, kv_from, dropout=self.dropout, **own, **rest)
            self.reset_cache()
            return result
        k, v = self.W_key(x), self.W_value(x)
        if use_cache:
            ring = None if self.window_size is None else window_of(self.window_size)
            most = None if ring else self.max_seq_len or self.context_length
            self.take_own_cache(rest, q, k, most=most, window=ring)
        result = self.attend(self.out_proj, q, k, v, dropout=self.dropout, **own, **rest)
        if not use_cache:
            self.reset_cache()
        return result


class Attention(ScoreOptions, Heads):
    """Multi-head attention with the caller's mask, and with the Linears ``W_q W_k W_v W_o``, which have biases.

    ``mask`` is bool and **True = masked out**, as in the tutorials. This is the opposite of ``mask`` in the other
    modules and in :func:`pyattn.attention`, and of ``attn_mask`` in torch's ``scaled_dot_product_attention``. Its shape
    is (seqlen, seqlen), (batch, seqlen, seqlen) or (batch, num_heads, seqlen, seqlen); sizes of 1 broadcast. For a
    query without a visible key, attention returns 0, not NaN. Without a mask (the default), every key is visible. A
    mask of another dtype raises TypeError; pass numbers to add to the scores as ``bias``.

    ``num_heads`` must divide ``embed_dim``, and ``num_heads_kv`` (default: num_heads) must divide num_heads.
    :class:`pyattn.nn.score_options.ScoreOptions` describes ``window`` and the other extra options; a window applies in
    addition to the mask. Without a mask, ``window=(1, 2)`` masks keys as follows, 1 = takes part::

        1 1 1 0 0
        1 1 1 1 0
        0 1 1 1 1
        0 0 1 1 1
        0 0 0 1 1

    >>> Attention(embed_dim=8, num_heads=2)(torch.rand(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    @check_names
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        *,
        num_heads_kv: int | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        alibi: bool = False,
        sinks: bool = False,
        rotary: float | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_heads_kv: int = num_heads if num_heads_kv is None else num_heads_kv
        self.head_dim: int = quotient("embed_dim", embed_dim, "num_heads", num_heads)
        quotient("num_heads", num_heads, "num_heads_kv", self.num_heads_kv)
        self.W_q: nn.Linear = nn.Linear(embed_dim, embed_dim)
        self.W_k: nn.Linear = nn.Linear(embed_dim, self.num_heads_kv * self.head_dim)
        self.W_v: nn.Linear = nn.Linear(embed_dim, self.num_heads_kv * self.head_dim)
        self.W_o: nn.Linear = nn.Linear(embed_dim, embed_dim)
        self.dropout: nn.Module = make_dropout(dropout)
        self.set_score_options(num_heads, self.head_dim, window, softcap, alibi, sinks, rotary)

    def extra_repr(self) -> str:  # noqa: D102
        shared = None if self.num_heads_kv == self.num_heads else self.num_heads_kv
        return described(num_heads=self.num_heads, num_heads_kv=shared, **self.described_options())

    @check_names
    @takes(Unmasked)
    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Unpack[Unmasked]) -> Output:
        """``x`` (batch, seqlen, embed_dim) -> out of the same shape.

        With ``kv_cache``, x follows the cached tokens, and all of them are visible; ``mask`` then has max_seqlen keys,
        or those of x alone. ``positions``: as in :class:`MultiHeadAttention`.
        """
        check_input(x, self.embed_dim, self.W_q)
        check_alone(x, mask=mask)
        cache = check_cache(self, options)
        if mask is not None:
            seqlen = x.shape[1]
            mask = ~check_mask(mask, (x.shape[0], self.num_heads, seqlen, keys_of(mask, cache, seqlen)))
        q, k, v = self.W_q(x), self.W_k(x), self.W_v(x)
        own = self.score_options(self.num_heads, x) | {"causal": False, "mask": mask, "dropout": self.dropout}
        return self.attend(self.W_o, q, k, v, **own, **options)
