"""The code of each process of test_separate_processes.py: ``python -m support.ranks.separate RANK SIZE RENDEZVOUS``."""

import sys

import torch
import torch.distributed as dist

from pyattn import attention
from pyattn.distributed import shard, ulysses_attention, unshard


def compare(rank: int, size: int, rendezvous: str) -> None:
    """Every option by row at once gives what one process computes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=size)
    torch.manual_seed(0)
    q, k, v, bias = torch.randn(4, 2, 4, 8, 8)
    by_row = {"mask": torch.rand(1, 1, 8, 8) < 0.7, "bias": bias, "selected": torch.randint(8, (2, 4, 8, 6))}
    by_row["key_ranges"] = torch.tensor([0, 7]).repeat(1, 8, 1)
    parts = {name: shard(t, 1 if name == "key_ranges" else 2) for name, t in by_row.items()}
    out = ulysses_attention(*(shard(t, 2) for t in (q, k, v)), **parts)
    torch.testing.assert_close(unshard(out, 2), attention(q, k, v, **by_row))
    dist.destroy_process_group()


if __name__ == "__main__":
    compare(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
