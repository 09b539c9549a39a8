"""Promise: a benchmark keeps to its time, compares only existing results, and shows no meaningless figure."""

import math
from collections.abc import Callable
from functools import partial

import pytest

from pyattn.cli.bench import command, comparisons, table
from pyattn.cli.bench.sides import calls

TIME = {"seconds": 2e-3, "low": 1.9e-3, "high": 2.1e-3, "speedup": 3.0, "rounds": 9, "waited": None}


def test_the_table_of_a_gpu_shows_operations_a_second(capsys):
    forward = TIME | {"flops_per_second": 456.7e12}
    table.show([{"what": "shape", "side": "pyattn", "forward": forward, "forward_backward": TIME}])
    _, _, head, line, training, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["forward", "ms", "speed-up", "TFLOP/s"]
    assert line.split() == ["pyattn", "2.000", "±", "5%", "3.00x", "456.7"]
    assert head.index("TFLOP/s") + len("TFLOP/s") == line.index("456.7") + len("456.7")
    assert training.split()[:2] == ["forward+backward", "ms"]
    assert last.split() == ["pyattn", "2.000", "±", "5%", "3.00x"]


def busy_rows() -> list[dict]:
    """A comparison of a busy machine: long names, large numbers, and sides without time in both directions."""
    late = {"left_out": "no time left"}
    names = ["torch sdpa with a mask", "nn.MultiheadAttention without weights", "weights split by views"]
    forward = TIME | {"seconds": 12.3456, "waited": 0.8, "of_peak": 1.0}
    rows: list[dict] = [{"side": "torch sdpa", "forward": forward, "forward_backward": forward, "peak_bytes": 2**35}]
    rows += [{"side": f"pyattn {name}", "forward": forward} for name in ("avx2", "scalar")]
    rows += [{"side": name} | late for name in names] + [{"side": f"{name}, backward"} | late for name in names]
    rows += [{"side": "openvino", "left_out": "ValueError: " + "its operator takes no such thing " * 9}]
    return [{"what": "module 2x256x256, 8 heads, float32"} | row for row in rows]


def test_a_busy_machine_fits_a_terminal(capsys):
    """No line is wider than 80 columns, columns lie below their headings, and what had no time shares a line."""
    table.show(busy_rows())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= table.WIDTH
    assert sum("no time left" in line for line in lines) == 2
    heads = [line for line in lines if line.startswith("forward")]
    shown = [line for line in lines if line.startswith("  torch sdpa  ")]
    for head, line in zip(heads, shown, strict=True):
        assert line.split()[3] == "?"
        for word, value in (("ms", "12345.600"), ("speed-up", "3.00x"), ("peak", "100%")):
            assert head.index(word) + len(word) == line.index(value) + len(value)
    assert heads[1].endswith("MB")
    assert shown[1].endswith(" 32768")


def test_a_table_without_rows_is_one_line(capsys):
    sides = ("torch sdpa", "pyattn")
    rows = [{"what": "x", "side": side, "forward": TIME} for side in sides]
    table.show(rows + [{"what": "x", "side": f"{side}, backward", "left_out": "no time left"} for side in sides])
    assert capsys.readouterr().out.splitlines()[-1] == "forward+backward: no time left"


def test_the_peaks_are_a_table(capsys):
    command.show_peaks(
        {
            ("float32", "avx2"): 261e9,
            ("float32", "scalar"): 130e9,
            ("bfloat16", "avx2"): 257e9,
            ("bfloat16", "scalar"): 1e9,
        }
    )
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["peak", "GFLOP/s", "avx2", "scalar"],
        ["float32", "261", "130"],
        ["bfloat16", "257", "1"],
    ]


@pytest.mark.parametrize(
    ("rounds", "waited", "expected"),
    [
        (3, 0.0, "± 5%"),
        (3, None, "± 5%"),
        (2, 0.0, "2 rounds"),
        (1, 0.05, "1 round"),
        (9, 0.5, "?"),
        (1, 0.5, "?"),
    ],
)
def test_a_spread_that_says_nothing_is_not_shown(rounds, waited, expected):
    assert table.spread(TIME | {"rounds": rounds, "waited": waited}) == expected


# Limited time


@pytest.fixture
def clock(clocks, monkeypatch):
    monkeypatch.setattr(table, "peak_memory", lambda call, device: 7)
    return clocks


