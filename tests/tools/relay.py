"""The time that ring attention takes over a link with a delay: ``relay.py [SEQLEN [MILLISECONDS]]``, as root on Linux.

Kernels without netem delay no packets, so a thread does: it reads the IP packets of a TUN device in each of two network
namespaces and writes each to the other device when it is due. Two ranks run as in slow_link.py, first over a relay
without a delay, which has the same throughput.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import slow_link

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


def main(seqlen: int = 16384, milliseconds: int = 20) -> None:
    found = []
    for delay in (0.0, milliseconds / 1e3):
        with link(delay):
            found.append(slow_link.both(seqlen))
    for name in found[0][0]:
        near, far = (max(rank[name][0] for rank in each) for each in found)
        print(f"{name}, {seqlen} positions: {near:.3f} s without a delay, {far:.3f} s with {milliseconds} ms each way")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
