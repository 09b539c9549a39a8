"""Attention in ONNX: how ``torch.onnx.export`` decomposes the operators.

torch's exporter translates ``scaled_dot_product_attention`` into ONNX's ``Attention`` from opset 23 on, and into
elementary operators before. It is used for everything that all runtimes agree on: masks as ``attn_mask``, bool or added
to the scores, a sink as an extra key of zeros, and 0 filled in afterwards for queries that see no key. Everything else
is exported as the formula: a softcap, which opset 23 first applied after the mask and now applies before it; lse; and
additions to the scores of 16-bit tensors, in float32.

A masked key that holds NaN or infinity does reach the result here, because ONNX multiplies it by its weight of 0.
"""

import math
from collections.abc import Callable
from functools import cmp_to_key, partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyattn import ops
from pyattn.ops import visible_pairs
from pyattn.options.schema import DEFAULTS, UNBOUNDED, Options

EXPORTED = frozenset(
    [
        "softmax_scale",
        "causal",
        "q_offset",
        "q_offsets",
        "window",
        "key_ranges",
        "mask",
        "softcap",
        "bias",
        "alibi_slopes",
        "sinks",
        "relative_bias",
    ]
)
"""The options that a graph computes; any other is refused."""


def _is_known(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes is known to hold for all sizes that the graph allows."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy: a third of a second

    return statically_known_true(condition)


def _sees_a_key(options: Options, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether every query is known to see a key: all of them, the first, or the one at its own position."""
    if not options.q_offsets is options.key_ranges is options.mask is options.bias is None:
        return False
    offset, (left, right) = options.offset_for(seqlen_q, seqlen_k), options.window
    if left < 0 and right < 0 and not options.causal:
        return True
    return _is_known(offset >= 0) and (left < 0 or _is_known(offset + seqlen_q <= seqlen_k))


class _Pairs:
    """The masks and score additions of all pairs of query and key; with sinks, an extra last key represents them.

    Attributes:
        k, v: with sinks, followed by a row of zeros.
        seen: bool (B or 1, Hq or 1, Sq, Sk), the visible pairs.
        added: terms added to the scores, broadcasting to (B, Hq, Sq, Sk); None: none.
        empty: bool (B or 1, Hq or 1, Sq, 1), the queries that see no key; None: there are none.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: Options, dtype: torch.dtype) -> None:
        seqlen_q, seqlen_k = q.shape[2], k.shape[2]
        rows = torch.arange(seqlen_q, device=q.device)
        self.k, self.v, self.seen = k, v, visible_pairs.in_intervals(options, rows, seqlen_q, seqlen_k)
        self.added: Tensor | None = None
        bias, slopes = options.bias, options.alibi_slopes
        if options.mask is not None:
            self.seen = self.seen & options.mask
        if bias is not None:
            self.seen, self.added = self.seen & (bias != -math.inf), bias.to(dtype)
        if options.relative_bias is not None:
            places = visible_pairs.places(options, rows, seqlen_q, seqlen_k, options.relative_bias.shape[-1] // 2)
            relative = visible_pairs.at_places(options.relative_bias.to(dtype), places)
            self.added = relative if self.added is None else self.added + relative
        if slopes is not None:
            distance = visible_pairs.distances(options, rows, seqlen_q, seqlen_k).to(dtype)
            alibi = -slopes.to(dtype)[..., None, None] * distance
            self.added = alibi if self.added is None else self.added + alibi
        if options.sinks is not None:
            self._add_key(options.sinks.to(dtype)[None, :, None, None])
        self.empty = None if _sees_a_key(options, seqlen_q, seqlen_k) else ~self.seen.any(-1, keepdim=True)

    def _add_key(self, sinks: Tensor) -> None:
        """Appends a key whose product with each query is 0, so its score is the sink, (1, Hq, 1, 1)."""
        self.k, self.v = (torch.cat([t, t.new_zeros(*t.shape[:2], 1, t.shape[3])], 2) for t in (self.k, self.v))
        added = sinks.new_zeros(1, 1, 1, 1) if self.added is None else self.added[(None,) * (4 - self.added.dim())]
        added = added.expand(-1, sinks.shape[1], *self.seen.shape[2:])
        seen = self.seen.expand(-1, sinks.shape[1], -1, -1)
        self.added = torch.cat([added, sinks.expand(*added.shape[:3], 1)], -1)
        self.seen = torch.cat([seen, (sinks != -math.inf).expand(*seen.shape[:3], 1)], -1)

    def fill_empty(self, rows: Tensor, value: float) -> Tensor:
        """``rows`` (B, Hq, Sq, C) with ``value`` for queries that see no key."""
        return rows if self.empty is None else rows.masked_fill(self.empty, value)


def _for_each_head(t: Tensor, num_heads: int) -> Tensor:
    """K or V for each query head: (B, Hkv, Sk, C) -> (B, Hq, Sk, C).

    onnxscript's optimiser drops reshapes on both sides of a product if the remaining sizes broadcast, even if that
    pairs other heads. Products here therefore have no reshapes: a group's heads are not folded into rows as elsewhere.
    """
    group = num_heads // max(1, t.shape[1])
    return t if group <= 1 else t.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2)


def _by_formula(scores: Tensor, pairs: _Pairs, dtype: torch.dtype) -> Tensor:
    values = _for_each_head(pairs.v.to(scores.dtype), scores.shape[1])
    return (torch.softmax(scores, -1) @ values).to(dtype)


def _by_operator(q: Tensor, k: Tensor, pairs: _Pairs, options: Options, scale: float) -> Tensor:
    """``k``: the keys without sinks. ``is_causal`` is for Sq = Sk only: onnxruntime 1.23 ignores it for one query."""
    mask: Tensor | None = pairs.seen
    if pairs.added is not None:
        mask = torch.where(pairs.seen, pairs.added, -math.inf)
    square = False
    if pairs.added is options.q_offsets is options.key_ranges is options.mask is None:
        no_window, (seqlen_q, seqlen_k) = tuple(options.window) == UNBOUNDED, (q.shape[2], k.shape[2])
        square = no_window and options.causal and _is_known(seqlen_q == seqlen_k)
        square = square and _is_known(options.offset_for(seqlen_q, seqlen_k) == 0)
        mask = None if square or (no_window and not options.causal) else mask
    grouped = not _is_known(q.shape[1] == k.shape[1])
    return torch.nn.functional.scaled_dot_product_attention(
        q, pairs.k, pairs.v, mask, is_causal=square, scale=scale, enable_gqa=grouped
    )


def _in_order_of(q: Tensor, out: Tensor) -> Tensor:
    """``out`` with q's order of dimensions in memory, on which the graph's views of it rely."""

    def compare(a: int, b: int) -> int:
        return _is_known(q.stride(a) < q.stride(b)) - _is_known(q.stride(a) > q.stride(b))

    order = [*sorted(range(3), key=cmp_to_key(compare)), 3]
    dense = out.permute(order).clone(memory_format=torch.contiguous_format)  # some graphs leave contiguous() out
    return dense.permute([order.index(dim) for dim in range(4)])


def _attention(q: Tensor, k: Tensor, v: Tensor, *values: Any, **named: Any) -> tuple[Tensor, ...]:
    """``attention_forward`` in torch's operators. The exporter drops unused results."""
    options = Options(*values, **named)
    if options.dropout_p:
        raise NotImplementedError(
            f"pyattn: ONNX has no attention with dropout, got dropout_p={options.dropout_p}: call eval() on the model"
        )
    for name in DEFAULTS.keys() - EXPORTED:
        if getattr(options, name) != DEFAULTS[name]:
            raise NotImplementedError(f"pyattn: ONNX has no attention with {name}, got {name}")
    wide = torch.promote_types(q.dtype, torch.float32)
    pairs = _Pairs(q, k, v, options, wide)
    scale = options.scale_for(q.shape[3])
    scores = q.to(wide) @ _for_each_head(pairs.k.to(wide), q.shape[1]).mT * scale
    if options.softcap:
        cap = options.bounded_softcap
        scores = cap * torch.tanh(scores / cap)
    if pairs.added is not None:
        scores = scores + pairs.added
    scores = pairs.fill_empty(scores.masked_fill(~pairs.seen, -math.inf), 0.0)
    lse = pairs.fill_empty(scores.logsumexp(-1, keepdim=True), -math.inf).squeeze(-1)
    if options.softcap or (pairs.added is not None and q.dtype != wide):
        out = _by_formula(scores, pairs, q.dtype)
    else:
        out = _by_operator(q, k, pairs, options, scale)
    out = _in_order_of(q, pairs.fill_empty(out, 0.0))
    row_max = scores.amax(-1)
    return out, lse, row_max, torch.exp(lse - row_max)


def _refuse(what: str, *_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(f"pyattn: ONNX has no {what}")


class _DuringExport:
    """A key of torch's table of decompositions that equals its operator during ``torch.onnx.export`` alone.

    The table has other readers, which must not find attention there: fake tensors, DTensor's rules, and Inductor, which
    raises for an operator without a lowering that has a decomposition if the environment variable CI is set.
    """

    def __init__(self, op: ops.Operator) -> None:
        self._op = op

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)  # the exporter asks keys for their names and schemas

    def __hash__(self) -> int:
        return hash(self._op)

    def __eq__(self, other: object) -> bool:
        return other is self or (other is self._op and torch.onnx.is_in_onnx_export())


DECOMPOSITIONS: dict[ops.Operator, Callable[..., tuple[Tensor, ...]]] = {
    ops.attention_forward: _attention,
    ops.attention_backward: partial(_refuse, "gradients of attention, got attention's backward"),
    ops.attention_varlen_forward: partial(_refuse, "packed sequences, got attention_varlen"),
    ops.attention_varlen_backward: partial(_refuse, "gradients of attention, got attention_varlen's backward"),
    ops.attention_paged_forward: partial(_refuse, "pages of keys, got a cache with page_size"),
    ops.attention_varlen_paged_forward: partial(_refuse, "pages of keys, got attention_varlen with block_table"),
    ops.attention_bytes_forward: partial(_refuse, "keys of 8 bits, got a cache with kv_dtype"),
}

for _op, _decomposition in DECOMPOSITIONS.items():
    torch._decomp.decomposition_table[_DuringExport(_op)] = _decomposition  # type: ignore[index]