def sides(clock, **seconds: float) -> dict[str, Callable[[], None]]:
    """A call for each side, which takes that many seconds."""
    return {name: partial(clock.call, taken, taken, taken) for name, taken in seconds.items()}


def test_without_a_limit_there_are_three_rounds(clock):
    result = table.measure(
        "x", "sdpa", sides(clock, ours=5.0, sdpa=9.0), sides(clock, ours=9.0, sdpa=20.0), 1.0, math.inf, "cpu"
    )
    assert [row["side"] for row in result] == ["ours", "sdpa"]
    assert {row[key]["rounds"] for row in result for key in ("forward", "forward_backward")} == {3}
    assert result[0]["forward"]["speedup"] == 9 / 5
    assert result[0]["forward_backward"]["speedup"] == 20 / 9
    assert result[0]["peak_bytes"] == 7


def test_what_there_is_no_time_for_is_left_out(clock):
    """sdpa, the baseline, comes first; nothing starts once the time is over."""
    forwards = sides(clock, ours=1.0, sdpa=1.0, slow=1.0)
    trainings = sides(clock, ours=5.0, sdpa=5.0, slow=5.0)
    result = table.measure("x", "sdpa", forwards, trainings, 1.0, clock.wall + 12.0, "cpu")
    assert [row["side"] for row in result[:3]] == ["ours", "sdpa", "slow"]
    assert all(row["forward"]["rounds"] == 1 for row in result[:3])
    assert [("forward_backward" in row, "peak_bytes" in row) for row in result[:3]] == [
        (False, False),
        (True, False),
        (False, False),
    ]
    assert {row["side"]: row["left_out"] for row in result[3:]} == {
        "ours, backward": "no time left",
        "slow, backward": "no time left",
    }


def test_without_sdpa_there_is_nothing_to_compare_with(clock):
    def broken():
        raise RuntimeError("broken\nin detail")

    result = table.measure("x", "sdpa", sides(clock, ours=1.0) | {"sdpa": broken}, {}, 1.0, math.inf, "cpu")
    assert {row["side"]: row["left_out"] for row in result} == {
        "sdpa": "RuntimeError: broken",
        "ours": "no sdpa to compare with",
    }


def test_a_side_without_a_backward_is_compared_in_the_forward_alone(clock):
    forwards, trainings = sides(clock, ours=1.0, sdpa=2.0, runtime=4.0), sides(clock, ours=1.0, sdpa=2.0)
    result = table.measure("x", "sdpa", forwards, trainings, 1.0, math.inf, "cpu")
    runtime = result[2]
    assert runtime["forward"]["speedup"] == 0.5
    assert {"forward_backward", "peak_bytes", "left_out"}.isdisjoint(runtime)
    assert {"forward_backward", "peak_bytes"} <= result[0].keys()
    assert len(result) == 3


def test_comparisons_share_the_time(clock, capsys):
    ends = []

    def comparison(what, taken, end):
        ends.append(end)
        clock.call(taken, taken, taken)
        return [{"what": what, "side": "sdpa", "forward": TIME | {"waited": 0.4}}]

    todo = {what: partial(comparison, what, taken) for what, taken in (("a", 1.0), ("b", 29.0), ("c", 1.0), ("d", 1.0))}
    assert [row["what"] for row in command.measured(todo, 28.0)] == ["a", "b"]
    assert ends == [7.0, 10.0]
    shown = capsys.readouterr().out
    assert "no time left for c; d\n" in shown
    assert "\n?  busy machine: threads waited for a core 40% of the time (load " in shown


def test_quick_is_over_in_half_a_minute(clock, shown, monkeypatch):
    """If each side takes a second per call, only the calls of the last comparison exceed the limit."""
    monkeypatch.setattr(command, "measured_peaks", lambda dtypes, threads: {})
    monkeypatch.setattr(comparisons, "SECONDS", 1.0)
    slow = calls.Calls(*[sides(clock, **{"ours": 1.0, "torch sdpa": 1.0})] * 2)

    for kind in ("functions", "modules"):
        monkeypatch.setitem(comparisons.KINDS, kind, comparisons.KINDS[kind]._replace(calls=lambda run, sizes: slow))
    shown("bench --quick")
    assert command.QUICK_SECONDS <= clock.wall < 30
