"""The cost of each mask and each score: ``pyattn bench --only features``, beside causal attention and torch's SDPA.

Every side computes attention over the same q, k, v with its own options. torch's sides get the same mask as a tensor,
the only form that SDPA takes.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import pyattn
from pyattn.cli.bench.sides.calls import LARGEST_SCORES, Calls, Run, Side, Sizes, both
from pyattn.cli.bench.sides.contenders import sdpa

BASE = "pyattn causal"
WINDOW, DOCUMENT = 256, 512
HIDDEN = 0.1
"""Share of the keys that are hidden by the mask with holes."""


def sides(qkv: Sequence[Tensor], dout: Tensor, dense: bool) -> dict[str, Side]:
    """The sides for q, k, v and dout, each (B, H, T, D); T x T tensors only if ``dense``."""
    (_, heads, seqlen, _), device = dout.shape, dout.device
    documents = [DOCUMENT] * (seqlen // DOCUMENT) + [seqlen % DOCUMENT] * (seqlen % DOCUMENT > 0)
    slopes, sinks = (torch.rand(heads, device=device, requires_grad=True) for _ in range(2))
    relative = torch.randn(heads, 2 * seqlen + 1, device=device, requires_grad=True)
    ours: dict[str, dict[str, Any]] = {
        "causal": {},
        f"window of {WINDOW}": {"window": (WINDOW - 1, 0)},
        f"documents of {DOCUMENT}": {"key_ranges": pyattn.masks.documents(documents).to(device)},
        "softcap": {"softcap": 50.0},
        "ALiBi": {"alibi_slopes": slopes},
        "relative bias": {"relative_bias": relative},
        "sinks": {"sinks": sinks},
    }
    torchs: dict[str, dict[str, Any]] = {"causal": {}}
    if dense:
        causal = torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).tril()
        padded = torch.arange(seqlen, device=device) < seqlen * 3 // 4
        bias, shared = (torch.randn(n, seqlen, seqlen, dtype=dout.dtype, device=device) for n in (heads, 1))
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
    return {f"pyattn {name}": Side(pyattn.attention, qkv, dout, options) for name, options in ours.items()} | {
        f"torch sdpa {name}": Side(sdpa, qkv, dout, options) for name, options in torchs.items()
    }


def calls(run: Run, shape: Sizes) -> Calls:
    """The masks and scores on q, k, v of ``shape`` (B, H, T, D), over our own causal attention."""
    *qkv, dout = (run.random(*shape) for _ in range(4))
    dense = math.prod(shape[1:3]) * shape[2] * dout.itemsize <= LARGEST_SCORES
    return both(sides(qkv, dout.detach(), dense))
