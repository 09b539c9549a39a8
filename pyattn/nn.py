"""Drop-in modules: the attention classes people write from scratch, under the same names, native inside.

Import them in place of your own. Constructors, attribute names, initial values under a seed and state dicts, the
``mask`` buffer's key included, are those of the plain modules in :mod:`pyattn.reference` (S. Raschka, "Build a Large
Language Model (From Scratch)", chapters 3 and 4, and the tutorials after it); ``load_state_dict(strict=True)`` works
both ways. What is native needs memory linear in seqlen. Each head computes (Vaswani et al. 2017, equation 1) ::

    out = dropout(softmax(mask(q k^T / sqrt(head_dim)))) v        causal mask, seqlen 4:    1 0 0 0
                                                                  query i down, key j       1 1 0 0
    q = W_query(x), k = W_key(x), v = W_value(x)                  across, 1 = takes part    1 1 1 0
                                                                                            1 1 1 1
What all modules share:

- ``x`` is (batch, seqlen, d_in), in the weights' dtype, any strides; a module that says so also takes (seqlen, d_in).
- ``dropout`` is the probability, 0 to 1, of dropping a weight in training; ``qkv_bias`` gives the projections a bias.
- ``need_weights=True`` returns ``(out, weights)``, the weights as they met ``v``, so after dropout: (batch, num_heads,
  seqlen, seqlen), without num_heads in one-head modules, without batch if ``x`` has none.
- Not native yet: a mask given as a tensor, returned weights. They run in plain PyTorch with seqlen x seqlen memory, and
  the first use of each warns.
- TypeError for a wrong dtype, ValueError for a wrong shape or value; each says what it got.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from pyattn import reference
from pyattn.functional import attention

__all__ = [
    "GPT2_CONFIGS",
    "Attention",
    "CausalAttention",
    "GroupedQueryAttention",
    "MultiHeadAttention",
    "MultiHeadAttentionWrapper",
    "SelfAttention",
    "SelfAttention_v1",
    "SelfAttention_v2",
    "SimplifiedSelfAttention",
    "SingleHeadSelfAttention",
    "causal_mask",
    "create_gpt2_large_attention",
    "create_gpt2_medium_attention",
    "create_gpt2_small_attention",
    "create_gpt2_xl_attention",
]

Output = Tensor | tuple[Tensor, Tensor]

_warned: set[str] = set()


def _warn_once(reason: str) -> None:
    if reason not in _warned:
        warnings.warn(f"pyattn: {reason} is not native yet: plain PyTorch, seqlen x seqlen memory", stacklevel=2)
        _warned.add(reason)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    mask: Tensor | None = None,
    dropout: nn.Dropout | None = None,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention over (B, H, T, D), native where it can be: out, weights or None. ``mask``: bool, True = takes part."""
    dropout_p = dropout.p if dropout is not None and dropout.training else 0.0
    if dropout_p == 1.0:  # nothing is left
        out, weights = _attend(
            q, k, v, causal=causal, softmax_scale=softmax_scale, mask=mask, need_weights=need_weights
        )
        return out * 0.0, None if weights is None else weights * 0.0
    if mask is None and not need_weights:
        return attention(q, k, v, causal=causal, softmax_scale=softmax_scale, dropout_p=dropout_p), None
    if mask is not None:
        _warn_once("a mask given as a tensor")
    if need_weights:
        _warn_once("returning attention weights")
    out, weights = reference.attention(
        q, k, v, causal=causal, softmax_scale=softmax_scale, mask=mask, dropout_p=dropout_p, return_weights=True
    )
    return out, weights if need_weights else None


