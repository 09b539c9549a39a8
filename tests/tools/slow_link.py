"""Share of a ring's transfer that is hidden behind compute on a slow link: ``slow_link.py [SEQLEN]``, as root on Linux.

Two ranks of one thread run ring_attention in network namespaces, joined by a pair of virtual Ethernet devices: first at
full speed, then with each direction limited by tc's token bucket filter. The share is 1 - (slow - fast) / transfer, and
transfer the bytes of the rank that sends most over the rate. tc counts headers too, which makes it pessimistic.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from support.traffic import counting

from pyattn.distributed import ring_attention

RATE = 10**9
"""Bits per second."""
HEADS, HEAD_DIM = 4, 64
ROUNDS = 5
SPACES = ("pyattn0", "pyattn1")
DEVICES = ("link0", "link1")
"""The ends of the link, one in each namespace."""
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29477


def rank(own: int, seqlen: int) -> None:
    """Prints seconds and sent bytes of a rank by pass; seconds are the median of the rounds, until both are done."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{ADDRESSES[0]}:{PORT}", rank=own, world_size=2)
    q, k, v = (torch.randn(1, HEADS, seqlen // 2, HEAD_DIM, requires_grad=True) for _ in range(3))

    def forward() -> None:
        with torch.no_grad():
            ring_attention(q, k, v)

    def training() -> None:
        ring_attention(q, k, v).sum().backward()

    def seconds(call: Callable[[], None]) -> float:
        dist.barrier()
        started = time.perf_counter()
        call()
        dist.barrier()
        return time.perf_counter() - started

    found = {}
    for name, call in (("forward", forward), ("forward and backward", training)):
        with counting() as sizes:
            call()
        found[name] = statistics.median(seconds(call) for _ in range(ROUNDS)), sum(sizes)
    print(json.dumps(found))


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


@contextmanager
def namespaces() -> Iterator[None]:
    """The namespaces, without a link."""
    try:
        for space in SPACES:
            run(f"ip netns add {space}")
        yield
    finally:
        for space in SPACES:
            subprocess.run(["ip", "netns", "delete", space], check=False)


def start_devices() -> None:
    """Gives the ends of the link their addresses and starts them."""
    for space, device, address in zip(SPACES, DEVICES, ADDRESSES, strict=True):
        run(f"ip -n {space} address add {address}/30 dev {device}")
        run(f"ip -n {space} link set lo up")
        run(f"ip -n {space} link set {device} up")


@contextmanager
def link() -> Iterator[None]:
    """The namespaces, joined at full speed."""
    with namespaces():
        run(f"ip link add {DEVICES[0]} netns {SPACES[0]} type veth peer name {DEVICES[1]} netns {SPACES[1]}")
        start_devices()
        yield


def in_namespaces(script: str | Path, *arguments: str) -> list[subprocess.Popen[str]]:
    """Starts ``script *arguments RANK`` for two ranks, one in each namespace."""
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", space, sys.executable, script, *arguments, str(own)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"GLOO_SOCKET_IFNAME": device, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for own, (space, device) in enumerate(zip(SPACES, DEVICES, strict=True))
    ]


def both(seqlen: int) -> list[dict[str, tuple[float, int]]]:
    """The results of the ranks."""
    return [json.loads(process.communicate()[0]) for process in in_namespaces(__file__, str(seqlen))]


def main(seqlen: int) -> None:
    with link():
        fast = both(seqlen)
        for space, device in zip(SPACES, DEVICES, strict=True):
            run(f"tc -n {space} qdisc add dev {device} root tbf rate {RATE}bit burst 256kb latency 50ms")
        slow = both(seqlen)
    for name in fast[0]:
        times = [max(found[name][0] for found in each) for each in (fast, slow)]
        sizes = [found[name][1] for found in fast]
        transfer = max(sizes) * 8 / RATE
        print(
            f"{name}, {seqlen} positions: {times[0]:.3f} s at full speed, {times[1]:.3f} s at {RATE / 1e9:g} Gbit/s; "
            f"sent {' and '.join(f'{size / 1e6:.2f}' for size in sizes)} MB, {transfer:.3f} s; "
            f"hidden {1 - (times[1] - times[0]) / transfer:.1%}"
        )


if __name__ == "__main__":
    arguments = [int(word) for word in sys.argv[1:]]
    if len(arguments) == 2:
        rank(arguments[1], arguments[0])
    else:
        main(*arguments or [16384])
