"""The contenders of ``pyattn bench``: attention functions, and from-scratch multi-head modules as people write them.

Every function takes q, k, v of shape (B, H, T, D), and every module maps (B, T,
width) to the same shape; all are causal.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import pyattn
from pyattn import nn as native
from pyattn import reference
from pyattn.adapters import sdpa as switch

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


FUSED = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""The fused kernels that torch's SDPA chooses from on a GPU."""


def _ours(choose: Callable[[Any], None], setting: object) -> Attention:
    """Our attention after ``choose(setting)``; the setting stays, because a later backward also reads it."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        choose(setting)
        return pyattn.attention(q, k, v)

    return attend


@contextmanager
def settings_kept() -> Iterator[None]:
    """Restores the settings that our contenders change: instruction set, determinism of gradients, SDPA's switch."""
    isa, switched = pyattn.isa(), switch.is_enabled()
    try:
        yield
    finally:
        pyattn.set_isa(isa)
        pyattn.set_deterministic(True)
        (switch.enable if switched else switch.disable)()


def sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """torch's SDPA, causal unless a mask is given."""
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=attn_mask is None)


def _sdpa_by(backend: SDPBackend) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v)

    return attend


def _reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return cast(Tensor, reference.attention(q, k, v))


def _flex() -> Attention:
    """FlexAttention, compiled as its documentation recommends; it has no backward on CPUs."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled: Any = torch.compile(flex_attention)
    masks: dict[int, Any] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seqlen = q.shape[2]
        if seqlen not in masks:
            masks[seqlen] = create_block_mask(lambda b, h, i, j: j <= i, None, None, seqlen, seqlen, device=q.device)
        return cast(Tensor, compiled(q, k, v, block_mask=masks[seqlen]))

    return attend


def functions(device: str, flex: bool) -> dict[str, Attention]:
    """The functions by name: ours first (on a CPU, one per instruction set, best first), then torch's."""
    theirs: dict[str, Attention] = {"torch sdpa": sdpa}
    if device == "cuda":
        ours = {f"pyattn{name}": _ours(pyattn.set_deterministic, not name) for name in ("", " nondeterministic")}
        theirs |= {f"torch sdpa {name}": _sdpa_by(backend) for name, backend in FUSED.items()}
    else:
        ours = {f"pyattn {isa}": _ours(pyattn.set_isa, isa) for isa in pyattn.isas()}
    return ours | theirs | {"plain torch": _reference} | ({"torch flex": _flex()} if flex else {})


class Projected(nn.Module):
    """One matrix projects to q, k and v; then ``attention`` and the output projection."""

    def __init__(self, width: int, heads: int, attention: Attention) -> None:
        super().__init__()
        self.heads = heads
        self.attention = attention
        self.qkv: nn.Linear = nn.Linear(width, 3 * width, bias=False)
        self.out_proj: nn.Linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``x`` (B, T, width) to the same shape."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return cast(Tensor, self.out_proj(self.attention(q, k, v).transpose(1, 2).flatten(2)))


def _matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights: Tensor = scores.masked_fill(future, -torch.inf).softmax(-1)
    return weights @ v


def _sdpa_with_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril())


class Torchs(nn.Module):
    """``nn.MultiheadAttention`` with a causal mask, with or without its weights."""

    def __init__(self, width: int, heads: int, need_weights: bool) -> None:
        super().__init__()
        self.inner: nn.MultiheadAttention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``x`` (B, T, width) to the same shape."""
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        out = self.inner(x, x, x, attn_mask=mask, need_weights=self.need_weights, is_causal=not self.need_weights)[0]
        return cast(Tensor, out)


def modules(width: int, heads: int, context: int, flex: bool) -> dict[str, nn.Module]:
    """The modules by name: ours, then the common ways to write one (FlexAttention only with ``flex``)."""
    wrapped = (width, width // heads, context, 0.0, heads)
    split = (width, width, context, 0.0, heads)
    return {
        "pyattn MultiHeadAttention": native.MultiHeadAttention(*split),
        "pyattn MultiHeadAttentionWrapper": native.MultiHeadAttentionWrapper(*wrapped),
        "a module for each head": reference.MultiHeadAttentionWrapper(*wrapped),
        "weights split by views": reference.MultiHeadAttention(*split),
        "one matrix for q, k, v": Projected(width, heads, _matmul),
        "torch sdpa": Projected(width, heads, sdpa),
        "torch sdpa with a mask": Projected(width, heads, _sdpa_with_mask),
        "nn.MultiheadAttention": Torchs(width, heads, True),
        "nn.MultiheadAttention without weights": Torchs(width, heads, False),
    } | ({"torch flex": Projected(width, heads, _flex())} if flex else {})
