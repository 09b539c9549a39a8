"""RotaryEmbedding of flash_attn.layers.rotary: the module that computes and caches cosines and sines."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from pyattn.adapters.flash_attn.arguments import WrongValueError
from pyattn.adapters.flash_attn.rotary import apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_
from pyattn.locks import Lock
from pyattn.options.checks import check_size, check_sizes

_lock = Lock()


class RotaryEmbedding(nn.Module):
    """Rotary embedding of the first ``dim`` columns by the angles ``i base^(-2 t / dim)``.

    With ``scale_base``, q is also scaled by ``s_t^((i - n / 2) / scale_base)`` and k divided by it, where
    ``s_t = (2 t + 0.4 dim) / (1.4 dim)`` and n is the number of positions.

    Args:
        dim: columns that rotate, even.
        base: base of the frequencies.
        interleaved: whether column 2t rotates with 2t + 1, rather than t with t + dim / 2.
        scale_base: xPos's scale base; None: no scaling.
        device: device of inv_freq.
        pos_idx_in_fp32: an argument of flash-attn up to 2.7; positions are always float32, its default.

    Sources: Su et al. 2021, "RoFormer"; Sun et al. 2022, "A Length-Extrapolatable Transformer" (xPos).

    >>> qkv = torch.randn(2, 10, 3, 4, 64)
    >>> RotaryEmbedding(32)(qkv).shape
    torch.Size([2, 10, 3, 4, 64])
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
        *,
        pos_idx_in_fp32: bool = True,
    ) -> None:
        super().__init__()
        if not pos_idx_in_fp32:
            raise NotImplementedError(f"pyattn: pos_idx_in_fp32 must be True, got {pos_idx_in_fp32}")
        check_sizes(dim=dim)
        if dim % 2:
            raise WrongValueError(f"pyattn: dim must be even, got {dim}")
        self.dim = dim
        self.base: float = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        columns = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        scale = None if scale_base is None else (columns + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        # Models that subclass this class read these.
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> Tensor:
        columns = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return 1.0 / self.base ** (columns / self.dim)

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Computes cosines and sines for ``seqlen`` positions, unless the cache holds them."""
        cos = self._cos_cached
        stale = cos is None or cos.device != device or cos.dtype != dtype or (self.training and cos.is_inference())
        if not stale and seqlen <= self._seq_len_cached:
            return
        self._seq_len_cached = seqlen
        # A model converted to 16 bits has rounded inv_freq, which would shift distant positions by whole turns.
        exact = self.inv_freq.dtype == torch.float32
        inv_freq = self.inv_freq if exact else self._compute_inv_freq(device)
        position = torch.arange(seqlen, device=device, dtype=torch.float32)
        angle = torch.outer(position, inv_freq.to(position.device))
        cos, sin = angle.cos(), angle.sin()
        if self.scale is None or self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
        else:
            power = (position - seqlen // 2) / self.scale_base
            scale = self.scale.to(position.device, torch.float32) ** power[:, None]
            self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
            self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates q and k in place.

        Args:
            qkv: (B, S, 3, H, D), or (B, S, num_heads_q + 2 num_heads_k, D),
                which needs ``num_heads_q``; with kv, q (B, S, H, D).
            kv: (B, S, 2, H, D).
            seqlen_offset: an int or (B,), the position of the first token.
            max_seqlen: number of positions to cache; needed once if seqlen_offset is a tensor.
            num_heads_q: see qkv.

        Raises:
            ValueError: more positions than any memory holds, and as for :func:`apply_rotary_emb_qkv_`.

        Returns:
            qkv, or (q, kv).
        """
        if not isinstance(seqlen_offset, Tensor):
            check_size("seqlen_offset", seqlen_offset)
        if max_seqlen is None and isinstance(seqlen_offset, int):
            max_seqlen = qkv.shape[1] + seqlen_offset
        # If two threads share the module, one may replace the tables while the other reads them.
        with nullcontext() if torch.compiler.is_compiling() else _lock:
            if max_seqlen is not None:
                check_sizes(max_seqlen=max_seqlen, rotary_dim=self.dim)
                self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
            cos, sin, of_k = self._cos_cached, self._sin_cached, (self._cos_k_cached, self._sin_k_cached)
        if cos is None or sin is None:
            raise ValueError("pyattn: max_seqlen must be given where seqlen_offset is a tensor, got None")
        scaled = self.scale is not None
        cos_k, sin_k = of_k if scaled else (cos, sin)
        assert cos_k is not None and sin_k is not None  # noqa: PT018
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, inplace=True, seqlen_offsets=seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