def _single_head(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Output:
    """:func:`_attend` over (B, T, D) or (T, D): sequences of one head pass as the heads of one batch entry."""
    missing = 4 - q.dim()
    out, weights = _attend(*(t[(None,) * missing] for t in (q, k, v)), **options)
    first = (0,) * missing
    return _output(out[first], None if weights is None else weights[first])


def _multi_head(q: Tensor, k: Tensor, v: Tensor, head_dim: int, **options: Any) -> tuple[Tensor, Tensor | None]:
    """:func:`_attend` over (B, T, H * head_dim), the heads split and merged by views.

    H is read from the tensors: under tensor parallelism a projection yields this rank's heads only.
    """
    out, weights = _attend(*(torch.unflatten(t, -1, (-1, head_dim)).transpose(1, 2) for t in (q, k, v)), **options)
    return out.transpose(1, 2).flatten(2), weights


def _output(out: Tensor, weights: Tensor | None) -> Output:
    return out if weights is None else (out, weights)


def _check_input(
    x: Tensor,
    d_in: int | None = None,
    projection: Tensor | nn.Module | None = None,
    *,
    unbatched: bool = False,
    context_length: int | None = None,
) -> None:
    dtype = getattr(getattr(projection, "weight", projection), "dtype", x.dtype)
    if not x.is_floating_point():
        raise TypeError(f"pyattn: x must be a floating-point tensor, got {x.dtype}")
    if dtype != x.dtype and dtype.is_floating_point and (x.is_meta or not torch.is_autocast_enabled(x.device.type)):
        raise TypeError(f"pyattn: x must have the dtype of the weights, got {x.dtype} and {dtype}")
    if x.dim() != 3 and not (unbatched and x.dim() == 2):
        also = " or (seqlen, d_in)" if unbatched else ""
        raise ValueError(f"pyattn: x must be (batch, seqlen, d_in){also}, got shape {tuple(x.shape)}")
    if d_in is not None and x.shape[-1] != d_in:
        raise ValueError(f"pyattn: the last dimension of x must be {d_in}, got shape {tuple(x.shape)}")
    if context_length is not None and x.shape[1] > context_length:
        raise ValueError(f"pyattn: seqlen must not exceed context_length, got {x.shape[1]} and {context_length}")


def _check_mask(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    if mask.dtype != torch.bool:
        raise TypeError(f"pyattn: mask must be bool, True = masked out, got {mask.dtype}")
    wide = mask[:, None] if mask.dim() == 3 else mask[(None,) * (4 - mask.dim())]
    if mask.dim() not in (2, 3, 4) or any(m not in (1, n) for m, n in zip(wide.shape, shape, strict=True)):
        raise ValueError(
            "pyattn: mask must be (seqlen, seqlen), (batch, seqlen, seqlen) or (batch, num_heads, seqlen, seqlen), "
            f"sizes of 1 broadcast, got {tuple(mask.shape)} for {shape}"
        )
    return wide


def _quotient(name: str, value: int, divisor_name: str, divisor: int) -> int:
    if value < 1 or divisor < 1 or value % divisor:
        raise ValueError(f"pyattn: {name} must be a positive multiple of {divisor_name}, got {value} and {divisor}")
    return value // divisor


def _dropout(p: float) -> nn.Dropout:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"pyattn: dropout must be between 0 and 1, got {p}")
    return nn.Dropout(p)


class _CausalMaskKey(nn.Module):
    """The ``mask`` of the plain modules, in state dicts and on request, without a (T, T) tensor to hold.

    Saving writes it first, where a buffer stands, in the parameters' dtype and on their device, as ``to()`` would have
    left it. Loading checks its shape and lets it go.
    """

    def __init__(self, context_length: int) -> None:
        super().__init__()
        self.context_length = context_length

    @property
    def mask(self) -> Tensor:
        """``triu(ones(T, T), diagonal=1)`` with T = context_length, made anew each time."""
        like = next(self.parameters(), torch.empty(0))
        shape = (self.context_length, self.context_length)
        return torch.ones(shape, dtype=like.dtype, device=like.device).triu(1)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "mask"] = self.mask
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        _local_metadata, _strict, missing_keys, _unexpected_keys, error_msgs = rest
        key, shape = prefix + "mask", (self.context_length, self.context_length)
        mask = state_dict.pop(key, None)
        if mask is None:
            missing_keys.append(key)
        elif mask.shape != shape:
            error_msgs.append(f"pyattn: {key} must have shape {shape}, got {tuple(mask.shape)}")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def causal_mask(T: int, device: torch.device | str | None = None) -> Tensor:
    """The causal mask as :class:`Attention` takes it: bool (1, 1, T, T), True = masked out.

    >>> causal_mask(3)[0, 0].int().tolist()
    [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    """
    return torch.ones(1, 1, T, T, dtype=torch.bool, device=device).triu(1)


