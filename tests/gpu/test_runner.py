"""Promise: tests/gpu.py records failures and runs on, respects its time, and ends all its processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpu
import pytest
from support.gpu import runner
from support.gpu.child import FAILED, LEFT_OUT, PASSED, record
from support.gpu.log import Copy, Log
from support.gpu.runner import OUT_OF_TIME, Step, run_step, watch

LIMIT = 600
"""Seconds after which a process counts as hung: far more than a busy machine takes to start one."""

PLANTED = """
import os, sys, time
from support.gpu import child

def succeed(*arguments):
    time.sleep(float(arguments[0]))
    return {"slept": arguments[0]}

def fail():
    raise ValueError("one sentence")

def leave_out():
    raise child.LeftOutError("not here")

def lose_the_gpu():
    child.finish = refuse

def refuse():
    raise RuntimeError("an illegal memory access")

def end():
    print("the last words", file=sys.stderr, flush=True)
    os._exit(3)

def checks(device, *arguments):
    time.sleep(sum(map(float, arguments[1:])))
    return {"succeed": lambda: succeed(*arguments), "fail": fail, "leave out": leave_out, "lose": lose_the_gpu,
            "end": end, "succeed again": lambda: None}
"""


def planted_step(*arguments: str, seconds: float = LIMIT, shares: int = 1) -> Step:
    return Step("planted", "planted", ("cpu", *arguments), seconds, LIMIT, shares)


@pytest.fixture
def planted(tmp_path: Path) -> dict[str, str]:
    """The environment of processes that find the module ``planted``."""
    (tmp_path / "planted.py").write_text(PLANTED)
    return gpu.environment(str(tmp_path))


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "log")


@pytest.mark.parametrize("shares", [1, 4])
def test_what_fails_is_recorded_and_the_rest_done(planted: dict[str, str], log: Log, shares: int) -> None:
    """In one process, or divided among four."""
    published: list[int] = []
    step = planted_step("0", shares=shares)
    records = run_step(step, planted, log, time.monotonic() + LIMIT, lambda known: published.append(len(known)))
    expected = {"succeed": PASSED, "fail": FAILED, "leave out": LEFT_OUT, "lose": FAILED, "end": FAILED}
    found = {x["check"]: x for x in records}
    assert {name: x["status"] for name, x in found.items()} == expected | {"succeed again": PASSED}
    assert found["succeed"]["figures"] == {"slept": "0"}
    assert found["fail"]["message"] == 'ValueError: one sentence (planted.py:10: raise ValueError("one sentence"))'
    assert found["leave out"]["message"] == "not here"
    assert found["lose"]["message"].startswith("RuntimeError: an illegal memory access (planted.py:19:")
    assert [name for name, x in found.items() if x.get("lost")] == ["lose"]
    assert found["end"]["message"] == "the process ended with status 3: the last words"
    assert published[-1] == len(records)


PLANTED_TESTS = """
import os, pytest

def test_passes(): pass
def test_fails(): assert 1 == 2
def test_loses_the_gpu():
    import support.gpu.suite
    support.gpu.suite.lost = lambda: True
    assert 2 == 3
def test_skips(): pytest.skip("not here")
def test_ends(): os._exit(3)
def test_passes_again(): pass
"""


@pytest.mark.parametrize("shares", [1, 2])
def test_pytest_is_a_step(tmp_path: Path, log: Log, shares: int) -> None:
    """Each test is a check; one that ends the process or loses the GPU is the only failure."""
    (tmp_path / "test_broken.py").write_text("import no_such_module")
    (tmp_path / "test_planted.py").write_text(PLANTED_TESTS)
    (tmp_path / "planted.py").write_text("from support.gpu.suite import run_tests as run")
    step = Step("planted", "planted", (str(tmp_path), "-k", ""), LIMIT, LIMIT, shares)
    records = run_step(step, gpu.environment(str(tmp_path)), log, time.monotonic() + LIMIT)
    (broken,) = (x for x in records if x["check"].endswith("test_broken.py"))
    assert broken["status"] == FAILED
    assert "No module named 'no_such_module'" in broken["message"]
    found = {x["check"].rpartition("::")[2]: (x["status"], x.get("message", "")) for x in records if x is not broken}
    assert sorted(found) == sorted(re.findall(r"def (\w+)", PLANTED_TESTS))
    assert found["test_passes"] == found["test_passes_again"] == (PASSED, "")
    assert found["test_fails"] == (FAILED, "assert 1 == 2 (test_planted.py:5)")
    assert found["test_loses_the_gpu"] == (FAILED, "assert 2 == 3 (test_planted.py:9)")
    assert [x["check"].rpartition("::")[2] for x in records if x.get("lost")] == ["test_loses_the_gpu"]
    assert found["test_skips"] == (LEFT_OUT, "Skipped: not here")
    assert found["test_ends"][1].startswith("the process ended with status 3")


def test_time_is_respected(planted: dict[str, str], log: Log, tmp_path: Path) -> None:
    """No check starts after the step's time is over, and no process after the total time is over."""
    # Listing the checks takes two seconds, longer than the step's one second; the first check would take nine more.
    late = run_step(planted_step("9", "2", seconds=1), planted, log, time.monotonic() + LIMIT)
    assert [x["check"] for x in late] == ["succeed", "fail", "leave out", "lose", "end", "succeed again"]
    assert {(x["status"], x["message"]) for x in late} == {(LEFT_OUT, OUT_OF_TIME)}
    none = Log(tmp_path / "no log")
    left_out = [record("planted", LEFT_OUT, message=OUT_OF_TIME)]
    assert run_step(planted_step(), planted, none, time.monotonic()) == left_out
    assert not (tmp_path / "no log").exists()


