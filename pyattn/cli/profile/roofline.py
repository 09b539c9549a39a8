"""The roofline of a profile: how fast each phase computes, under what the machine's arithmetic and memory allow.

Bytes of a phase are those of the tensors that it takes its operands from or writes its result to, once a call: the
least that has to move. Scores, weights, sums and packed copies stay in the caches and count nothing, so a phase that
reads a tensor again for each block of queries moves more than this between the caches. The bound of a phase is the
peak, or its operations a byte times the read bandwidth if that is less.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyattn.cli.profile.phases import PassTimes
from pyattn.cli.timing import once

OPERANDS = {
    "forward": {"S = Q K^T": "q k", "O = P V": "v", "store": "out"},
    "backward": {
        "S = Q K^T": "q k",
        "dP = dO V^T": "dout v",
        "dV = P^T dO": "dout",
        "dK = dS^T Q": "q",
        "dQ = dS K": "k",
        "store": "q k v",
    },
}
"""By pass and phase, the tensors read or written; gradients are as large as q, k and v."""

WHOLE = {"forward": "q k v out", "backward": "q k v out dout q k v"}
"""The tensors of a whole pass."""

STREAMED = 2**26
"""Bytes copied to measure bandwidth: twice a large cache."""

TRIES = 5
"""How many copies are timed; the fastest one counts."""


class Machine(NamedTuple):
    """Limits of one thread while all compute: operations and bytes per second.

    Attributes:
        copy: bytes read and bytes written per second, together.
    """

    peak: float
    copy: float
    read: float

    def bound(self, intensity: float) -> float:
        """The most operations per second at that many operations a byte."""
        return min(self.peak, intensity * self.read)


class Point(NamedTuple):
    """A phase, or a whole pass named "all".

    Attributes:
        seconds: per call, summed over threads.
        flops, bytes: per call.
    """

    pass_name: str
    phase: str
    seconds: float
    flops: float
    bytes: int

    @property
    def intensity(self) -> float:
        """Operations a byte; inf if no tensor is read."""
        return self.flops / self.bytes if self.bytes else float("inf")

    @property
    def rate(self) -> float:
        """Operations per second."""
        return self.flops / self.seconds


def machine(peak: float, threads: int) -> Machine:
    """The limits of each thread: ``peak`` as measured, and torch's rates of copying and summing a large tensor."""
    source, target = torch.ones(2, STREAMED // 4).unbind()
    copied = min(once(lambda: target.copy_(source), 1) for _ in range(TRIES))
    summed = min(once(source.sum, 1) for _ in range(TRIES))
    return Machine(peak, 2 * STREAMED / copied / threads, STREAMED / summed / threads)


def points(passes: Mapping[str, PassTimes], tensors: Mapping[str, Tensor]) -> list[Point]:
    """The phases of forward and backward with what they compute and move, each pass followed by its whole."""
    found: list[Point] = []
    for pass_name, operands in OPERANDS.items():
        if pass_name not in passes:
            continue
        times = passes[pass_name]
        for phase, (seconds, flops) in times.items():
            moved = sum(tensors[name].nbytes for name in operands.get(phase, "").split())
            found.append(Point(pass_name, phase, seconds, flops, moved))
        whole = sum(tensors[name].nbytes for name in WHOLE[pass_name].split())
        seconds, flops = (sum(values) for values in zip(*times.values(), strict=True))
        found.append(Point(pass_name, "all", seconds, flops, whole))
    return found


def show(found: Sequence[Point], limits: Machine) -> None:
    """Print each phase beside its bound: the products in operations, those without a product in bytes."""
    print(f"\nroofline of a thread: peak {limits.peak / 1e9:.0f} GFLOP/s, ", end="")
    print(f"read {limits.read / 1e9:.1f} GB/s, copy {limits.copy / 1e9:.1f} GB/s; bytes of tensors, once a call")
    for pass_name in dict.fromkeys(point.pass_name for point in found):
        print(f"\n{pass_name:16}{'ops/byte':>10}{'GFLOP/s':>10}{'bound':>8}{'of it':>7}{'MB':>9}{'GB/s':>8}")
        for point in (point for point in found if point.pass_name == pass_name):
            columns = " " * 35
            if point.flops:
                bound = limits.bound(point.intensity)
                columns = f"{point.intensity:10.1f}{point.rate / 1e9:10.1f}{bound / 1e9:8.0f}{point.rate / bound:7.0%}"
            moved = f"{point.bytes / 1e6:9.2f}{point.bytes / point.seconds / 1e9:8.2f}" if point.bytes else ""
            print(f"  {point.phase:14}{columns}{moved}".rstrip())
