"""Promise: on a link that stalls or is slow, ranks compute the same bits; on one that is cut, they raise in time."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import slow_link

SPACE, DEVICE = slow_link.SPACES[1], "veth1"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and iproute2"),
]


def outcomes(disturb: Callable[[], None], seconds: int, calls: int) -> list[str]:
    """The last lines of both ranks; the link is disturbed once both have made five calls."""
    code, paths = Path(__file__).with_name("linked.py"), os.pathsep.join(sys.path)
    with slow_link.link():
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", space, sys.executable, code, str(own), str(seconds), str(calls)],
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"GLOO_SOCKET_IFNAME": f"veth{own}", "PYTHONPATH": paths},
            )
            for own, space in enumerate(slow_link.SPACES)
        ]
        for rank in ranks:
            assert rank.stdout is not None
            assert [rank.stdout.readline() for _ in range(5)] == ["call\n"] * 5
        disturb()
        return [rank.communicate(timeout=120)[0].splitlines()[-1] for rank in ranks]


def cut() -> None:
    slow_link.run(f"ip -n {SPACE} link set {DEVICE} down")


def stall() -> None:
    cut()
    time.sleep(2)
    slow_link.run(f"ip -n {SPACE} link set {DEVICE} up")


def slow_down() -> None:
    slow_link.run(f"tc -n {SPACE} qdisc add dev {DEVICE} root tbf rate 50mbit burst 32kb latency 50ms")


def test_stalls_and_slow_links_change_no_bit() -> None:
    undisturbed, *others = (outcomes(disturb, 60, 40) for disturb in (lambda: None, stall, slow_down))
    assert len(undisturbed[0]) == 64
    assert others == [undisturbed] * 2


def test_a_cut_link_ends_the_call() -> None:
    """Both ranks raise, once the group's 5 seconds are over."""
    for line in outcomes(cut, 5, 4000):
        error, seconds = line.split()
        assert error == "RuntimeError"
        assert float(seconds) < 15
