"""Latent attention as in the book's chapter 4: no rotation, no norm, and one scale."""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pyattn.masks.key_ranges import plain
from pyattn.nn.checks import check_append, check_input, check_pairs
from pyattn.nn.classes.latent_cache import DEEPSEEK, appended_latents, expands, unlike
from pyattn.nn.forward_options import Cached, takes
from pyattn.nn.growing_cache import SelfCaching
from pyattn.nn.heads import Heads, Output, attend, output_of
from pyattn.nn.replace import make_dropout, weight_of
from pyattn.nn.repr import described
from pyattn.options.checks import check_names, check_sizes


class MultiHeadLatentAttention(SelfCaching, Heads):
    """Causal attention whose keys and values are linear in one latent vector c_j per token, without positions.

    For token i with input x_i, and head h::

        q_hi = W_query(x_i),  c_i = W_DKV(x_i),  k_hi = W_UK(c_i),  v_hi = W_UV(c_i)
        out_i = out_proj(concat_h sum_(j <= i) softmax_j(<q_hi, k_hj> / sqrt(head_dim)) v_hj)

    A cache holds the latent vectors alone, ``latent_dim`` numbers per token (default: max(16, d_out // 8)) in place of
    2 * d_out: the module's own with ``use_cache=True``, or ``KVCache(batch, 1, max_seqlen, latent_dim,
    shared_values=True)``. Over it, W_UK is absorbed into the queries of single tokens and W_UV into their results, as
    in :class:`pyattn.nn.MultiHeadLatentAttention`; with ``qkv_bias``, keys and values of all tokens are computed again.

    This is the book's class. That of DeepSeek's models, with their arguments, norms and rotary parts, is
    :class:`pyattn.nn.MultiHeadLatentAttention`.

    >>> layer = MultiHeadLatentAttention(64, 64, dropout=0.0, num_heads=4, latent_dim=16)
    >>> layer(torch.rand(1, 5, 64)).shape
    torch.Size([1, 5, 64])
    """

    @unlike(DEEPSEEK)
    @check_names
    def __init__(
        self,
        d_in: int,
        d_out: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        latent_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.set_sizes(d_in, d_out, num_heads)
        self.latent_dim: int = max(16, d_out // 8) if latent_dim is None else latent_dim
        check_sizes(1, latent_dim=self.latent_dim)
        self.W_query: nn.Module = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_DKV: nn.Module = nn.Linear(d_in, self.latent_dim, bias=qkv_bias)
        self.W_UK: nn.Module = nn.Linear(self.latent_dim, d_out, bias=qkv_bias)
        self.W_UV: nn.Module = nn.Linear(self.latent_dim, d_out, bias=qkv_bias)
        self.out_proj: nn.Module = nn.Linear(d_out, d_out)
        self.dropout: nn.Module = make_dropout(dropout)

    def extra_repr(self) -> str:  # noqa: D102
        return described(num_heads=self.num_heads, latent_dim=self.latent_dim)

    @check_names
    @takes(Cached)
    def forward(self, x: Tensor, use_cache: bool = False, **options: Unpack[Cached]) -> Output:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, d_out); x continues the tokens in a cache.

        With ``use_cache``, that is the module's own, until :meth:`reset_cache` or a call without ``use_cache``.
        """
        check_input(x, self.d_in, self.W_query)
        cache = self.check_use(x, use_cache, options)
        q, latent = self.W_query(self.common(x)), self.common(self.W_DKV(x))
        if use_cache:
            self.take_own_cache(options, q, latent, shared_values=True)
        elif cache is None:
            k, v = self.W_UK(latent), self.W_UV(latent)
            result = self.attend(self.out_proj, q, k, v, dropout=self.dropout, **options)
            self.reset_cache()
            return result
        out, weights = self._over_cache(self._heads(q), latent.unsqueeze(2), dict(options))
        if not use_cache:
            self.reset_cache()
        return output_of(self.project(self.out_proj, out.flatten(2)), weights)

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, H * head_dim) -> (B, T, H, head_dim)."""
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads

    def _over_cache(self, q: Tensor, latent: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Attention of q (B, T, H, head_dim) over a cache to which ``latent`` (B, T, 1, latent_dim) is appended."""
        cache, mask, bias = options["kv_cache"], options.get("mask"), options.get("bias")
        check_pairs(mask, bias, q, latent, cache)
        options["key_ranges"] = plain(options.get("key_ranges"), True)
        check_append(cache, latent, options["key_ranges"], mask, bias, self.latent_dim)
        known = self.drawn({"dropout": self.dropout, "softmax_scale": self.head_dim**-0.5, **options}, q.device)
        matrices = all(isinstance(t, nn.Linear) and t.bias is None for t in (self.W_UK, self.W_UV))
        absorbs = matrices or cache.window is not None  # a ring buffer's slots are not positions
        if not absorbs or expands(cache, q.shape[1], self.latent_dim, 2 * self.head_dim):
            rows, known = appended_latents(cache, latent, known)
            k, v = (self._heads(layer(rows.squeeze(2))) for layer in (self.W_UK, self.W_UV))
            out, weights = attend(*(t.transpose(1, 2) for t in (q, k, v)), **known)
            return out.transpose(1, 2), weights
        to_keys, to_values = (
            weight_of(name, getattr(self, name)).unflatten(0, (-1, self.head_dim)) for name in ("W_UK", "W_UV")
        )
        over_latents = torch.einsum("bthn,hnc->bthc", q, to_keys)
        out, weights = attend(*(t.transpose(1, 2) for t in (over_latents, latent, latent)), **known)
        return torch.einsum("bhtc,hvc->bthv", out, to_values), weights