class SimplifiedSelfAttention(nn.Module):
    """``softmax(x x^T) x``: no weights, no scale, no mask.

    >>> SimplifiedSelfAttention()(torch.rand(6, 3)).shape
    torch.Size([6, 3])
    """

    def forward(self, x: Tensor, *, need_weights: bool = False) -> Output:
        """``x`` (batch, seqlen, d) or (seqlen, d); out the same."""
        _check_input(x, unbatched=True)
        return _single_head(x, x, x, causal=False, softmax_scale=1.0, need_weights=need_weights)


class SelfAttention_v1(nn.Module):
    """Unmasked self-attention over bare matrices ``W_query W_key W_value`` (d_in, d_out), made with :func:`torch.rand`.

    >>> SelfAttention_v1(3, 2)(torch.rand(6, 3)).shape
    torch.Size([6, 2])
    """

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.W_query = nn.Parameter(torch.rand(d_in, d_out))
        self.W_key = nn.Parameter(torch.rand(d_in, d_out))
        self.W_value = nn.Parameter(torch.rand(d_in, d_out))

    def forward(self, x: Tensor, *, need_weights: bool = False) -> Output:
        """``x`` (batch, seqlen, d_in) or (seqlen, d_in); out the same with d_out."""
        _check_input(x, self.W_query.shape[0], self.W_query, unbatched=True)
        q, k, v = x @ self.W_query, x @ self.W_key, x @ self.W_value
        return _single_head(q, k, v, causal=False, need_weights=need_weights)


class SelfAttention_v2(nn.Module):
    """Unmasked self-attention over Linears ``W_query W_key W_value``; :data:`SelfAttention` is another name for it.

    >>> SelfAttention_v2(3, 2)(torch.rand(8, 6, 3)).shape
    torch.Size([8, 6, 2])
    """

    def __init__(self, d_in: int, d_out: int, qkv_bias: bool = False) -> None:
        super().__init__()
        self.d_in = d_in
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)

    def forward(self, x: Tensor, *, need_weights: bool = False) -> Output:
        """``x`` (batch, seqlen, d_in) or (seqlen, d_in); out the same with d_out."""
        _check_input(x, self.d_in, self.W_query, unbatched=True)
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        return _single_head(q, k, v, causal=False, need_weights=need_weights)


SelfAttention = SelfAttention_v2


class CausalAttention(_CausalMaskKey):
    """One causal head over sequences of at most ``context_length``.

    >>> CausalAttention(d_in=3, d_out=2, context_length=6, dropout=0.0)(torch.rand(8, 6, 3)).shape
    torch.Size([8, 6, 2])
    """

    def __init__(self, d_in: int, d_out: int, context_length: int, dropout: float, qkv_bias: bool = False) -> None:
        super().__init__(context_length)
        self.d_in = d_in
        self.d_out = d_out
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.dropout = _dropout(dropout)

    def forward(self, x: Tensor, *, need_weights: bool = False) -> Output:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, d_out)."""
        _check_input(x, self.d_in, self.W_query, context_length=self.context_length)
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        return _single_head(q, k, v, dropout=self.dropout, need_weights=need_weights)


class MultiHeadAttentionWrapper(nn.Module):
    """``num_heads`` :class:`CausalAttention` side by side, their outputs concatenated, each d_out wide.

    >>> MultiHeadAttentionWrapper(3, 2, context_length=6, dropout=0.0, num_heads=2)(torch.rand(8, 6, 3)).shape
    torch.Size([8, 6, 4])
    """

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            CausalAttention(d_in, d_out, context_length, dropout, qkv_bias) for _ in range(num_heads)
        )

    def forward(self, x: Tensor, *, need_weights: bool = False) -> Output:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, num_heads * d_out)."""
        if not need_weights:
            return torch.cat([head(x) for head in self.heads], dim=-1)
        outs, weights = zip(*(head(x, need_weights=True) for head in self.heads), strict=True)
        return torch.cat(outs, dim=-1), torch.stack(weights, dim=1)


