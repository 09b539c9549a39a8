"""tests/gpu.py as far as it goes without a GPU: its steps run on the CPU, and say so where something is wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from gpu_steps import build, runner
from gpu_steps.build import output_of
from gpu_steps.child import FAILED, LEFT_OUT, PASSED, record
from gpu_steps.runner import OUT_OF_TIME, Step, run_step, watch

import pyattn

TESTS = Path(__file__).parent

LIMIT = 600
"""Seconds after which a process hangs: far more than a busy machine takes to start one."""

PLANTED = """
import os, sys, time
from gpu_steps import child

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

def checks(*arguments):
    time.sleep(sum(map(float, arguments[1:])))
    return {"succeed": lambda: succeed(*arguments), "fail": fail, "leave out": leave_out, "lose": lose_the_gpu,
            "end": end, "succeed again": lambda: None}
"""


@pytest.fixture
def planted(tmp_path: Path) -> dict[str, str]:
    """The environment of processes that find the module ``planted``."""
    (tmp_path / "planted.py").write_text(PLANTED)
    return gpu.environment(str(tmp_path))


def test_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(TESTS / "gpu.py"), "--out", str(tmp_path / "out")]
    result = subprocess.run(
        command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    sentence = f"gpu.py needs an NVIDIA GPU that torch can use, got torch {torch.__version__} without one\n"
    assert (result.stdout, result.stderr) == (sentence, "")
    assert not (tmp_path / "out").exists()


# The runner


def test_what_fails_is_recorded_and_the_rest_done(planted: dict[str, str], tmp_path: Path) -> None:
    records = run_step(Step("planted", ("0",), LIMIT, LIMIT), planted, tmp_path / "log", time.monotonic() + LIMIT)
    expected = {"succeed": PASSED, "fail": FAILED, "leave out": LEFT_OUT, "lose": FAILED, "end": FAILED}
    assert {x["check"]: x["status"] for x in records} == expected | {"succeed again": PASSED}
    assert records[0]["figures"] == {"slept": "0"}
    messages = [x.get("message") for x in records]
    assert messages[1] == 'ValueError: one sentence (planted.py:10: raise ValueError("one sentence"))'
    assert messages[2] == "not here"
    assert messages[3].startswith("RuntimeError: an illegal memory access (planted.py:19:")
    assert messages[4] == "the process ended with status 3: the last words"
    assert messages[5] is None


PLANTED_TESTS = """
import os, pytest

def test_passes(): pass
def test_fails(): assert 1 == 2
def test_loses_the_gpu():
    import gpu_steps.suite
    gpu_steps.suite.lost = lambda: True
    assert 2 == 3
def test_skips(): pytest.skip("not here")
def test_ends(): os._exit(3)
def test_passes_again(): pass
"""


def test_pytest_is_a_step(tmp_path: Path) -> None:
    """Each test is a check; one that ends the process or loses the GPU fails alone."""
    (tmp_path / "test_broken.py").write_text("import no_such_module")
    (tmp_path / "test_planted.py").write_text(PLANTED_TESTS)
    step = Step("gpu_steps.suite", (str(tmp_path),), LIMIT, LIMIT)
    broken, *records = run_step(step, gpu.environment(""), tmp_path / "log", time.monotonic() + LIMIT)
    assert broken["status"] == FAILED
    assert "No module named 'no_such_module'" in broken["message"]
    found = {x["check"].rpartition("::")[2]: (x["status"], x.get("message", "")) for x in records}
    assert list(found) == re.findall(r"def (\w+)", PLANTED_TESTS)
    assert found["test_passes"] == found["test_passes_again"] == (PASSED, "")
    assert found["test_fails"] == (FAILED, "assert 1 == 2 (test_planted.py:5)")
    assert found["test_loses_the_gpu"] == (FAILED, "assert 2 == 3 (test_planted.py:9)")
    assert found["test_skips"] == (LEFT_OUT, "Skipped: not here")
    assert found["test_ends"][1].startswith("the process ended with status 3")


def test_time_is_respected(planted: dict[str, str], tmp_path: Path) -> None:
    """No check begins when the step's time is over, and no process when that of all is."""
    # The names of the checks come after two seconds, so after the step's one; the first check would take nine more.
    late = run_step(Step("planted", ("9", "2"), 1, LIMIT), planted, tmp_path / "log", time.monotonic() + LIMIT)
    assert [x["check"] for x in late] == ["succeed", "fail", "leave out", "lose", "end", "succeed again"]
    assert {(x["status"], x["message"]) for x in late} == {(LEFT_OUT, OUT_OF_TIME)}
    assert run_step(Step("planted", (), LIMIT), planted, tmp_path / "no log", time.monotonic()) == [
        record("planted", LEFT_OUT, message=OUT_OF_TIME)
    ]
    assert not (tmp_path / "no log").exists()


def test_a_module_that_is_not_there(planted: dict[str, str], tmp_path: Path) -> None:
    (failed,) = run_step(Step("elsewhere", (), LIMIT, LIMIT), planted, tmp_path / "log", time.monotonic() + LIMIT)
    assert failed["status"] == FAILED
    assert failed["message"].endswith("ModuleNotFoundError: No module named 'elsewhere'")


