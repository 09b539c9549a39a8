"""Multi-head latent attention in plain PyTorch: the specification of :class:`pyattn.nn.MultiHeadLatentAttention`."""

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pyattn.reference.heads import Masks, attend, future, merge, rms_norm, split


class MultiHeadLatentAttention(nn.Module):
    """Attention whose keys and values are linear in one latent vector c_j per token (DeepSeek-AI 2024).

    For token i with input x_i, position p_i and head h, with ``turn`` the rotary embedding of a position::

        [q_nope_hi | q_rope_hi] = q_b_proj(q_a_layernorm(q_a_proj(x_i)))     or q_proj(x_i) if q_lora_rank is None
        [c'_i | r_i]            = kv_a_proj_with_mqa(x_i)
        c_i                     = kv_a_layernorm(c'_i)
        [k_nope_hi | v_hi]      = kv_b_proj(c_i)
        s_hij                   = softmax_scale (<q_nope_hi, k_nope_hj> + <turn(q_rope_hi, p_i), turn(r_j, p_j)>)
        out_i                   = o_proj(concat_h sum_(j <= i) softmax_j(s_hij) v_hj)

    The rotary part r_j of a key is the same for all heads. A layernorm is ``x / sqrt(mean(x^2) + 1e-6) * weight``.
    A rotation turns the pairs of columns (2t, 2t + 1), or (t, t + qk_rope_head_dim / 2) if not ``rope_interleave``, by
    the angle ``p_i rope_theta^(-2t / qk_rope_head_dim)``; there is none if rope_theta is None. The default
    softmax_scale is ``1 / sqrt(qk_nope_head_dim + qk_rope_head_dim)``.

    Shapes: x and out (B, T, hidden_size), q_nope (B, H, T, qk_nope_head_dim), q_rope (B, H, T, qk_rope_head_dim),
    c (B, T, kv_lora_rank), r (B, T, qk_rope_head_dim), v (B, H, T, v_head_dim).

    Sources: DeepSeek-V2 (arXiv 2405.04434), equations 37 to 47; DeepSeek-V3 (arXiv 2412.19437), equations 1 to 11.
    """

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
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_lora_rank = q_lora_rank
        self.parts: list[int] = [qk_nope_head_dim, qk_rope_head_dim]
        self.rope_theta = rope_theta
        self.rope_interleave = rope_interleave
        self.softmax_scale: float = sum(self.parts) ** -0.5 if softmax_scale is None else softmax_scale
        width = num_heads * sum(self.parts)
        if q_lora_rank is None:
            self.q_proj: nn.Linear = nn.Linear(hidden_size, width, bias=False)
        else:
            self.q_a_proj: nn.Linear = nn.Linear(hidden_size, q_lora_rank, bias=attention_bias)
            self.q_a_layernorm: nn.RMSNorm = nn.RMSNorm(q_lora_rank, eps=1e-6)
            self.q_b_proj: nn.Linear = nn.Linear(q_lora_rank, width, bias=False)
        self.kv_a_proj_with_mqa: nn.Linear = nn.Linear(
            hidden_size, kv_lora_rank + qk_rope_head_dim, bias=attention_bias
        )
        self.kv_a_layernorm: nn.RMSNorm = nn.RMSNorm(kv_lora_rank, eps=1e-6)
        self.kv_b_proj: nn.Linear = nn.Linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.o_proj: nn.Linear = nn.Linear(num_heads * v_head_dim, hidden_size, bias=attention_bias)
        self.dropout: nn.Dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, **masks: Unpack[Masks]) -> Tensor:
        """``x`` (B, T, hidden_size) -> out of the same shape; masks as for :func:`pyattn.reference.heads.attend`."""
        rank, seqlen = self.kv_a_layernorm.weight.shape[0], x.shape[1]
        q = (
            self.q_proj(x)
            if self.q_lora_rank is None
            else self.q_b_proj(rms_norm(self.q_a_layernorm, self.q_a_proj(x)))
        )
        q_nope, q_rope = split(q, self.num_heads).split(self.parts, -1)
        latent, shared = self.kv_a_proj_with_mqa(x).split([rank, self.parts[1]], -1)
        up = split(self.kv_b_proj(rms_norm(self.kv_a_layernorm, latent)), self.num_heads)
        k_nope, v = up[..., : self.parts[0]], up[..., self.parts[0] :]
        k_rope = self._turn(shared[:, None]).expand(-1, self.num_heads, -1, -1)
        q, k = torch.cat([q_nope, self._turn(q_rope)], -1), torch.cat([k_nope, k_rope], -1)
        masked = future(seqlen).bool().to(x.device)
        options = {"masked": masked, "dropout": self.dropout, "softmax_scale": self.softmax_scale}
        out: Tensor = self.o_proj(merge(attend(q, k, v, **options, **masks)[0]))  # type: ignore[arg-type]
        return out

    def _turn(self, x: Tensor) -> Tensor:
        """The rotary embedding of ``x`` (B, heads, T, qk_rope_head_dim) at positions 0 to T - 1."""
        if self.rope_theta is None:
            return x
        half = x.shape[-1] // 2
        wide = torch.promote_types(x.dtype, torch.float32)
        frequency = self.rope_theta ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
        angle = torch.outer(torch.arange(x.shape[2], dtype=torch.float64, device=x.device), frequency).to(wide)
        pairs = x.to(wide).unflatten(-1, (half, 2) if self.rope_interleave else (2, half))
        columns = -1 if self.rope_interleave else -2
        left, right = pairs.unbind(columns)
        turned = left * angle.cos() - right * angle.sin(), left * angle.sin() + right * angle.cos()
        return torch.stack(turned, columns).flatten(-2).to(x.dtype)