class MultiHeadAttention(_CausalMaskKey):
    """Causal multi-head attention over sequences of at most ``context_length``, then the Linear ``out_proj``.

    ``num_heads`` divides ``d_out``. ``num_kv_heads``, default num_heads, divides num_heads: query head h reads KV head
    ``h // (num_heads // num_kv_heads)``, and W_key and W_value yield num_kv_heads * head_dim.

    >>> attention = MultiHeadAttention(d_in=768, d_out=768, context_length=1024, dropout=0.0, num_heads=12)
    >>> attention(torch.rand(2, 16, 768)).shape
    torch.Size([2, 16, 768])
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        *,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__(context_length)
        self.d_in = d_in
        self.d_out = d_out
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = _quotient("d_out", d_out, "num_heads", num_heads)
        _quotient("num_heads", num_heads, "num_kv_heads", self.num_kv_heads)
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, self.num_kv_heads * self.head_dim, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, self.num_kv_heads * self.head_dim, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = _dropout(dropout)

    def forward(self, x: Tensor, *, need_weights: bool = False) -> Output:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, d_out)."""
        _check_input(x, self.d_in, self.W_query, context_length=self.context_length)
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        out, weights = _multi_head(q, k, v, self.head_dim, dropout=self.dropout, need_weights=need_weights)
        return _output(self.out_proj(out), weights)


