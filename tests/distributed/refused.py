"""The code that ranks run for test_attention.py: calls with wrong arguments, whose errors it returns."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyattn import distributed


def refusal(group: dist.ProcessGroup, changes: dict[int, dict[str, Any]]) -> str:
    """The error of a call whose arguments some ranks change."""
    rank = dist.get_rank(group)
    arguments = {"q": torch.zeros(1, 2, 4, 8), "k": torch.zeros(1, 2, 4, 8), "v": torch.zeros(1, 2, 4, 8)}
    try:
        distributed.ring_attention(**arguments | changes.get(rank, {}), group=group)
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def packed_refusal(group: dist.ProcessGroup, qkv: Tensor, begins: Tensor, ranges: Tensor) -> str:
    """The error of key_ranges over packed sequences."""
    parts = [distributed.shard(t, 0, group, layout="contiguous") for t in (*qkv, ranges)]
    try:
        distributed.ring_attention_varlen(
            *parts[:3], begins, begins, group, layout="contiguous", causal=False, key_ranges=parts[3]
        )
    except ValueError as error:
        return str(error)
    return "no error"


def layout_refusals(group: dist.ProcessGroup) -> list[str]:
    """The errors of layouts of packed sequences: of shard, then of the ring."""
    x, begins, found = torch.zeros(9, 2, 8), torch.tensor([0, 1, 2, 3, 9]), []
    each = {"layout": "zigzag_varlen"}
    parts = [distributed.shard(x, 0, group, cu_seqlens=begins, **each)] * 3
    uneven = x[: 3 + 3 * dist.get_rank(group)]
    packed = functools.partial(distributed.ring_attention_varlen, group=group)
    calls = (
        lambda: distributed.shard(x, 0, group, layout="zig"),
        lambda: distributed.shard(x, 0, group, **each),
        lambda: distributed.shard(x, 0, group, cu_seqlens=begins),
        lambda: distributed.shard(x, 0, group, cu_seqlens=begins.float(), **each),
        lambda: distributed.shard(x, 0, group, cu_seqlens=begins[None], **each),
        lambda: distributed.shard(x, 0, group, cu_seqlens=begins + 1, **each),
        lambda: distributed.unshard(uneven, 0, group, cu_seqlens=begins, **each),
        lambda: distributed.ring_attention(*(t.transpose(0, 1)[None] for t in parts), group, **each),
        lambda: packed(*parts, begins, begins, layout="zig"),
        lambda: packed(*parts, begins, begins[:-1], **each),
        lambda: packed(*parts, begins, begins + 1, **each),
        lambda: packed(uneven, *parts[1:], begins, begins, **each),
        lambda: packed(*parts, begins, begins, q_offset=torch.zeros(3).long(), **each),
    )
    for call in calls:
        try:
            call()
            found.append("no error")
        except (TypeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def refused_then_right(group: dist.ProcessGroup, arguments: dict[str, Any]) -> tuple[str, Tensor]:
    """The error of wrong arguments, and then the result of a right call."""
    error = refusal(group, dict.fromkeys(range(dist.get_world_size(group)), arguments))
    torch.manual_seed(0)
    parts = [distributed.shard(t, 2, group) for t in torch.randn(3, 1, 2, 12, 8)]
    return error, distributed.unshard(distributed.ring_attention(*parts, group), 2, group)