@pytest.mark.parametrize(
    ("longest", "step_seconds", "seconds", "wrong"),
    [(1.0, LIMIT, LIMIT, "no end after 1 s"), (LIMIT, 0, LIMIT, ""), (LIMIT, LIMIT, 1.0, "")],
    ids=["it hangs", "the step's time is over", "all time is over"],
)
def test_a_process_is_not_waited_for(
    tmp_path: Path, longest: float, step_seconds: float, seconds: float, wrong: str
) -> None:
    results = tmp_path / "results"
    results.touch()
    script = f"import time; open({str(results)!r}, 'w').write('[]\\n'); time.sleep({LIMIT})"
    process = subprocess.Popen([sys.executable, "-S", "-c", script], start_new_session=True)
    begin = time.monotonic()
    assert watch(process, results, Step("", (), 0, longest), begin + step_seconds, begin + seconds) == wrong
    runner.stop(process)
    assert process.returncode == -9


# All of it


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    """A GPU by name. Returns what each step is to record; steps that are not in it pass."""
    for name, answer in {
        "is_available": True,
        "get_device_name": "Small GPU",
        "get_device_capability": (9, 0),
        "device_count": 1,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    records: dict[str, list[dict[str, Any]]] = {}
    monkeypatch.setattr(gpu, "run_step", lambda step, *_: records.get(step.name, [record("check", PASSED)]))
    return records


def timed(**rates: float) -> dict[str, dict[str, float]]:
    return {side.replace("_", " "): {"tflops": rate} for side, rate in rates.items()}


def test_the_record(fake_gpu: dict[str, list[dict[str, Any]]], tmp_path: Path, capsys: Any) -> None:
    row = {"shape": "8x16x2048x128", "dtype": "bfloat16", "forward": timed(pyattn=301.4, torch_sdpa=480)}
    fake_gpu["speed"] = [record("fast", PASSED, figures=row | {"backward": timed(pyattn=200)})]
    fake_gpu["sanitizer"] = [record(name, LEFT_OUT, message="not found") for name in "ab"]
    assert gpu.main(["--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert (result["gpu"], result["compute_capability"], result["torch"]) == ("Small GPU", "9.0", torch.__version__)
    assert [step["step"] for step in result["steps"]] == ["build", *(step.name for step in gpu.STEPS)]
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "TFLOP/s, forward/backward pyattn sdpa" in shown
    assert "8x16x2048x128 bfloat16 301/200 480/-" in shown
    assert "sanitizer 0.0 0 0 2 not found (2)" in shown


def test_a_failure_is_shown_and_returned(
    fake_gpu: dict[str, list[dict[str, Any]]], tmp_path: Path, capsys: Any
) -> None:
    fake_gpu["suite"] = [record("bits", FAILED, message="they differ")]
    assert gpu.main(["--out", str(tmp_path), "--installed"]) == 1
    assert "suite: bits: they differ" in capsys.readouterr().out


def test_without_a_build_there_is_nothing_to_test(fake_gpu: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    fake_gpu["build"] = [record("install", FAILED, message="no compiler"), record("info", FAILED, message="no package")]
    assert gpu.main(["--out", str(tmp_path)]) == 1
    rest = json.loads((tmp_path / "gpu.json").read_text())["steps"][1:]
    assert {check["message"] for step in rest for check in step["checks"]} == {"there is no build"}


def test_installing_alone_keeps_the_rest_from_running(
    fake_gpu: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    fake_gpu["build"] = [record("install", PASSED), record("info", FAILED, message="a stray line")]
    assert gpu.main(["--out", str(tmp_path)]) == 1
    rest = json.loads((tmp_path / "gpu.json").read_text())["steps"][1:]
    assert {check["status"] for step in rest for check in step["checks"]} == {PASSED}


def test_a_build_is_configured_for_this_gpu_by_cmake_alone(
    fake_gpu: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(build, "output_of", commands.append)
    monkeypatch.setattr(shutil, "which", lambda name: f"/{name}")
    build.configure(tmp_path / "build", tmp_path / "package")
    (command,) = commands
    assert command[:5] == ["cmake", "-S", str(TESTS.parent), "-B", str(tmp_path / "build")]
    expected = {"-DPYATTN_CUDA=ON", "-DPYATTN_CUDA_ARCHITECTURES=90", f"-DSKBUILD_PROJECT_VERSION={pyattn.__version__}"}
    assert expected <= set(command)
    assert "-DCMAKE_INSTALL_PREFIX=" + str(tmp_path / "package") in command


def test_what_a_build_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"a build needs cmake and c\+\+ and nvcc, not found here"):
        build.configure(tmp_path / "build", tmp_path / "package")


def test_facts_are_read_from_stdout_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; print('a warning', file=sys.stderr); print('a stray line'); print('GPU   Small  GPU')"
    monkeypatch.setattr(build, "output_of", lambda _: output_of([sys.executable, "-c", program]))
    assert build.facts() == {"GPU": "Small  GPU"}
