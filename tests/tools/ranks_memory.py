"""Peak memory of each rank of a ring, forward and backward: ``ranks_memory.py [SEQLEN [RANKS...]]``.

One head in float32. The peak is the rise of resident memory during a call: out, gradients, the chunks that travel, and
workspaces, not q, k, v and dout. The processes are new; a call of a few positions has loaded the code.
"""

import sys

import torch

from pyattn.cli.bench.processes import Team
from pyattn.cli.bench.sides.calls import Side
from pyattn.cli.timing import peak_memory
from pyattn.distributed import ring_attention, shard

HEAD_DIM = 64
WARM_UP = 64


def peak(seqlen: int) -> tuple[int, int | None]:
    """The bytes of this rank's q, and the peak."""

    def part(positions: int) -> Side:
        length = shard(torch.empty(positions, 0), 0).shape[0]
        *qkv, dout = (torch.randn(1, 1, length, HEAD_DIM, requires_grad=True) for _ in range(4))
        return Side(ring_attention, qkv, dout.detach())

    part(WARM_UP).gradients()
    side = part(seqlen)
    return side.dout.nbytes, peak_memory(side.gradients)


def main(seqlen: int = 65536, *sizes: int) -> None:
    for ranks in sizes or (1, 2, 4, 8):
        found = Team(ranks).run(peak, seqlen)
        peaks = " ".join(f"{(size or 0) / 2**20:.1f}" for _, size in found)
        print(f"{seqlen} positions, ranks: {ranks}, q {found[0][0] / 2**20:.1f} MiB each, peaks {peaks} MiB")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
