"""Times ring attention over a long sequence, under torchrun: ``long_context.py [POSITIONS HEADS KV_HEADS HEAD_DIM]``.

Each rank makes its own part in bfloat16. Prints the seconds of forward and of both, the rate of multiply-adds of a
rank, and the bytes that the rank that sends most sent. 64 nodes: ``torchrun --nnodes 64 --rdzv-backend c10d
--rdzv-endpoint HOST:29400 tests/tools/long_context.py 1048576 32 8 128``.
"""

import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from support.traffic import counting

from pyattn.distributed import ring_attention, shard


def timed(call: Callable[[], object]) -> tuple[float, int]:
    """The seconds of the slowest rank, and the bytes of the rank that sends most."""
    dist.barrier()
    began = time.perf_counter()
    with counting() as sizes:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    found = torch.tensor([time.perf_counter() - began, float(sum(sizes))], dtype=torch.float64)
    if dist.get_backend() == "nccl":
        found = found.cuda()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found[0]), int(found[1])


def main(positions: int = 2**20, heads: int = 32, heads_kv: int = 8, head_dim: int = 128) -> None:
    gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpus else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    length, ranks = len(shard(torch.empty(positions), 0)), dist.get_world_size()
    q, k, v, dout = (
        torch.randn(1, h, length, head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
        for h in (heads, heads_kv, heads_kv, heads)
    )
    multiply_adds = positions * (positions + 1) // 2 * 2 * head_dim * heads / ranks

    def forward() -> object:
        with torch.no_grad():
            return ring_attention(q, k, v)

    def both() -> object:
        return torch.autograd.grad(ring_attention(q, k, v), (q, k, v), dout.detach())

    for name, call, products in (("forward", forward, 1.0), ("forward and backward", both, 3.5)):
        call()
        seconds, sent = timed(call)
        if dist.get_rank() == 0:
            rate = 2 * products * multiply_adds / seconds / 1e9
            what = f"{name}, {positions} positions on {ranks} ranks"
            print(f"{what}: {seconds:.3f} s, {rate:.0f} GFLOP/s a rank, {sent / 1e6:.1f} MB sent")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
