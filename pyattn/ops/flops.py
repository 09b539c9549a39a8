"""Floating-point operations of the native operators, for ``torch.utils.flop_counter``."""

from functools import partial
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from pyattn import ops
from pyattn.ops.pair_counts import pairs
from pyattn.options.call import Call
from pyattn.options.schema import Options, Packing


def flops(op: ops.Operator, *args: Any, out_val: object = None, **named: Any) -> int:
    """Two operations per column for each visible pair of query and key, so causal counts half.

    Forward computes Q K^T and P V; backward Q K^T again, dO V^T, dV, dK and dQ.
    """
    values = ops.arguments_of(op, args, named)
    q, k, v = values["q"], values["k"], values["v"]
    options = Options(*(values[name] for name in Options._fields))
    columns: int = 3 * q.shape[-1] + 2 * v.shape[-1] if "dout" in values else q.shape[-1] + v.shape[-1]
    packing = None
    if "cu_seqlens_q" in values:
        packing = Packing(*(values[name] for name in Packing._fields))
    paged = values.get("block_table") is not None
    if paged and packing is not None:
        k = q.new_empty(values["block_table"].numel() * k.shape[1], k.shape[2], 0)
    elif paged:
        k = q.new_empty(q.shape[0], k.shape[2], values["seqlen_k"], 0)
    return 2 * columns * pairs(Call(q, k, k, options, packing))


for _op in (
    ops.attention_forward,
    ops.attention_backward,
    ops.attention_varlen_forward,
    ops.attention_varlen_backward,
    ops.attention_paged_forward,
    ops.attention_varlen_paged_forward,
    ops.attention_bytes_forward,
):
    register_flop_formula(_op.overloadpacket, get_raw=True)(partial(flops, _op))
