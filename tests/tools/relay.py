"""The time that ring attention waits for a link with a delay: ``relay.py [SEQLEN [MILLISECONDS]]``, as root on Linux.

Kernels without netem delay no packets, so a thread does: it reads the IP packets of a TUN device in each of two network
namespaces and writes each to the other device when it is due. Two ranks of one thread run ring_attention, first over a
relay without a delay, which has the same throughput.
"""

import fcntl
import heapq
import json
import os
import random
import select
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread

import slow_link
import torch
import torch.distributed as dist

from pyattn.distributed import ring_attention
from pyattn.distributed.agreement.ranks import gather_words, ranks_of
from pyattn.distributed.ring import messages

TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
"""From Linux's if_tun.h: packets without a header of the device."""
MTU = 9000
"""Bytes; a thread passes some ten thousand packets per second, whatever their size."""
MOST_BYTES = 65536
"""At least a packet's."""
PATIENCE = 0.1
"""Seconds after which the thread looks whether the link has ended."""


class Relay:
    """Passes packets between two devices.

    Attributes:
        delay, jitter: a packet takes delay - jitter to delay + jitter seconds, so packets overtake one another.
        loss: the share of packets that are lost.
        passed, lost: how many packets have been, in both directions.
    """

    def __init__(self, delay: float, jitter: float, loss: float) -> None:
        self.delay, self.jitter, self.loss = delay, jitter, loss
        self.passed = self.lost = 0

    @contextmanager
    def between(self, *devices: int) -> Iterator["Relay"]:
        """Passes packets between two file descriptors."""
        ended = Event()
        thread = Thread(target=self._run, args=(devices, ended))
        thread.start()
        try:
            yield self
        finally:
            ended.set()
            thread.join()

    def _run(self, devices: tuple[int, ...], ended: Event) -> None:
        draws, peers = random.Random(0), dict(zip(devices, reversed(devices), strict=True))
        waiting: list[tuple[float, int, int, bytes]] = []
        while not ended.is_set():
            patience = min(PATIENCE, max(0.0, waiting[0][0] - time.monotonic())) if waiting else PATIENCE
            for device in select.select(devices, (), (), patience)[0]:
                packet = os.read(device, MOST_BYTES)
                if draws.random() < self.loss:
                    self.lost += 1
                else:
                    due = time.monotonic() + self.delay + draws.uniform(-self.jitter, self.jitter)
                    heapq.heappush(waiting, (due, self.passed, peers[device], packet))
                    self.passed += 1
            while waiting and waiting[0][0] <= time.monotonic():
                *_, device, packet = heapq.heappop(waiting)
                os.write(device, packet)


@contextmanager
def device(name: str, space: str) -> Iterator[int]:
    """The file descriptor of a new TUN device in a namespace."""
    descriptor = os.open(TUN, os.O_RDWR)
    try:
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
        slow_link.run(f"ip link set {name} netns {space} mtu {MTU}")
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def link(delay: float = 0.0, jitter: float = 0.0, loss: float = 0.0) -> Iterator[Relay]:
    """The namespaces, joined by a relay."""
    first, second = map(device, slow_link.DEVICES, slow_link.SPACES)
    with slow_link.namespaces(), first as near, second as far:
        slow_link.start_devices()
        with Relay(delay, jitter, loss).between(near, far) as relay:
            yield relay


class Waited(dist.Work):
    """A message; adds up the seconds in which this rank waits for any."""

    seconds = 0.0

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, *arguments: timedelta) -> bool:
        began = time.perf_counter()
        done = self._work.wait(*arguments)
        Waited.seconds += time.perf_counter() - began
        return done


def rank(seqlen: int, own: int) -> None:
    """Prints the medians of a forward's seconds, of those in which it waits for keys, and of the agreement's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{slow_link.ADDRESSES[0]}:{slow_link.PORT}", rank=own, world_size=2)
    for start in (dist.isend, dist.irecv):
        setattr(messages.dist, start.__name__, lambda *given, start=start, **named: Waited(start(*given, **named)))
    q, k, v = torch.randn(3, 1, slow_link.HEADS, seqlen // 2, slow_link.HEAD_DIM)

    def seconds(call: Callable[[], object]) -> tuple[float, float]:
        dist.barrier()
        began, Waited.seconds = time.perf_counter(), 0.0
        call()
        return time.perf_counter() - began, Waited.seconds

    rounds = [
        (*seconds(lambda: ring_attention(q, k, v)), seconds(lambda: gather_words([own], ranks_of(None)))[0])
        for _ in range(1 + slow_link.ROUNDS)
    ]
    print(json.dumps([statistics.median(numbers) for numbers in zip(*rounds[1:], strict=True)]))


def main(seqlen: int = 16384, milliseconds: int = 20) -> None:
    for delay in (0, milliseconds):
        with link(delay / 1e3):
            ranks = slow_link.in_namespaces(__file__, "rank", str(seqlen))
            found = [json.loads(process.communicate()[0]) for process in ranks]
        whole, waited, agreed = map(max, zip(*found, strict=True))
        print(
            f"{seqlen} positions, {delay} ms each way: {whole:.3f} s forward, {waited:.3f} of them waiting for keys, "
            f"{agreed:.3f} for the agreement"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(*map(int, sys.argv[2:]))
    else:
        main(*map(int, sys.argv[1:]))
