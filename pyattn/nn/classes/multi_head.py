"""Multi-head attention with one set of projections."""

from torch import Tensor, nn
from typing_extensions import Unpack

from pyattn.nn.checks import check_alone, check_cache, check_input, check_mask, keys_of, quotient
from pyattn.nn.forward_options import Positioned, Unmasked, takes
from pyattn.nn.heads import Heads, Output, make_dropout
from pyattn.nn.mask_buffer import CausalMask
from pyattn.nn.repr import described
from pyattn.nn.score_options import ScoreOptions
from pyattn.options.checks import check_names


class MultiHeadAttention(CausalMask, ScoreOptions, Heads):
    """Causal multi-head attention over sequences of at most ``context_length``, then the Linear ``out_proj``.

    ``num_heads`` must divide ``d_out``, and ``num_heads_kv`` (default: num_heads) must divide num_heads. Query
    head h reads KV head ``h // (num_heads // num_heads_kv)``; W_key and W_value return num_heads_kv * head_dim columns.
    :class:`pyattn.nn.score_options.ScoreOptions` describes ``window`` and the other extra options. ``window=(2, 0)``
    masks keys as follows, 1 = takes part::

        1 0 0 0 0
        1 1 0 0 0
        1 1 1 0 0
        0 1 1 1 0
        0 0 1 1 1

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
        *,
        num_heads_kv: int | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        alibi: bool = False,
        sinks: bool = False,
        rotary: float | None = None,
        persistent_mask: bool | None = None,
    ) -> None:
        super().__init__(context_length, persistent_mask)
        self.set_sizes(d_in, d_out, num_heads)
        self.num_heads_kv: int = num_heads if num_heads_kv is None else num_heads_kv
        quotient("num_heads", num_heads, "num_heads_kv", self.num_heads_kv)
        self.W_query: nn.Linear = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key: nn.Linear = nn.Linear(d_in, self.num_heads_kv * self.head_dim, bias=qkv_bias)
        self.W_value: nn.Linear = nn.Linear(d_in, self.num_heads_kv * self.head_dim, bias=qkv_bias)
        self.out_proj: nn.Linear = nn.Linear(d_out, d_out)
        self.dropout: nn.Module = make_dropout(dropout)
        self.set_score_options(num_heads, self.head_dim, window, softcap, alibi, sinks, rotary)

    def extra_repr(self) -> str:  # noqa: D102
        shared = None if self.num_heads_kv == self.num_heads else self.num_heads_kv
        heads = {"num_heads": self.num_heads, "num_heads_kv": shared}
        return described(**heads, **self.described_mask(), **self.described_options())

    @check_names
    @takes(Positioned)
    def forward(self, x: Tensor, **options: Unpack[Positioned]) -> Output:
        """``x`` (batch, seqlen, d_in) -> out (batch, seqlen, d_out); x continues the tokens in ``kv_cache``.

        ``positions``: int (batch or 1, seqlen), those of the tokens for the rotary embedding, such as the depths in a
        drafted tree; default: each token is one after that before it. Masks and windows count places in the cache.
        """
        check_input(x, self.d_in, self.W_query, context_length=self.context_length)
        cache = check_cache(options, self.context_length)
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        own = self.mask_options(x, cache is not None) | self.score_options(self.num_heads, x)
        return self.attend(self.out_proj, q, k, v, dropout=self.dropout, **own, **options)


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
        cache = check_cache(options)
        if mask is not None:
            seqlen = x.shape[1]
            mask = ~check_mask(mask, (x.shape[0], self.num_heads, seqlen, keys_of(mask, cache, seqlen)))
        q, k, v = self.W_q(x), self.W_k(x), self.W_v(x)
        own = self.score_options(self.num_heads, x) | {"causal": False, "mask": mask, "dropout": self.dropout}
        return self.attend(self.W_o, q, k, v, **own, **options)
