"""Promise: two builds are timed in pairs on equal terms, their results compared, and what is slower is told."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pyattn
from pyattn import _C, _build
from pyattn.cli import InputError
from pyattn.cli.bench import against, turns
from pyattn.cli.bench.sides.calls import Calls, Run
from pyattn.cli.bench.sides.causal import of_functions

RUN = Run("x", "float32", "cpu")


@pytest.fixture
def other(tmp_path):
    """A folder with another build: this one's library, and in its package a line that a test may add to."""
    home = tmp_path / "other" / "pyattn"
    home.mkdir(parents=True)
    for source in dict.fromkeys(Path(module.__file__).parent for module in (_C, _build, pyattn)):
        for path in source.iterdir():
            if path.name not in ("cli", "__init__.py") and not (home / path.name).exists():
                (home / path.name).symlink_to(path)
    (home / "__init__.py").write_text(Path(pyattn.__file__).read_text())
    return home.parent


def add(folder, text):
    with (folder / "pyattn" / "__init__.py").open("a") as file:
        file.write(text)


def rows_of(folder):
    return {row["what"]: row for row in json.loads((folder / "results.json").read_text())["results"]}


def test_run(other, tmp_path, shown):
    """The folder's package is called, by this command line: it has none itself."""
    add(
        other,
        "\n_attention = attention\ndef attention(q, k, v):\n    return (1 + q.shape[1] // 2) * _attention(q, k, v)\n",
    )
    options = "--shapes 1x1x9x4 1x2x9x4 --only functions --dtype float32 --threads 1 --quick"
    lines = shown(f"bench --against {other} {options} --out {tmp_path / 'run'}").out.splitlines()
    assert f"speed-ups over {other}" in lines[0]
    assert [line.split(":")[0] for line in lines[1:3]] == ["this build", str(other)]
    name = f"  pyattn {pyattn.isa()}, forward"
    assert [line.split()[-1] for line in lines if line.startswith(f"{name} ")][:2] == ["same", "other"]
    assert [line.split()[-1] for line in lines if line.startswith(f"{name}+backward")][:2] == ["same", "other"]
    record = json.loads((tmp_path / "run" / "results.json").read_text())
    assert record["against"] == str(other)
    for row in record["results"]:
        ours, others = row["rounds"]
        assert len(ours) == len(others) >= against.PLACES
        assert row["low"] <= row["speedup"] <= row["high"]


def test_a_library_lacks_what_a_comparison_needs(other):
    """That comparison is left out with the reason; a process that ends stops the command."""
    build = against.Build(other)
    try:
        plan = against.Plan(missing, RUN, ())
        (row,) = against.compared([build, build], "x", plan, 0.0, 1)
        assert row["left_out"].startswith(f"{other / 'pyattn' / '__init__.py'}: ")
        os.kill(build._process.pid, 9)
        with pytest.raises(InputError, match="--against needs both builds until the end, got code -9"):
            against.compared([build, build], "x", plan, 0.0, 1)
    finally:
        build.close()


def test_ctrl_c_is_left_to_the_command():
    """A terminal sends SIGINT to the builds' processes, too; their tracebacks would follow the command's end."""
    build = against.Build(None)
    try:
        os.kill(build._process.pid, signal.SIGINT)
        assert build.run(os.getpid) == build._process.pid
    finally:
        build.close()
    assert build._process.returncode is not None


def missing(run, sizes):
    """Found in this process alone: the other one does not import tests."""
    raise AssertionError


def test_a_folder_without_a_build_is_refused(tmp_path, refusal):
    rule = "--against must be a folder with an installed pyattn"
    assert refusal(f"bench --against {tmp_path}") == f"{rule}, got {tmp_path}"
    (tmp_path / "pyattn").mkdir()
    (tmp_path / "pyattn" / "__init__.py").write_text("raise ImportError('built for another torch\\nin detail')")
    with pytest.raises(
        InputError, match=f"{rule} for this torch, got {tmp_path}: ImportError: built for another torch$"
    ):
        against.Build(tmp_path)
    (tmp_path / "pyattn" / "__init__.py").write_text("import os; os._exit(3)")
    with pytest.raises(InputError, match="a process that ended with code 3"):
        against.Build(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--only distributed --threads 2", "--only must be a kind of one process with --against, got distributed"),
        ("--device cuda", "--device must be cpu with --against, got cuda"),
    ],
)
@pytest.mark.usefixtures("small_gpu")
def test_bad_input(tmp_path, refusal, options, message):
    assert refusal(f"bench --against {tmp_path} {options}") == message


