"""T5's position biases as tables of distances, computed without a tensor of queries x keys.

The attention classes of T5 and its relatives compute a bias (1, H, Sq, Sk) and give it to the attention function;
layers without one make zeros of that shape. With ``attn_implementation="pyattn"`` they make a :class:`PositionBias`
instead, which the attention function recognises by its type.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from pyattn import AttentionOptions

CLASSES = {
    "longt5": "LongT5Attention",
    "mt5": "MT5Attention",
    "pix2struct": "Pix2StructTextAttention",
    "pop2piano": "Pop2PianoAttention",
    "switch_transformers": "SwitchTransformersAttention",
    "t5": "T5Attention",
    "udop": "UdopAttention",
    "umt5": "UMT5Attention",
}
"""The classes with T5's ``compute_bias``, by the names of their models' folders."""

_installed = set[type]()
"""The classes whose functions are replaced."""


@dataclass(frozen=True, eq=False)
class PositionBias:
    """A position bias for the attention function.

    It passes through layers as a bias (1, H, Sq, Sk) does.

    Args:
        table: (H, 2 R + 1), the option ``relative_bias``; None: no bias.
        q_offset: position of the first query.
    """

    table: Tensor | None = None
    q_offset: int | Tensor = 0


def install(implementation: str) -> None:
    """Lets the classes make a :class:`PositionBias` where the model's implementation of attention has this name."""
    for folder, name in CLASSES.items():
        try:
            kind = getattr(import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
        except (ImportError, AttributeError):  # not in this version of transformers
            continue
        known = "past_seen_tokens" in inspect.signature(kind.compute_bias).parameters  # older ones take positions
        if known and kind not in _installed:
            _installed.add(kind)
            kind.compute_bias = _computing_tables(kind.compute_bias, implementation)
            kind.forward = _without_zeros(kind.forward, implementation)


def _computing_tables(compute_bias: Callable[..., Tensor], implementation: str) -> Callable[..., Any]:
    @functools.wraps(compute_bias)
    def compute(
        layer: Any,
        query_length: int,
        key_length: int,
        device: torch.device | None = None,
        past_seen_tokens: int | Tensor = 0,
    ) -> Tensor | PositionBias:
        if not _takes_tables(layer, implementation):
            return compute_bias(layer, query_length, key_length, device, past_seen_tokens)
        if not hasattr(layer, "relative_attention_bias"):
            return PositionBias()
        reach = layer.relative_attention_max_distance  # all distances beyond it share the last bucket
        row = compute_bias(layer, 1, 2 * reach + 1, device, reach)  # one query with all distances
        return PositionBias(row[0, :, 0], past_seen_tokens)

    return compute


def _without_zeros(forward: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(layer: Any, *arguments: Any, **named: Any) -> Any:
        if layer.has_relative_attention_bias or not _takes_tables(layer, implementation):
            return forward(layer, *arguments, **named)
        layer.has_relative_attention_bias = True  # so it calls compute_bias, which gives no bias
        try:
            return forward(layer, *arguments, **named)
        finally:
            layer.has_relative_attention_bias = False

    return run


def _takes_tables(layer: Any, implementation: str) -> bool:
    """Whether a layer may make a PositionBias: checkpoints that are re-entrant lose gradients of what is no tensor."""
    if layer.config._attn_implementation != implementation:
        return False
    if not (getattr(layer, "gradient_checkpointing", False) and layer.training):
        return True
    options = getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {})
    return options.get("use_reentrant") is False


def relative_options(bias: PositionBias, query: Tensor, causal: bool) -> AttentionOptions:
    """The options of :func:`pyattn.attention` for a bias; causal attention without a mask begins at position 0."""
    if bias.table is None:
        return {}
    table = bias.table if bias.table.dtype == torch.float32 else bias.table.to(query.dtype)
    if causal:
        return {"relative_bias": table}
    offset = bias.q_offset
    if isinstance(offset, Tensor):
        offset = offset.to(torch.int64).expand(query.shape[0])
    return {"relative_bias": table, "q_offset": offset}
