"""The call that is profiled, at one shape and with the options of the command line."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from pyattn import attention, masks
from pyattn.cli.options import DTYPES
from pyattn.nn.rotary import alibi_slopes

SMALL = 16
"""Tokens of a call whose kernels have little to do."""


def features(shape: Sequence[int], options: argparse.Namespace, **tensor: Any) -> dict[str, Any]:
    """The masks and scores asked for, as :func:`pyattn.attention` takes them; ``tensor`` goes to constructors."""
    _, heads, length, _ = shape
    queries = options.queries or length
    found: dict[str, Any] = {"causal": not options.full, "window": tuple(options.window), "softcap": options.softcap}
    if options.documents:
        found["key_ranges"] = masks.chunked(length, options.documents)[:, -queries:].to(options.device)
    if options.selected:
        entries, block = (1, 1, queries, options.selected), options.selected_block
        found["selected"] = torch.randint(-(-length // block), entries, dtype=torch.int32)
        found["selected_block"] = block
    if options.mask:
        found["mask"] = torch.rand(1, 1, queries, length, device=options.device) > 0.25
    if options.bias:
        found["bias"] = torch.randn(1, 1, queries, length, **tensor)
    if options.alibi:
        found["alibi_slopes"] = alibi_slopes(heads, device=options.device).requires_grad_(tensor["requires_grad"])
    if options.sinks:
        found["sinks"] = torch.zeros(heads, **tensor)
    return found


class Subject:
    """Attention with the options' masks and scores at ``shape`` (B, H, T, D), and backward unless they leave it out.

    Attributes:
        backward: whether :meth:`call` includes it.
        tensors: q, k, v, and out and dout, which are as large as each other.
        extras: the masks and scores.
    """

    backward: bool
    tensors: dict[str, torch.Tensor]
    extras: dict[str, Any]

    def __init__(self, shape: Sequence[int], options: argparse.Namespace) -> None:
        batch, heads, length, head_dim = shape
        self.backward = not (options.forward or options.queries)
        tensor = {"dtype": DTYPES[options.dtype], "device": options.device, "requires_grad": self.backward}
        q = torch.randn(batch, heads, options.queries or length, head_dim, **tensor)
        k, v = (torch.randn(batch, options.num_heads_kv or heads, length, head_dim, **tensor) for _ in range(2))
        self.extras = features(shape, options, **tensor)
        self.tensors = {"q": q, "k": k, "v": v, "out": q, "dout": torch.randn_like(q)}
        self._leaves = [t for t in (q, k, v, *self.extras.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
        self._dropout: float = options.dropout

    def _attend(self) -> torch.Tensor:
        q, k, v = (self.tensors[name] for name in "qkv")
        out: torch.Tensor = attention(q, k, v, dropout_p=self._dropout, **self.extras)
        return out

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        """The output, without a gradient."""
        return self._attend()

    def call(self) -> None:
        """Forward, and backward unless it is left out."""
        if self.backward:
            torch.autograd.grad(self._attend(), self._leaves, self.tensors["dout"])
        else:
            self.forward()

    def calls(self) -> dict[str, Any]:
        """Forward alone, and with backward unless it is left out, by name."""
        return {"forward": self.forward} | ({"forward and backward": self.call} if self.backward else {})


def small(shape: Sequence[int], options: argparse.Namespace) -> tuple[tuple[int, ...], Subject]:
    """A shape of one sequence of SMALL tokens at most, and the same options there."""
    _, heads, length, head_dim = shape
    queries = min(options.queries, SMALL) if options.queries else None
    least = 1, heads, min(length, SMALL), head_dim
    return least, Subject(least, argparse.Namespace(**vars(options) | {"queries": queries}))