# One build's part


def test_calls_of_the_active_instruction_set_are_made_with_the_same_inputs():
    active = f"pyattn {pyattn.isa()}"
    made = [turns.made(of_functions, RUN, (1, 2, 9, 4), 1) for _ in range(2)]
    assert made[0] == made[1]
    assert set(made[0]) == {(active, "forward"), (active, "forward_backward")}
    assert all(digest and not reason for digest, reason in made[0].values())
    assert turns.timed((active, "forward_backward"), 2) > 0


def test_a_call_that_raises_has_a_reason():
    def broken():
        raise TypeError("not here\nin detail")

    made = turns.made(lambda run, sizes: Calls({"pyattn": broken, "torch": broken}), RUN, (), 1)
    assert made == {("pyattn", "forward"): ("", "TypeError: not here")}


def test_a_digest_is_that_of_all_bits():
    zero = torch.zeros(2, dtype=torch.bfloat16)
    assert turns.digest(zero) == turns.digest((zero,)) != turns.digest(-zero)
    assert turns.digest((zero, -zero)) != turns.digest((-zero, zero))
    assert turns.digest(None) == turns.digest([]) == ""


# Pairs


class Fake:
    """A build whose calls take ``seconds`` on an idle processor, and twice as long on processor 1."""

    def __init__(self, seconds, results, log):
        self.seconds, self.results, self.log = seconds, results, log

    def run(self, function, *arguments):
        if function is turns.made:
            return self.results
        side, repeats, *cpu = arguments
        self.log.append((side, repeats, *cpu))
        return self.seconds * (2 if cpu == [1] else 1)


def test_both_builds_take_the_same_processor_in_a_round(monkeypatch):
    monkeypatch.setattr(against.os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    log = []
    side = "pyattn", "forward"
    ours, theirs = (Fake(seconds, {side: ("bits", "")}, log) for seconds in (1e-3, 1.5e-3))
    (row,) = against.compared([ours, theirs], "x", against.Plan(of_functions, RUN, ()), 0.0, 1)
    assert (row["speedup"], row["low"], row["high"]) == pytest.approx((1.5, 1.5, 1.5))
    assert (row["seconds"], row["other_seconds"], row["same_bits"]) == (1e-3, 1.5e-3, True)
    assert log == [entry for cpu in (0, 1, 0) for entry in [(side, 1)] * 2 + [(side, 2, cpu)] * 2]
    assert list(against._cpus(2)) == [None]


def test_differences_of_the_builds_are_shown(capsys):
    ours = {("pyattn", "forward"): ("a", ""), ("pyattn", "forward_backward"): ("", "TypeError: x")}
    theirs = {("pyattn", "forward"): ("b", ""), ("pyattn over pages", "forward"): ("", "")}
    pair = Fake(4.0, ours, []), Fake(2.0, theirs, [])
    rows = against.compared(pair, "x", against.Plan(of_functions, RUN, ()), 0.0, 1)
    against.show(rows)
    assert [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()[3:]] == [
        "other",
        "left out: this: TypeError: x; other: not in this build",
        "left out: this: not in this build",
    ]


@pytest.mark.parametrize(("speedup", "high", "slow"), [(0.95, 0.99, 1), (0.95, 1.0, 0), (0.96, 0.97, 0), (1.5, 1.6, 0)])
def test_calls_that_are_slower_are_told_at_the_end(capsys, speedup, high, slow):
    times = SimpleNamespace(seconds=2e-3, other_seconds=1e-3, low=0.9, high=high)
    row = {"what": "shape", "side": "pyattn", "pass": "forward", "same_bits": None, "speedup": speedup, **vars(times)}
    against.show_slower([row, {"what": "other", "left_out": "reason"}])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"{slow} of 2 calls are slower by 5% or more" + ":" * slow
    assert ("shape" in lines) == bool(slow)
