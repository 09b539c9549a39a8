"""Promise: a training shows its speed as it runs, and what slows it down."""

import itertools
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest

from pyattn import _C
from pyattn.cli import contention
from pyattn.cli.train import loop


@pytest.mark.parametrize(("terminal", "speed"), [(False, "  2,500 tokens/s"), (True, "")])
def test_lines_show_the_speed_where_no_bar_does(monkeypatch, capsys, terminal, speed):
    """A step of 100 tokens takes 0.04 seconds; the 5 seconds of validation are not counted."""
    now = [0.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with closing(loop.Progress(4, 100, threads=1)) as shown:
        for step in range(5):
            if step in (0, 4):
                now[0] += 5
                shown.validated(step, 1.0)
            now[0] += 0.04
            shown.stepped(2.0)
    lines = [line for line in capsys.readouterr().out.splitlines() if "step" in line]
    assert [line.replace("\r", "").strip() for line in lines] == [
        "step     0  validation loss 1.0000",
        f"step     4  validation loss 1.0000{speed}",
    ]


@pytest.mark.parametrize(
    ("policy", "threads", "waiting", "times"),
    [
        ("", 2, 0.5, 1),
        ("active", 2, 0.5, 1),
        ("passive", 2, 0.5, 0),
        ("", 1, 0.5, 0),
        ("", 2, 0.01, 0),
        ("", 2, None, 0),
    ],
)
def test_spinning_on_a_busy_machine_is_told_once(monkeypatch, capsys, policy, threads, waiting, times):
    """A clock that advances a second per reading, while each of two threads waits for ``waiting`` of it."""
    now = itertools.count()
    monkeypatch.setattr(contention, "time", SimpleNamespace(perf_counter=lambda: float(next(now))))
    monkeypatch.setattr(contention, "WINDOW", 2.0)
    total = itertools.count(0, 4 * (waiting or 0))  # it is read every four seconds
    monkeypatch.setattr(contention, "waited", lambda: None if waiting is None else next(total))
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    with closing(loop.Progress(20, 100, threads)) as shown:
        for _ in range(20):
            shown.stepped(2.0)
    assert capsys.readouterr().out.count("OMP_WAIT_POLICY=passive in the environment, or --threads 1, makes") == times


def test_progress_is_told_what_a_training_does(train_on, monkeypatch):
    made, progress = [], loop.Progress
    monkeypatch.setattr(loop, "Progress", lambda *given: (made.append(given), progress(*given))[1])
    assert train_on("--threads", "2")[0] == 0
    assert made == [(6, 4 * 16, 2, 0)]


@pytest.mark.parametrize(
    ("active", "dtype", "slow"),
    [
        ("avx2", "bfloat16", True),
        ("avx512_bf16", "bfloat16", False),
        ("amx", "bfloat16", False),
        ("avx2", "float32", False),
    ],
)
def test_bfloat16_without_its_products_is_called_slow(train_on, monkeypatch, capsys, active, dtype, slow):
    monkeypatch.setattr(_C, "active_isa", lambda: active)
    monkeypatch.setattr(_C, "available_isas", lambda: [active, "scalar"])
    train_on("--dtype", dtype)
    warning = "slow       avx2 does not multiply bfloat16: float32 is several times faster\n"
    assert capsys.readouterr().err == (warning if slow else "")
