"""The cost of each mask and each score: ``pyattn bench --only features``, beside causal attention and torch's SDPA.

Every side computes attention over the same q, k, v with its own options. torch's sides get the same mask as a tensor,
the only form that SDPA takes.
"""

from collections.abc import Callable
from typing import Any

import torch

import pyattn
from pyattn.cli.contenders import sdpa

Feature = tuple[Callable[..., Any], dict[str, Any]]
"""A function of q, k, v and its options; the options that require a gradient get one."""

WINDOW, DOCUMENT = 256, 512
HIDDEN = 0.1
"""Share of the keys that are hidden by the mask with holes."""


def sides(shape: tuple[int, ...], dtype: torch.dtype, device: str, dense: bool) -> dict[str, Feature]:
    """The sides for q, k, v of ``shape`` (B, H, T, D), the baseline first; T x T tensors only if ``dense``."""
    _, heads, seqlen, _ = shape
    documents = [DOCUMENT] * (seqlen // DOCUMENT) + [seqlen % DOCUMENT] * (seqlen % DOCUMENT > 0)
    slopes, sinks = (torch.rand(heads, device=device, requires_grad=True) for _ in range(2))
    ours: dict[str, dict[str, Any]] = {
        "causal": {},
        f"window of {WINDOW}": {"window": (WINDOW - 1, 0)},
        f"documents of {DOCUMENT}": {"key_ranges": pyattn.masks.documents(documents).to(device)},
        "softcap": {"softcap": 50.0},
        "ALiBi": {"alibi_slopes": slopes},
        "sinks": {"sinks": sinks},
    }
    torchs: dict[str, dict[str, Any]] = {"causal": {}}
    if dense:
        causal = torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).tril()
        padded = torch.arange(seqlen, device=device) < seqlen * 3 // 4
        bias, shared = (torch.randn(n, seqlen, seqlen, dtype=dtype, device=device) for n in (heads, 1))
        ours |= {
            "causal as a mask": {"causal": False, "mask": causal},
            "the same with holes": {"causal": False, "mask": causal & (torch.rand_like(bias[0]) > HIDDEN)},
            "padding as a mask": {"causal": False, "mask": padded[None, None, None]},
            "full": {"causal": False},
            "full, bias": {"causal": False, "bias": bias.requires_grad_()},
            "full, one bias for all heads": {"causal": False, "bias": shared.requires_grad_()},
        }
        torchs |= {
            f"window of {WINDOW}": {"attn_mask": causal & ~causal.tril(-WINDOW)},
            "causal as a mask": {"attn_mask": causal},
            "full, float mask": {"attn_mask": bias[None]},
        }
    return {f"pyattn {name}": (pyattn.attention, options) for name, options in ours.items()} | {
        f"torch sdpa {name}": (sdpa, options) for name, options in torchs.items()
    }