def test_a_module_that_is_not_there(planted: dict[str, str], log: Log) -> None:
    step = Step("step", "elsewhere", (), LIMIT, LIMIT)
    (failed,) = run_step(step, planted, log, time.monotonic() + LIMIT)
    assert failed["status"] == FAILED
    assert failed["message"].endswith("ModuleNotFoundError: No module named 'elsewhere'")


@pytest.mark.parametrize(
    ("longest", "step_seconds", "seconds", "wrong"),
    [(1.0, LIMIT, LIMIT, "no end after 1 s"), (LIMIT, 0, LIMIT, ""), (LIMIT, LIMIT, 1.0, "")],
    ids=["it hangs", "the step's time is over", "all time is over"],
)
def test_a_process_is_not_waited_for(longest: float, step_seconds: float, seconds: float, wrong: str) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", f"import time; time.sleep({LIMIT})"])
    begin = time.monotonic()
    step = Step("", "", (), 0, longest)
    assert watch(process, lambda: 1, step, begin + step_seconds, begin + seconds) == wrong
    runner.stop(process)
    assert process.returncode == -9


SLEEPING = """
import os, subprocess, sys, time

def sleep():
    grandchild = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    with open(os.environ["PIDS"] + ".new", "w") as file:
        print(os.getpid(), grandchild.pid, file=file)
    os.rename(os.environ["PIDS"] + ".new", os.environ["PIDS"])
    time.sleep(600)

def checks(device):
    return {"quick": lambda: None, "sleep": sleep}
"""

CALL = """
import pathlib, signal, sys, gpu
from support.gpu import runner
runner.PUBLISHED = 0.1
gpu.steps_of = lambda *_: {"asleep": gpu.Step("asleep", "asleep", ("cpu",), 600, 600)}
signal.signal(signal.SIGTERM, gpu.stopped)
gpu.main(["--device", "cpu", "--installed", "--out", sys.argv[1]])
"""


def has_quick(record: Path) -> bool:
    return record.exists() and '"quick"' in record.read_text()


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, as Linux has it")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_call_that_is_stopped(tmp_path: Path, how: signal.Signals) -> None:
    """Neither do processes that its steps have started; the results so far are on disk."""
    (tmp_path / "asleep.py").write_text(SLEEPING)
    pids, out = tmp_path / "pids", tmp_path / "out"
    environment = gpu.environment(str(tmp_path)) | {"PIDS": str(pids)}
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), environment["PYTHONPATH"]))
    call = subprocess.Popen([sys.executable, "-c", CALL, str(out)], env=environment)
    deadline = time.monotonic() + LIMIT
    while not (pids.exists() and has_quick(out / "gpu.json")):
        assert call.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    call.send_signal(how)
    assert call.wait(timeout=LIMIT) == {signal.SIGTERM: 143, signal.SIGKILL: -9}[how]
    while any(map(is_running, map(int, pids.read_text().split()))):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (step,) = json.loads((out / "gpu.json").read_text())["steps"]
    assert (step["ended"], [x["check"] for x in step["checks"]]) == (False, ["quick"])
    assert "stopped before its end" in (out / "report.txt").read_text()


def test_the_log_is_limited(tmp_path: Path) -> None:
    """A single process fills its share, all together fill the file; a process's last line is still known."""
    for room in (250, 10):  # the second call appends to the first one's file
        log = Log(tmp_path / "log", largest=250 if room == 250 else 260, share=100)
        for _ in range(3):
            program = [sys.executable, "-S", "-c", "print('x' * 999); print('the end')"]
            with subprocess.Popen(program, stdout=subprocess.PIPE) as process:
                assert Copy(process, log).last_line() == "the end"
    assert (tmp_path / "log").stat().st_size == 260
