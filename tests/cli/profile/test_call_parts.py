"""Promise: counters count the calls they are given and say why they can't; the parts of a call add up to it."""

import mmap
import os
import struct
from types import SimpleNamespace

import pytest
import torch

from pyattn import attention
from pyattn.cli.profile import call_cost, counters
from pyattn.cli.profile.counters import Counts

# Counters


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """A kernel that counts: each event ``value`` times while enabled, for half of the time."""
    done = SimpleNamespace(events=[], controls=[], refused=None, value=50)
    (tmp_path / "41").mkdir()
    (tmp_path / "42").mkdir()

    def opened(event, thread):
        if event == done.refused:
            raise OSError(2, "No such file or directory")
        done.events.append((event, thread))
        reading, writing = os.pipe()
        os.write(writing, struct.pack("=QQQ", done.value, 10, 5))
        os.close(writing)
        return reading

    monkeypatch.setattr(counters, "TASKS", tmp_path)
    monkeypatch.setattr(counters, "opened", opened)
    monkeypatch.setattr("fcntl.ioctl", lambda descriptor, request, argument: done.controls.append(request))
    return done


def test_events_of_all_threads_are_added_and_scaled_to_the_whole_time(kernel, monkeypatch):
    monkeypatch.setattr(counters, "vendor", lambda: "AuthenticAMD")
    called = []
    counts, why = counters.counted(lambda: called.append(set(kernel.controls)), 4)
    assert called == [{counters.RESET, counters.ENABLE}] * 4
    assert why == ""
    assert counts[:5] == (2 * 50 * 10 / 5 / 4,) * 5
    assert counts.page_faults >= 0
    assert {thread for _, thread in kernel.events} == {41, 42}
    assert kernel.controls.count(counters.DISABLE) == 10


def test_an_event_that_is_not_counted_is_missing(kernel, monkeypatch, capsys):
    monkeypatch.setattr(counters, "vendor", lambda: "unknown")
    kernel.refused = (counters.CACHE, counters.TLB_READ_MISS)
    counts, why = counters.counted(lambda: None, 1)
    assert (counts.l2_misses, counts.tlb_misses, why) == (None, None, "")
    counters.show({"forward": counts._replace(page_faults=7.0)}, why)
    assert capsys.readouterr().out.splitlines()[-1].split() == ["forward", "200", "1.00", "200", "-", "-", "7"]


def test_without_counters_there_is_one_sentence(monkeypatch, capsys):
    def refuse(event, thread):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(counters, "opened", refuse)
    counts, why = counters.counted(lambda: None, 1)
    assert counts[:5] == (None,) * 5
    counters.show({"forward": Counts(*[None] * 5, 1234.0)}, why)
    said = "no hardware counters: perf_event_open says 'Permission denied'; page faults a call: 1,234 forward"
    assert capsys.readouterr().out == f"\n{said}\n"


def test_page_faults_are_counted():
    def new_memory() -> None:  # malloc may give memory that the process had before
        with mmap.mmap(-1, 2**26) as memory:
            memory[:] = bytes(2**26)

    counts, _ = counters.counted(new_memory, 1)
    assert counts.page_faults > 16


def test_elsewhere_there_is_no_system_call(monkeypatch):
    monkeypatch.setattr(counters.platform, "system", lambda: "Darwin")
    with pytest.raises(OSError, match="none on Darwin"):
        counters.opened((0, 0), 0)


def test_the_structure_is_the_kernel_s(monkeypatch):
    """As linux/perf_event.h lays out perf_event_attr: 112 bytes, the flags at 40."""
    given = []
    library = SimpleNamespace(syscall=lambda *arguments: given.append(arguments) or -1)
    monkeypatch.setattr(counters.platform, "system", lambda: "Linux")
    monkeypatch.setattr(counters.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(counters.ctypes, "CDLL", lambda name, use_errno: library)
    with pytest.raises(OSError):  # noqa: PT011  (whatever errno says)
        counters.opened((counters.RAW, 0x864), 7)
    number, attributes, *rest = given[0]
    assert (number, len(attributes), rest) == (298, 112, [7, -1, -1, 0])
    assert struct.unpack_from("=IIQ", attributes) == (4, 112, 0x864)
    assert struct.unpack_from("=QQ", attributes, 32) == (3, 0b1100001)


def test_vendors(tmp_path, monkeypatch):
    monkeypatch.setattr(counters.platform, "machine", lambda: "aarch64")
    assert counters.vendor() == "ARM"
    monkeypatch.setattr(counters.platform, "machine", lambda: "x86_64")
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(counters, "Path", lambda name: path)
    assert counters.vendor() == ""
    path.write_text("processor : 0\nvendor_id\t: GenuineIntel\n")
    assert counters.vendor() == "GenuineIntel"
    assert counters.events()[3] == (counters.RAW, 0x3F24)


# The parts of a call


def test_parts_add_up_to_the_call(monkeypatch):
    """Time is that of the operators as they are called, in order, without the graph."""
    seconds = {"call": 100.0, "operators": 60.0, "dispatcher": 4.0}
    ran = []

    def in_turn(calls, base, budget):
        for name, call in calls.items():
            call()
            ran.append(name)
        return {name: SimpleNamespace(seconds=value) for name, value in seconds.items()}

    monkeypatch.setattr(call_cost, "in_turn", in_turn)
    monkeypatch.setattr(call_cost, "_kernel_seconds", lambda call: call() or 50.0)
    q = torch.randn(1, 2, 6, 4, requires_grad=True)
    parts = call_cost.split(lambda: torch.autograd.grad(attention(q, q, q).sum(), q), 0.0)
    assert parts == (100.0, 40.0, 4.0, 6.0, 50.0)
    assert sum(parts[1:]) == parts.whole
    assert ran == list(seconds)


def test_the_operators_of_a_call_are_recorded():
    q = torch.randn(1, 2, 6, 4, requires_grad=True)
    with call_cost._Recorder() as recorder:
        out = attention(q, q, q)
        out.sum().backward()
    forward, backward = recorder.operators
    assert torch.equal(forward()[0], out)
    assert len(backward()) >= 3


def test_kernels_take_a_part_of_their_operator():
    q = torch.randn(1, 2, 6, 4)
    assert 0 < call_cost._kernel_seconds(lambda: attention(q, q, q)) < 1.0


def test_run(shown):
    printed = shown("profile --shapes 2x2x70x8 --threads 1").out
    assert "page faults" in printed
    head = next(line for line in printed.splitlines() if line.startswith("fixed cost, 1x2x16x8, us"))
    assert head.split("us")[1].split() == ["call", "Python,", "graph", "dispatcher", "checks,", "memory", "kernels"]
    rows = printed[printed.index(head) :].splitlines()[1:3]
    assert [row[2:34].strip() for row in rows] == ["forward", "forward and backward"]
    assert "forward and backward" not in shown("profile --shapes 1x2x70x8 --queries 1 --threads 1").out
