"""The operators' arguments after q, k and v, from their schemas: names, order, defaults, and tuples of values."""

import collections
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyattn import ops


def _defaults() -> dict[str, Any]:
    """The defaults of the operators' options, all arguments after q, k and v, in the schema's order."""
    arguments = ops.attention_forward._schema.arguments[3:]
    lists = {a.name: a.default_value for a in arguments}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in lists.items()}


DEFAULTS = _defaults()
UNBOUNDED: tuple[int, int] = DEFAULTS["window"]
"""The window that hides no key."""

PLACES = {name: place for place, name in enumerate(DEFAULTS)}

LEARNED = ("bias", "alibi_slopes", "sinks", "relative_bias")
"""Options that have gradients, adjacent in the schema."""

_record = collections.namedtuple
"""Under this name, mypy lets the fields be computed."""


class Options(_record("Options", [*DEFAULTS], defaults=DEFAULTS.values())):  # type: ignore[misc]
    """The operators' options as one value: ``attention_forward(q, k, v, *options)``.

    The fields are those of :class:`pyattn.AttentionOptions`, and two more.

    Attributes:
        q_offsets: int64 (B,), which replaces q_offset where each sequence has its own.
        dropout_origins: int64 (B, 5) or (1, 5), (sequence, num_heads_q, head, query, key): where the weights lie in a
            larger call, of num_heads_q heads, whose draws they repeat. Key ``j``, query ``i`` and head ``h`` of
            sequence ``b`` are there ``key + j``, ``query + i`` and ``head + h`` of ``sequence``; with one row for all,
            of ``sequence + b``. No number is negative, ``key + j`` is below 2^35 and ``query + i`` below 2^32. None:
            the call is the whole.
    """

    __slots__ = ()
    _replace: "Callable[..., Options]"  # mypy knows no method of a computed record

    def scale_for(self, head_dim: int) -> float:
        """softmax_scale, or its default for ``head_dim`` columns, the same as in csrc."""
        if self.softmax_scale is None:
            return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
        scale: float = self.softmax_scale
        return scale

    def offset_for(self, seqlen_q: int, seqlen_k: int) -> int:
        """The key position of query 0 where all sequences share it: q_offset, or csrc's default."""
        return seqlen_k - seqlen_q if self.q_offset is None else self.q_offset

    def origins_for(self, batch: int, num_heads_q: int, device: torch.device) -> Tensor:
        """dropout_origins (B, 5), with csrc's default."""
        sequence = torch.arange(batch, device=device)
        if self.dropout_origins is None:
            zero = torch.zeros_like(sequence)
            return torch.stack([sequence, zero + num_heads_q, zero, zero, zero], -1)
        origins: Tensor = self.dropout_origins
        if len(origins) > 1:
            return origins
        return torch.cat([origins[:, :1] + sequence[:, None], origins[:, 1:].expand(batch, 4)], -1)

    @property
    def bounded_softcap(self) -> float:
        """The softcap clamped to [2^-100, 2^100], as in kernels: it and its inverse are then finite in float32."""
        return float(min(max(self.softcap, 2.0**-100), 2.0**100))


class Packing(NamedTuple):
    """The boundaries of packed sequences: ``attention_varlen_forward(q, k, v, *packing, *options)``.

    Attributes:
        cu_seqlens_q: int32 or int64 (B + 1,), where each sequence's queries begin, and where the last one's end.
        cu_seqlens_k: the same for the keys.
        max_seqlen_q: no sequence has more queries.
        max_seqlen_k: no sequence has more keys.
        seqused_k: int32 or int64 (B,), how many of its keys each sequence uses; None: all.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: Tensor | None = None
