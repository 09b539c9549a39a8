"""torch's ``scaled_dot_product_attention`` of jagged nested tensors by the native kernels, under the switch."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyattn import attention
from pyattn.adapters.sdpa.call_counts import TAKEN, count
from pyattn.adapters.sdpa.refusals import rule_of, unsuitable


def taking_jagged(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch's ``function`` for jagged tensors, with native attention of those on the CPU whose positions are jagged.

    torch calls it in place of the operator. Calls that are left to it are counted by reason, unless it calls the
    operator: for jagged tensors with dense positions (B, j, S, D), whose values are an ordinary batch.
    """

    @functools.wraps(function)
    def attending(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        given = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        if query.device.type != "cpu" or getattr(query, "_ragged_idx", None) == 1:
            return function(*given)
        out = None
        try:
            reason = unsuitable(query, key)
            if attn_mask is not None:
                reason = "nested tensors with attn_mask"
            elif not enable_gqa and query.shape[1] != key.shape[1]:
                reason = "nested tensors whose numbers of heads differ, without enable_gqa"
            if reason is None:
                q_offset = 0 if is_causal else None
                out = attention(
                    query, key, value, causal=is_causal, q_offset=q_offset, softmax_scale=scale, dropout_p=dropout_p
                )
        except (TypeError, ValueError, NotImplementedError) as refused:
            reason = rule_of(refused)
        if not torch.compiler.is_compiling():
            count(TAKEN if reason is None else reason)
        return function(*given) if out is None else out

    return attending
