"""Promise: each clock measures what it is meant to, and a machine that is busy with other work is noticed."""

import threading
from types import SimpleNamespace

import pytest
import torch

from pyattn import _C
from pyattn.cli import contention, timing
from pyattn.cli.timing import in_turn, once, peak_flops, peak_memory


@pytest.mark.parametrize(("threads", "seconds"), [(1, 1.0), (2, 4.0), (3, 4.0)])
def test_one_thread_is_timed_by_its_cpu_time_and_more_by_the_wall(clocks, monkeypatch, threads, seconds):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    calls = {"sdpa": lambda: clocks.call(8.0, 3.0, 6.0), "ours": lambda: clocks.call(4.0, 1.0, 2.0)}
    monkeypatch.setattr(contention, "waited", lambda: clocks.wall / 2)
    ours = in_turn(calls, "sdpa", 0.0)["ours"]
    assert (ours.seconds, ours.wall_seconds, ours.cpu_seconds) == (seconds, 4.0, 2.0)
    assert ours.speedup == (3.0 if threads == 1 else 2.0)
    assert ours.waited == (None if threads == 1 else pytest.approx(0.5 / threads))


def test_times_and_their_quartiles(clocks, monkeypatch):
    """The first call, and one before each measurement of a short one, are not counted; a short call is repeated."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    durations = iter([9e-4, *(t for mean in (1e-3, 3e-3, 2e-3) for t in (9.0, *[mean] * 4))])
    taken = []

    def call():
        taken.append(next(durations) if len(taken) < 16 else 2e-3)
        clocks.call(taken[-1], 0.0, 0.0)

    monkeypatch.setattr(timing, "SHORTEST", 4 * 9e-4)
    time = in_turn({"sdpa": call}, "sdpa", 0.0)["sdpa"]
    assert (time.rounds, len(taken)) == (3, 16)
    assert (time.low, time.seconds, time.high) == pytest.approx((1.5e-3, 2e-3, 2.5e-3))
    assert time.speedup == 1.0


def test_a_side_begins_when_the_threads_of_another_sleep(clocks, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    found = []

    def call():
        found.append(clocks.spinning)
        clocks.call(1.0, 1.0, 1.0)
        clocks.spinning = 0.016

    in_turn({"sdpa": call}, "sdpa", 0.0)
    assert found[-3:] == [0.0] * 3
    clocks.spinning = 999.0
    timing.settle()
    assert 0 < clocks.spinning < 999.0  # whoever never sleeps is not waited for


@pytest.mark.parametrize(
    ("seconds", "fewest", "rounds"), [(0.0, 3, 3), (0.0, 1, 1), (9.9, 1, 4), (10.1, 1, 5), (999.0, 1, 50)]
)
def test_rounds_end_before_the_time_does(clocks, monkeypatch, seconds, fewest, rounds):
    """Two sides of 1 and 3 seconds: a round of 4 seconds uses up 2 of each side's."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    calls = {"sdpa": lambda: clocks.call(1.0, 1.0, 1.0), "ours": lambda: clocks.call(3.0, 1.0, 1.0)}
    assert in_turn(calls, "sdpa", seconds, fewest=fewest)["ours"].rounds == rounds


def test_a_gpu_is_timed_by_its_own_clock(monkeypatch):
    """Events around the repeats time them from when the GPU is idle, and are read after the second one has passed."""
    done = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append("event")

        def synchronize(self):
            done.append("wait")

        def elapsed_time(self, end):
            assert done[-1] == "wait"
            return 12.0

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("idle"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert once(lambda: done.append("call"), 3, "cuda") == 4e-3
    assert done == ["idle", "event", "call", "call", "call", "event", "wait"]


def test_peak_memory_of_a_gpu_is_what_a_call_adds(monkeypatch):
    allocated = {"now": 30, "peak": 500}

    def call():
        allocated["peak"] = max(allocated["peak"], allocated["now"] + 70)

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: allocated.update(peak=allocated["now"]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: allocated["peak"])
    assert peak_memory(call, "cuda") == 70


@pytest.mark.skipif(not timing.CLEAR_REFS.exists(), reason="this system does not count peak memory")
def test_peak_memory_sees_an_allocation():
    assert 60 < peak_memory(lambda: torch.ones(2**24)) / 2**20 < 120


@pytest.mark.parametrize("missing", ["malloc_trim", "clear_refs"])
def test_peak_memory_is_unknown_where_it_is_not_counted(tmp_path, monkeypatch, missing):
    if missing == "malloc_trim":
        monkeypatch.setattr(timing.ctypes, "CDLL", lambda name: object())
    else:
        monkeypatch.setattr(timing, "CLEAR_REFS", tmp_path / "proc" / "clear_refs")
    assert peak_memory(lambda: None) is None


@pytest.mark.parametrize("threads", [1, 3])
def test_the_peak_is_what_all_threads_do_in_their_own_time(monkeypatch, threads):
    """Each thread does two billion operations per second of its CPU time."""
    own, longest = threading.local(), []

    def spin(dtype, rounds):
        own.seconds = own.__dict__.get("seconds", 0.0) + rounds * 1e-9
        longest.append(rounds * 1e-9)
        return rounds * 2.0

    monkeypatch.setattr(_C, "spin", spin)
    monkeypatch.setattr(timing, "time", SimpleNamespace(thread_time=lambda: own.__dict__.get("seconds", 0.0)))
    assert peak_flops("float32", threads) == pytest.approx(2e9 * threads)
    assert longest[-1] >= timing.SPIN


@pytest.mark.usefixtures("isa")
def test_spinning_counts_its_operations():
    for dtype in ("float32", "float64", "bfloat16", "float16"):
        one, many = (_C.spin(dtype, rounds) for rounds in (1, 1000))
        assert many == 1000 * one > 0


# A busy machine


def test_waiting_is_added_up_over_threads(tmp_path, monkeypatch):
    for task, line in {"17": "999 2000000000 5", "18": "1 500000000 9"}.items():
        (tmp_path / task).mkdir()
        (tmp_path / task / "schedstat").write_text(line + "\n")
    monkeypatch.setattr(contention, "TASKS", tmp_path)
    assert contention.waited() == 2.5
    (tmp_path / "19").mkdir()
    assert contention.waited() is None
    monkeypatch.setattr(contention, "TASKS", tmp_path / "none")
    assert contention.waited() is None


@pytest.mark.parametrize(("after", "share"), [(10.0, 0.0), (13.0, 0.25), (99.0, 1.0), (9.0, 0.0), (None, None)])
def test_a_share_of_waiting_is_that_of_a_thread(clocks, monkeypatch, after, share):
    """Two threads run for 6 seconds; a lower total of waiting means that a thread has ended."""
    waits = iter([10.0, after])
    monkeypatch.setattr(contention, "waited", lambda: next(waits))
    watched = contention.Contention(2)
    clocks.call(6.0, 0.0, 0.0)
    assert watched.share() == share
    assert contention.is_busy(share) == (share in (0.25, 1.0))
