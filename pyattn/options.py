"""The operators' arguments after their tensors, as one value from the public functions down to the schema."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyattn.arguments import (
    check_64_bits,
    check_finite,
    check_probability,
    check_scale,
    check_tensor,
    check_type,
    check_window,
    int64_of,
)
from pyattn.autocast import cast, cast_rows
from pyattn.dropout import draw_seed

UNBOUNDED = (-1, -1)
"""The window of all keys."""


class Options(NamedTuple):
    """``attention_forward(q, k, v, *options)``: the fields stand in the schema's order.

    Attributes:
        softmax_scale: factor on the scores; None: 1 / sqrt(head_dim).
        causal: whether query i sees the keys up to i + q_offset only.
        q_offset: key position of query 0; None: the last query stands at the last key.
        q_offsets: int64 (B,), one for each sequence, in place of q_offset.
        window: how many keys before and behind its own position a query sees; -1: all.
        key_ranges: int32 or int64 (B or 1, Sq, 2), the keys [begin, end) of each query.
        mask: up to 4 dimensions, each 1 or full; bool, True = takes part.
        softcap: bound on the scaled scores; 0: none.
        bias: up to 4 dimensions, each 1 or full; float, added to the scores.
        alibi_slopes: (Hq,) or (B, Hq).
        sinks: (Hq,), the score of one more key without a value.
        dropout_p: probability of dropping a weight.
        dropout_seed: int64 scalar; may be None where dropout_p is 0.
    """

    softmax_scale: float | None = None
    causal: bool = True
    q_offset: int | None = None
    q_offsets: Tensor | None = None
    window: tuple[int, int] = UNBOUNDED
    key_ranges: Tensor | None = None
    mask: Tensor | None = None
    softcap: float = 0.0
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None

    def scale_for(self, head_dim: int) -> float:
        """softmax_scale, or its default for so many columns, as csrc/defaults.h has it."""
        if self.softmax_scale is None:
            return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
        return self.softmax_scale

    @property
    def bounded_softcap(self) -> float:
        """The softcap between 2^-100 and 2^100, as kernels have it: in float32 it and its inverse are finite there."""
        return min(max(self.softcap, 2.0**-100), 2.0**100)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The options that are tensors: what autograd saves apart."""
        positions = self.q_offsets, self.key_ranges, self.mask
        return *positions, self.bias, self.alibi_slopes, self.sinks, self.dropout_seed

    def with_tensors(
        self,
        q_offsets: Tensor | None = None,
        key_ranges: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        dropout_seed: Tensor | None = None,
    ) -> "Options":
        """The same options with these in place of :attr:`tensors`. ``_replace`` takes 1 us."""
        if (
            q_offsets is self.q_offsets
            and key_ranges is self.key_ranges
            and mask is self.mask
            and bias is self.bias
            and alibi_slopes is self.alibi_slopes
            and sinks is self.sinks
            and dropout_seed is self.dropout_seed
        ):
            return self
        scale, causal, q_offset, _, window, _, _, softcap, _, _, _, dropout_p, _ = self
        seen = scale, causal, q_offset, q_offsets, window, key_ranges, mask
        return Options(*seen, softcap, bias, alibi_slopes, sinks, dropout_p, dropout_seed)


class Packing(NamedTuple):
    """What tells packed sequences apart: ``attention_varlen_forward(q, k, v, *packing, *options)``.

    Attributes:
        cu_seqlens_q: int32 or int64 (B + 1,), where each sequence's queries begin, and where the last one's end.
        cu_seqlens_k: the same for the keys.
        max_seqlen_q: no sequence has more queries.
        max_seqlen_k: nor more keys.
        seqused_k: int32 or int64 (B,), how many keys of each sequence take part; None: all.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: Tensor | None = None


def check_options(
    causal: object,
    q_offset: object,
    window: object,
    key_ranges: object,
    softmax_scale: object,
    softcap: object,
    bias: object,
    alibi_slopes: object,
    sinks: object,
    dropout_p: object,
    dropout_seed: object,
) -> None:
    """TypeError or ValueError for what no operator could be asked; shapes and dtypes are the operator's to check."""
    check_type("causal", causal, bool)
    if dropout_p is not None:
        check_probability("dropout_p", dropout_p)
    if q_offset is not None:
        check_type("q_offset", q_offset, int, torch.SymInt, Tensor, type(None))
        check_64_bits("q_offset", q_offset)
    if window is not UNBOUNDED and window is not None:
        check_window(window)
    if softmax_scale is not None:
        check_scale("softmax_scale", softmax_scale)
    if softcap is not None and (softcap != 0.0 or type(softcap) is not float):
        check_finite("softcap", softcap)
    if dropout_seed is not None:
        check_type("dropout_seed", dropout_seed, int, torch.SymInt, Tensor, type(None))
        check_64_bits("dropout_seed", dropout_seed)
    if not key_ranges is bias is alibi_slopes is sinks is None:
        tensors = {"key_ranges": key_ranges, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
        for name, tensor in tensors.items():
            if tensor is not None:
                check_tensor(name, tensor)


def options_of(
    device: torch.device,
    causal: bool,
    q_offset: int | Tensor | None,
    window: tuple[int, int] | None,
    key_ranges: Tensor | None,
    softmax_scale: float | None,
    softcap: float | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    dropout_p: float | None,
    dropout_seed: int | Tensor | None,
) -> tuple[Any, ...]:
    """A public function's arguments as options: offsets apart, what autocast casts, a seed drawn if none is given.

    None stands for each default, as the configurations of models have it.

    Returns:
        :class:`Options`, or the first of their values if the rest are defaults.
    """
    q_offset, q_offsets = (None, int64_of(q_offset)) if isinstance(q_offset, Tensor) else (q_offset, None)
    window = UNBOUNDED if window is None else window
    softmax_scale = _float(softmax_scale)
    softcap = 0.0 if softcap is None else _float(softcap)
    dropout_p = 0.0 if dropout_p is None else _float(dropout_p)
    if torch._C._is_any_autocast_enabled():
        bias = None if bias is None else cast(bias)
        alibi_slopes = None if alibi_slopes is None else cast_rows(alibi_slopes)
        sinks = None if sinks is None else cast_rows(sinks)
    if dropout_p == 0:
        dropout_seed = None
    elif dropout_seed is None:
        dropout_seed = draw_seed(device)
    elif not isinstance(dropout_seed, Tensor):
        dropout_seed = torch.tensor(dropout_seed, dtype=torch.int64, device=device)
    if window is UNBOUNDED and key_ranges is bias is alibi_slopes is sinks is None and not (softcap or dropout_p):
        return softmax_scale, causal, q_offset, q_offsets
    seen = causal, q_offset, q_offsets, window, key_ranges, None
    return Options(softmax_scale, *seen, softcap, bias, alibi_slopes, sinks, dropout_p, dropout_seed)


def _float(value: Any) -> Any:
    """An int as a float: torch's operations take no int past 64 bits."""
    return float(value) if isinstance(value, int) else value
