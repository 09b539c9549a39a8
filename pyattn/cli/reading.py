"""How fast decoding reads keys and values, which is what it does most."""

from collections.abc import Callable

import torch
from torch import Tensor

from pyattn.cli.timing import in_turn
from pyattn.ops import visible
from pyattn.options import Options

SECONDS = 0.5
"""Time for each of the two sides."""

ROWS = 256
"""Queries whose mask is made at a time: 4 MB at 16,384 keys."""


def bytes_seen(q: Tensor, k: Tensor, v: Tensor, options: Options) -> int:
    """Bytes of the keys and values that any query of their group sees."""
    batch, heads, seqlen_q = q.shape[:3]
    num_heads_kv, seqlen_k = k.shape[1:3]
    rows, all_heads = torch.arange(seqlen_q, device=q.device), torch.arange(heads, device=q.device)
    seen = torch.zeros(batch, heads, seqlen_k, dtype=torch.bool, device=q.device)
    for some in rows.split(ROWS):
        seen |= visible.seen(options, some, all_heads, seqlen_q, seqlen_k).any(2)
    keys = int(seen.unflatten(1, (num_heads_kv, -1)).any(2).sum())
    return keys * (k.shape[3] + v.shape[3]) * k.itemsize


def show(call: Callable[[], object], q: Tensor, k: Tensor, v: Tensor, options: Options) -> None:
    """Print the rate at which ``call``, attention of q, k and v, reads what it sees, beside torch.sum of k and v."""
    calls = {"attention": call, "torch.sum": lambda: (k.sum(), v.sum())}
    times = in_turn(calls, "torch.sum", SECONDS, q.device.type)
    seen, whole = bytes_seen(q, k, v, options), k.nbytes + v.nbytes
    rate, theirs = seen / times["attention"].seconds, whole / times["torch.sum"].seconds
    share = times["attention"].speedup * seen / whole
    print(f"\nK and V: {seen / 1e6:,.1f} MB a call, {rate / 1e9:.1f} GB/s", end="")
    print(f", {share:.0%} of the {theirs / 1e9:.1f} GB/s of torch.sum")
