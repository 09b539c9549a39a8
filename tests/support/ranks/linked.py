"""A rank of test_links.py in a network namespace: ``linked.py SECONDS CALLS RANK``, SECONDS being the group's timeout.

Prints a line before each call, then a digest of all gradients, or the error and when it came.
"""

import hashlib
import sys
import time
from datetime import timedelta

import slow_link
import torch
import torch.distributed as dist

from pyattn.distributed import ring_attention


def main(seconds: int, calls: int, own: int) -> None:
    torch.set_num_threads(1)
    meeting = f"tcp://{slow_link.ADDRESSES[0]}:{slow_link.PORT}"
    dist.init_process_group("gloo", meeting, rank=own, world_size=2, timeout=timedelta(seconds=seconds))
    torch.manual_seed(own)
    q, k, v = (torch.randn(1, 2, 1024, 64, requires_grad=True) for _ in range(3))
    digest = hashlib.sha256()
    for _ in range(calls):
        print("call", flush=True)
        began = time.perf_counter()
        try:
            gradients = torch.autograd.grad(ring_attention(q, k, v).sum(), (q, k, v))
        except RuntimeError as error:
            print(f"{type(error).__name__} {time.perf_counter() - began}", flush=True)
            return
        for gradient in gradients:
            digest.update(gradient.numpy().tobytes())
    print(digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