class SingleHeadSelfAttention(nn.Module):
    """One causal head that also returns its weights, over Linears ``q k v`` without bias.

    ``trace_shapes`` prints the shapes on the way. The weights make it run in plain PyTorch: :class:`CausalAttention` is
    the native one.

    >>> attention = SingleHeadSelfAttention(d_model=4, d_k=2, trace_shapes=True)
    >>> out, weights = attention(torch.rand(1, 5, 4))
    q torch.Size([1, 5, 2])  k torch.Size([1, 5, 2])  v torch.Size([1, 5, 2])
    weights torch.Size([1, 5, 5])  out torch.Size([1, 5, 2])
    """

    def __init__(self, d_model: int, d_k: int, dropout: float = 0.0, trace_shapes: bool = False) -> None:
        super().__init__()
        self.d_model = d_model
        self.q = nn.Linear(d_model, d_k, bias=False)
        self.k = nn.Linear(d_model, d_k, bias=False)
        self.v = nn.Linear(d_model, d_k, bias=False)
        self.dropout = _dropout(dropout)
        self.trace_shapes = trace_shapes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` (batch, seqlen, d_model), out (batch, seqlen, d_k), weights (batch, seqlen, seqlen)."""
        _check_input(x, self.d_model, self.q)
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.trace_shapes:
            print(f"q {q.shape}  k {k.shape}  v {v.shape}")
        out, weights = _single_head(q, k, v, dropout=self.dropout, need_weights=True)
        if self.trace_shapes:
            print(f"weights {weights.shape}  out {out.shape}")
        return out, weights


class Attention(nn.Module):
    """Multi-head attention with a mask of the caller's, over Linears ``W_q W_k W_v W_o`` with bias.

    ``mask``: bool, **True = masked out** (the opposite of torch's ``scaled_dot_product_attention``), (seqlen, seqlen),
    (batch, seqlen, seqlen) or (batch, num_heads, seqlen, seqlen), sizes of 1 broadcast; a query that sees no key gets
    0, not NaN. None, the default: every query sees every key, natively.

    >>> Attention(embed_dim=8, num_heads=2)(torch.rand(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = _quotient("embed_dim", embed_dim, "num_heads", num_heads)
        self.W_q = nn.Linear(embed_dim, embed_dim)
        self.W_k = nn.Linear(embed_dim, embed_dim)
        self.W_v = nn.Linear(embed_dim, embed_dim)
        self.W_o = nn.Linear(embed_dim, embed_dim)
        self.dropout = _dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, need_weights: bool = False) -> Output:
        """``x`` (batch, seqlen, embed_dim), out the same."""
        _check_input(x, self.embed_dim, self.W_q)
        if mask is not None:
            mask = ~_check_mask(mask, (x.shape[0], self.num_heads, x.shape[1], x.shape[1]))
        q, k, v = self.W_q(x), self.W_k(x), self.W_v(x)
        options = {"causal": False, "mask": mask, "dropout": self.dropout, "need_weights": need_weights}
        out, weights = _multi_head(q, k, v, self.head_dim, **options)
        return _output(self.W_o(out), weights)


class GroupedQueryAttention(nn.Module):
    """Causal attention whose ``num_heads`` query heads share ``num_kv_groups`` KV heads (Ainslie et al. 2023).

    Query head h reads KV head ``h // (num_heads // num_kv_groups)``. ``num_heads`` divides ``d_out``, ``num_kv_groups``
    divides num_heads; ``dtype`` is the weights'.

    >>> GroupedQueryAttention(8, 8, dropout=0.0, num_heads=4, num_kv_groups=2)(torch.rand(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        dropout: float,
        num_heads: int,
        num_kv_groups: int,
        dtype: torch.dtype | None = None,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__()
        self.d_in = d_in
        self.d_out = d_out
        self.num_heads = num_heads
        self.num_kv_groups = num_kv_groups
        self.head_dim = _quotient("d_out", d_out, "num_heads", num_heads)
        self.group_size = _quotient("num_heads", num_heads, "num_kv_groups", num_kv_groups)
        self.W_key = nn.Linear(d_in, num_kv_groups * self.head_dim, bias=qkv_bias, dtype=dtype)
        self.W_value = nn.Linear(d_in, num_kv_groups * self.head_dim, bias=qkv_bias, dtype=dtype)
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias, dtype=dtype)
        self.out_proj = nn.Linear(d_out, d_out, bias=False, dtype=dtype)
        self.dropout = _dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, d_out)."""
        _check_input(x, self.d_in, self.W_query)
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        out: Tensor = self.out_proj(_multi_head(q, k, v, self.head_dim, dropout=self.dropout)[0])
        return out


GPT2_CONFIGS: dict[str, dict[str, Any]] = {
    f"gpt2-{size}": {
        "vocab_size": 50257,
        "context_length": 1024,
        "d_model": d_model,
        "num_heads": num_heads,
        "num_layers": num_layers,
        "dropout": 0.1,
        "qkv_bias": False,
    }
    for size, d_model, num_heads, num_layers in (
        ("small", 768, 12, 12),
        ("medium", 1024, 16, 24),
        ("large", 1280, 20, 36),
        ("xl", 1600, 25, 48),
    )
}
"""The four GPT-2 (Radford et al. 2019) by name, with its real head counts. OpenAI's weights have ``qkv_bias=True``."""


def _create_gpt2_attention(size: str, dropout: float, qkv_bias: bool) -> MultiHeadAttention:
    config = GPT2_CONFIGS[f"gpt2-{size}"]
    d_model = config["d_model"]
    return MultiHeadAttention(d_model, d_model, config["context_length"], dropout, config["num_heads"], qkv_bias)


def create_gpt2_small_attention(dropout: float = 0.1, *, qkv_bias: bool = False) -> MultiHeadAttention:
    """GPT-2 small's attention: width 768, 12 heads, context 1024. OpenAI's weights need ``qkv_bias=True``."""
    return _create_gpt2_attention("small", dropout, qkv_bias)


def create_gpt2_medium_attention(dropout: float = 0.1, *, qkv_bias: bool = False) -> MultiHeadAttention:
    """GPT-2 medium's attention: width 1024, 16 heads, context 1024. OpenAI's weights need ``qkv_bias=True``."""
    return _create_gpt2_attention("medium", dropout, qkv_bias)


def create_gpt2_large_attention(dropout: float = 0.1, *, qkv_bias: bool = False) -> MultiHeadAttention:
    """GPT-2 large's attention: width 1280, 20 heads, context 1024. OpenAI's weights need ``qkv_bias=True``."""
    return _create_gpt2_attention("large", dropout, qkv_bias)


def create_gpt2_xl_attention(dropout: float = 0.1, *, qkv_bias: bool = False) -> MultiHeadAttention:
    """GPT-2 XL's attention: width 1600, 25 heads, context 1024. OpenAI's weights need ``qkv_bias=True``."""
    return _create_gpt2_attention("xl", dropout, qkv_bias)
