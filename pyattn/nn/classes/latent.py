"""Multi-head latent attention: keys and values of all heads from one small vector per token."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nested._internal.nested_tensor import NestedTensor
from typing_extensions import Unpack

from pyattn.cache.call_gradients import lengths_before
from pyattn.jagged.layout import like, positions_of
from pyattn.masks.key_ranges import plain
from pyattn.nn.checks import check_alone, check_append, check_cache, check_input, check_pairs
from pyattn.nn.classes.latent_cache import BOOK, appended_latents, expands, unlike
from pyattn.nn.forward_options import Positioned, takes
from pyattn.nn.heads import Heads, Output, attend, output_of
from pyattn.nn.replace import make_dropout, normed, weight_of
from pyattn.nn.repr import described
from pyattn.nn.rotary import check_angles, check_positions, rotate, turn
from pyattn.options.checks import check_finite, check_names, check_sizes, check_type


class _Angles(NamedTuple):
    """Positions of a call's tokens: counted from ``first``, or as given, or the (cos, sin) of their angles."""

    first: Tensor | None
    positions: Tensor | None
    embeddings: tuple[Tensor, Tensor] | None


class MultiHeadLatentAttention(Heads):
    """Causal attention whose keys and values are linear in one latent vector per token, as in DeepSeek V2 and V3.

    For token i with input x_i and position p_i, and head h, where ``turn`` is the rotary embedding::

        [q_nope_hi | q_rope_hi] = q_b_proj(q_a_layernorm(q_a_proj(x_i)))     or q_proj(x_i) if q_lora_rank is None
        [c'_i | r_i]            = kv_a_proj_with_mqa(x_i)
        c_i                     = kv_a_layernorm(c'_i)                       the latent vector, kv_lora_rank columns
        [k_nope_hi | v_hi]      = kv_b_proj(c_i)                             [U_h | W_h] c_i
        s_hij                   = softmax_scale (<q_nope_hi, k_nope_hj> + <turn(q_rope_hi, p_i), turn(r_j, p_j)>)
        out_i                   = o_proj(concat_h sum_(j <= i) softmax_j(s_hij) v_hj)

    Latent attention of the book's chapter 4 is another class, :class:`pyattn.nn.book.MultiHeadLatentAttention`.
    Parameters have the published names, so state dicts of transformers' ``DeepseekV3Attention`` load as they are.

    Without a cache, keys and values of all heads are computed as above. A cache holds the latent vectors alone, one KV
    head with the row ``[c_j | turn(r_j, p_j)]``, and for single tokens kv_b_proj is absorbed into queries and results::

        s_hij = softmax_scale <[U_h^T q_nope_hi | turn(q_rope_hi, p_i)], [c_j | turn(r_j, p_j)]>
        out_i = o_proj(concat_h W_h sum_j softmax_j(s_hij) c_j)

    Both give the same result up to rounding; a prompt over a cache takes the form with fewer operations. The cache of
    128 heads of DeepSeek V3 takes 576 numbers per token in place of 40,960: ``KVCache(batch, 1, max_seqlen,
    kv_lora_rank + qk_rope_head_dim, head_dim_v=kv_lora_rank, shared_values=True)``. kv_b_proj must then be a Linear
    without bias, as it is here. CUDA kernels take up to 256 columns: over wider latent vectors they raise
    NotImplementedError; without a cache these sizes run.

    Args:
        hidden_size: columns of x and out.
        num_heads: heads; all read the same latent vectors.
        q_lora_rank: columns of the queries' latent vectors; None: one projection, q_proj.
        kv_lora_rank: columns of the latent vectors of keys and values.
        qk_nope_head_dim, qk_rope_head_dim: columns of a query and a key without and with positions.
        v_head_dim: columns of a value.
        dropout: the probability of dropping a weight in training.
        attention_bias: whether q_a_proj, kv_a_proj_with_mqa and o_proj have biases.
        rope_theta: the base of the rotary embedding; None: q_rope and r are not turned, as in Kimi Linear.
        rope_interleave: the embedding turns columns 2t and 2t + 1 together, as in DeepSeek V3; otherwise columns t and
            t + qk_rope_head_dim / 2.
        softmax_scale: default 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim). Models with YaRN multiply it by mscale^2.
        dtype: of the weights.

    Sources: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C; DeepSeek-V3 (arXiv 2412.19437), section 2.1.1.

    >>> layer = MultiHeadLatentAttention(64, 4, 24, 32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
    >>> layer(torch.rand(1, 5, 64)).shape
    torch.Size([1, 5, 64])
    """

    @unlike(BOOK)
    @check_names
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        dropout: float = 0.0,
        attention_bias: bool = False,
        *,
        rope_theta: float | None = 10000.0,
        rope_interleave: bool = True,
        softmax_scale: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(1, hidden_size=hidden_size, num_heads=num_heads, kv_lora_rank=kv_lora_rank, v_head_dim=v_head_dim)
        check_sizes(1, qk_nope_head_dim=qk_nope_head_dim, qk_rope_head_dim=qk_rope_head_dim)
        if q_lora_rank is not None:
            check_sizes(1, q_lora_rank=q_lora_rank)
        check_type("attention_bias", attention_bias, bool)
        check_type("rope_interleave", rope_interleave, bool)
        if rope_theta is not None:
            check_finite("rope_theta", rope_theta)
            if rope_theta == 0 or qk_rope_head_dim % 2:
                raise ValueError(
                    "pyattn: rope_theta must be a base above 0, with an even qk_rope_head_dim, got "
                    f"{rope_theta} and {qk_rope_head_dim}"
                )
        if softmax_scale is not None:
            check_finite("softmax_scale", softmax_scale)
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.rope_theta = rope_theta
        self.rope_interleave = rope_interleave
        qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
        self.softmax_scale: float = qk_head_dim**-0.5 if softmax_scale is None else softmax_scale
        if q_lora_rank is None:
            self.q_proj: nn.Module = nn.Linear(hidden_size, num_heads * qk_head_dim, bias=False, dtype=dtype)
        else:
            self.q_a_proj: nn.Module = nn.Linear(hidden_size, q_lora_rank, bias=attention_bias, dtype=dtype)
            self.q_a_layernorm: nn.Module = nn.RMSNorm(q_lora_rank, eps=1e-6, dtype=dtype)
            self.q_b_proj: nn.Module = nn.Linear(q_lora_rank, num_heads * qk_head_dim, bias=False, dtype=dtype)
        self.kv_a_proj_with_mqa: nn.Module = nn.Linear(
            hidden_size, kv_lora_rank + qk_rope_head_dim, bias=attention_bias, dtype=dtype
        )
        self.kv_a_layernorm: nn.Module = nn.RMSNorm(kv_lora_rank, eps=1e-6, dtype=dtype)
        self.kv_b_proj: nn.Module = nn.Linear(
            kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), bias=False, dtype=dtype
        )
        self.o_proj: nn.Module = nn.Linear(num_heads * v_head_dim, hidden_size, bias=attention_bias, dtype=dtype)
        self.dropout: nn.Module = make_dropout(dropout)

    def extra_repr(self) -> str:  # noqa: D102
        usual: float = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        return described(
            num_heads=self.num_heads,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            rope_theta=self.rope_theta,
            rope_interleave=self.rope_interleave,
            softmax_scale=None if self.softmax_scale == usual else self.softmax_scale,
        )

    @check_names
    @takes(Positioned)
    def forward(
        self,
        x: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **options: Unpack[Positioned],
    ) -> Output:
        """``x`` (batch, seqlen, hidden_size) -> out of the same shape; x continues the tokens in ``kv_cache``.

        ``position_embeddings``: (cos, sin) of the angles of x's tokens in place of rope_theta's, for example YaRN's;
        each is (batch or 1, seqlen, qk_rope_head_dim / 2). ``positions``: int (batch or 1, seqlen), those of x's tokens
        for rope_theta, such as the depths in a drafted tree.
        """
        check_input(x, self.hidden_size, self.kv_a_proj_with_mqa)
        cache = check_cache(self, options)
        packed = x if isinstance(x, NestedTensor) else None
        positions = options.pop("positions", None)
        if packed is not None:
            given = {name: options.get(name) for name in ("mask", "bias", "kv_cache", "need_weights")}
            check_alone(x, positions=positions, position_embeddings=position_embeddings, **given)
            x, positions = packed.values()[None], positions_of(packed)[None]
        else:
            check_positions(positions, self.rope_theta if position_embeddings is None else None, None, x)
            check_angles(position_embeddings, x, self.qk_rope_head_dim // 2)
        q, compressed = self._queries(x), self.kv_a_proj_with_mqa(x).unsqueeze(2)
        self._check(q, compressed, options)
        known = self.drawn({"dropout": self.dropout, "softmax_scale": self.softmax_scale, **options}, x.device)
        angles = _Angles(None if cache is None else lengths_before(cache), positions, position_embeddings)
        q_nope, q_rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        latent, k_rope = compressed.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        q_rope, k_rope = self._turn(q_rope, angles), self._turn(k_rope, angles)
        k = self.common(torch.cat([normed(self.kv_a_layernorm, latent), k_rope], -1))
        if cache is None:
            out, weights = self._expanded(q_nope, q_rope, k, known | {"packed": packed})
        elif expands(cache, x.shape[1], self.kv_lora_rank, self.qk_nope_head_dim + self.v_head_dim):
            k, known = appended_latents(cache, k, known)
            out, weights = self._expanded(q_nope, q_rope, k, known)
        else:
            out, weights = self._absorbed(q_nope, q_rope, k, known)
        out = self.project(self.o_proj, out.flatten(2))
        return output_of(out if packed is None else like(out[0], packed, 1), weights)

    def _queries(self, x: Tensor) -> Tensor:
        """The queries of all heads (B, T, H, qk_nope_head_dim + qk_rope_head_dim), not turned."""
        if self.q_lora_rank is None:
            q: Tensor = self.q_proj(self.common(x))
        else:
            q = self.q_b_proj(self.common(normed(self.q_a_layernorm, self.q_a_proj(x))))
        return torch.unflatten(q, -1, (-1, self.qk_nope_head_dim + self.qk_rope_head_dim))

    def _check(self, q: Tensor, compressed: Tensor, options: Positioned) -> None:
        """Checks masks and bias, and what is appended to a cache; key_ranges become a bare tensor there."""
        cache, mask, bias = options.get("kv_cache"), options.get("mask"), options.get("bias")
        check_pairs(mask, bias, q, compressed, cache)
        if cache is not None:
            options["key_ranges"] = plain(options.get("key_ranges"), True)
            check_append(cache, compressed, options["key_ranges"], mask, bias, self.kv_lora_rank)
            weight_of("kv_b_proj", self.kv_b_proj)

    def _expanded(
        self, q_nope: Tensor, q_rope: Tensor, k: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Attention over the keys and values of every head: out (B, T, H, v_head_dim), and weights if requested.

        The rows of ``k`` (B, S, 1, kv_lora_rank + qk_rope_head_dim) are latent vectors and turned rotary parts.
        """
        latent, k_rope = k.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        up = self.kv_b_proj(latent.squeeze(2)).unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
        k_nope, v = up.split([self.qk_nope_head_dim, self.v_head_dim], -1)
        q, k = torch.cat([q_nope, q_rope], -1), torch.cat([k_nope, k_rope.expand(*k_nope.shape[:-1], -1)], -1)
        out, weights = attend(*(t.transpose(1, 2) for t in (q, k, v)), **options)
        return out.transpose(1, 2), weights

    def _absorbed(
        self, q_nope: Tensor, q_rope: Tensor, k: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """The same over a cache of such rows, to which those of this call, ``k``, are appended first."""
        up = weight_of("kv_b_proj", self.kv_b_proj).unflatten(0, (-1, self.qk_nope_head_dim + self.v_head_dim))
        to_keys, to_values = up.split([self.qk_nope_head_dim, self.v_head_dim], 1)
        q = torch.cat([torch.einsum("bthn,hnc->bthc", q_nope, to_keys), q_rope], -1)
        out, weights = attend(*(t.transpose(1, 2) for t in (q, k, k[..., : self.kv_lora_rank])), **options)
        return torch.einsum("bhtc,hvc->bthv", out, to_values), weights

    def _turn(self, x: Tensor, angles: _Angles) -> Tensor:
        """``x`` (B, T, H or 1, qk_rope_head_dim) turned by the angles of its positions."""
        first, positions, embeddings = angles
        if embeddings is not None:
            cos, sin = embeddings
            return turn(x, cos.unsqueeze(2), sin.unsqueeze(2), self.rope_interleave)
        if self.rope_theta is None:
            return x
        return rotate(x, self.rope_theta, first, self.rope_interleave, positions=positions)
