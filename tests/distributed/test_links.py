"""Promise: links that stall, are slow, delay or lose packets change no bit; on one that is cut, ranks raise in time."""

import os
import shutil
import socket
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import relay
import slow_link

SPACE, DEVICE = slow_link.SPACES[1], slow_link.DEVICES[1]
CALLS, BEFORE = 40, 5
"""Calls of each rank, and how many of them before the link is disturbed."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and iproute2"),
]


def outcomes(disturb: Callable[[], None], seconds: int, calls: int) -> list[str]:
    """The last lines of both ranks; the link is disturbed once both have made the first calls."""
    ranks = slow_link.in_namespaces(Path(__file__).parents[1] / "support/ranks/linked.py", str(seconds), str(calls))
    for rank in ranks:
        assert rank.stdout is not None
        assert [rank.stdout.readline() for _ in range(BEFORE)] == ["call\n"] * BEFORE
    disturb()
    return [rank.communicate(timeout=120)[0].splitlines()[-1] for rank in ranks]


def nothing() -> None:
    pass


def cut() -> None:
    slow_link.run(f"ip -n {SPACE} link set {DEVICE} down")


def stall() -> None:
    cut()
    time.sleep(2)
    slow_link.run(f"ip -n {SPACE} link set {DEVICE} up")


def slow_down() -> None:
    slow_link.run(f"tc -n {SPACE} qdisc add dev {DEVICE} root tbf rate 50mbit burst 32kb latency 50ms")


@cache
def undisturbed() -> list[str]:
    with slow_link.link():
        digests = outcomes(nothing, 60, CALLS)
    assert [len(digest) for digest in digests] == [64, 64]
    return digests


@pytest.mark.parametrize("disturb", [stall, slow_down])
def test_stalls_and_slow_links_change_no_bit(disturb: Callable[[], None]) -> None:
    with slow_link.link():
        found = outcomes(disturb, 60, CALLS)
    assert found == undisturbed()


@pytest.mark.skipif(not relay.TUN.exists(), reason="needs TUN devices")
@pytest.mark.parametrize("loss", [0.0, 0.01])
def test_delays_and_losses_change_no_bit(loss: float) -> None:
    """Packets take 15 to 25 ms."""
    with relay.link(delay=0.02, jitter=0.005, loss=loss) as link:
        found = outcomes(nothing, 60, CALLS)
    assert link.passed > 0
    assert (link.lost > 0) == (loss > 0)
    assert found == undisturbed()


def test_the_relay_delays_and_loses() -> None:
    """Packets of pairs of sockets arrive no earlier than they should, and some overtake others."""
    pairs = [socket.socketpair(type=socket.SOCK_SEQPACKET) for _ in range(2)]
    (near, first), (second, far) = pairs
    with relay.Relay(delay=0.02, jitter=0.005, loss=0.3).between(first.fileno(), second.fileno()) as link:
        began = time.monotonic()
        for number in range(100):
            near.send(bytes([number]))
        while link.passed + link.lost < 100:
            time.sleep(1e-3)
        arrived = [far.recv(1)[0]]
        assert time.monotonic() - began >= 0.015
        arrived += [far.recv(1)[0] for _ in range(link.passed - 1)]
    assert 10 < link.lost < 50
    assert sorted(arrived) != arrived
    for end in (*pairs[0], *pairs[1]):
        end.close()


def test_a_cut_link_ends_the_call() -> None:
    """Both ranks raise, once the group's 5 seconds are over."""
    with slow_link.link():
        lines = outcomes(cut, 5, 4000)
    for line in lines:
        error, seconds = line.split()
        assert error == "RuntimeError"
        assert float(seconds) < 15
