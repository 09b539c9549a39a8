"""Promise: tests/gpu.py handles its options, the build, the record that calls add to, and the report."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from support.gpu import build
from support.gpu.build import output_of
from support.gpu.child import FAILED, LEFT_OUT, PASSED, poisoned, record
from support.gpu.device import CPU, CUDA

import pyattn

TESTS = Path(__file__).parents[1]


def test_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(TESTS / "gpu.py"), "--out", str(tmp_path / "out")]
    result = subprocess.run(
        command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    sentence = f"gpu.py: needs an NVIDIA GPU that torch can use, got torch {torch.__version__} without one\n"
    assert (result.stdout, result.stderr) == (sentence, "")
    assert not (tmp_path / "out").exists()


Records = dict[str, list[dict[str, Any]]]


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Records:
    """A simulated GPU. Returns the records that steps are to give; steps not in it pass."""
    for name, answer in {
        "is_available": True,
        "get_device_name": "Small GPU",
        "get_device_capability": (9, 0),
        "device_count": 1,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    records: Records = {}
    monkeypatch.setattr(gpu, "run_step", lambda step, *_: records.get(step.name, [record("check", PASSED)]))
    return records


def known(folder: Path) -> dict[str, Any]:
    """The recorded steps by name."""
    return {step["step"]: step for step in json.loads((folder / "gpu.json").read_text())["steps"]}


def timed(**rates: float) -> dict[str, dict[str, float]]:
    return {side.replace("_", " "): {"tflops": rate} for side, rate in rates.items()}


def test_the_record(fake_gpu: Records, tmp_path: Path, capsys: Any) -> None:
    row = {"shape": "8x16x2048x128", "dtype": "bfloat16", "forward": timed(pyattn=301.4, torch_sdpa=480)}
    fake_gpu["speed"] = [record("fast", PASSED, figures=row | {"backward": timed(pyattn=200)})]
    fake_gpu["sanitizer"] = [record(name, LEFT_OUT, message="not found") for name in "ab"]
    assert gpu.main(["--out", str(tmp_path), "--commit", "0123abc"]) == 0
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert (result["gpu"], result["compute_capability"], result["torch"]) == ("Small GPU", "9.0", torch.__version__)
    assert result["commit"] == "0123abc"
    assert [step["step"] for step in result["steps"]] == list(gpu.steps_of(CUDA, "", ""))
    printed = capsys.readouterr().out
    shown = [" ".join(line.split()) for line in printed.splitlines()]
    assert "TFLOP/s, forward/backward pyattn sdpa" in shown
    assert "8x16x2048x128 bfloat16 301/200 480/-" in shown
    assert "sanitizer 0.0 0 0 2 not found (2)" in shown
    assert printed.endswith((tmp_path / "report.txt").read_text())


def test_steps_are_chosen_and_added(fake_gpu: Records, tmp_path: Path, capsys: Any) -> None:
    """Calls add to the record of one commit; omitting a step removes nothing."""
    call = ["--out", str(tmp_path), "--commit", "0123abc"]
    fake_gpu["laws"] = [record("law", FAILED, message="broken")]
    assert gpu.main([*call, "--steps", "laws,smoke"]) == 1
    assert list(known(tmp_path)) == ["build", "smoke", "laws"]
    fake_gpu["laws"] = [record("law", LEFT_OUT, message="out of time")]
    assert gpu.main([*call, "--steps", "training"]) == 0
    assert gpu.main([*call, "--steps", "laws"]) == 1
    assert list(known(tmp_path)) == ["build", "smoke", "laws", "training"]
    assert known(tmp_path)["laws"]["checks"][0]["message"] == "broken"
    before = (tmp_path / "gpu.json").read_bytes()
    capsys.readouterr()
    assert gpu.main(["--out", str(tmp_path), "--commit", "4567def"]) == 2
    sentence = "gpu.py: --out must be empty or hold a record of the same, got one of commit 0123abc, now 4567def\n"
    assert capsys.readouterr().out == sentence
    assert (tmp_path / "gpu.json").read_bytes() == before


def test_a_step_that_is_not_there(tmp_path: Path, capsys: Any) -> None:
    assert gpu.main(["--out", str(tmp_path), "--steps", "laws,sped"]) == 2
    names = "build, smoke, on_gpu, laws, speed, decoding, ncu, sanitizer, training"
    assert capsys.readouterr().out == f"gpu.py: --steps must be among {names}, got sped\n"


def test_a_failure_is_shown_and_returned(fake_gpu: Records, tmp_path: Path, capsys: Any) -> None:
    """Failures that lost the GPU come first; a step without any check has failed."""
    fake_gpu["smoke"], fake_gpu["laws"] = (
        [],
        [
            record("bits", FAILED, message="they differ"),
            poisoned(record("edge", FAILED, message="an illegal memory access")),
        ],
    )
    assert gpu.main(["--out", str(tmp_path), "--installed"]) == 1
    shown = capsys.readouterr().out
    lost, empty, bits = map(
        shown.index,
        (
            "laws: edge: the GPU was lost: an illegal memory access",
            "smoke: smoke: there is nothing to check",
            "laws: bits: they differ",
        ),
    )
    assert lost < empty < bits


@pytest.mark.parametrize("status", [FAILED, LEFT_OUT])
def test_without_a_build_there_is_nothing_to_test(fake_gpu: Records, tmp_path: Path, status: str) -> None:
    fake_gpu["build"] = [record("install", status, message="no compiler"), record("info", status, message="no package")]
    gpu.main(["--out", str(tmp_path)])
    _, *rest = known(tmp_path).values()
    assert {check["message"] for step in rest for check in step["checks"]} == {"there is no build"}


def test_installing_alone_keeps_the_rest_from_running(fake_gpu: Records, tmp_path: Path) -> None:
    fake_gpu["build"] = [record("install", PASSED), record("info", FAILED, message="a stray line")]
    assert gpu.main(["--out", str(tmp_path)]) == 1
    _, *rest = known(tmp_path).values()
    assert {check["status"] for step in rest for check in step["checks"]} == {PASSED}


def test_each_step_has_time_in_a_call() -> None:
    """No step lasts longer than a call, and none may hang longer than it lasts."""
    seconds = gpu.parse(["--out", "out"]).seconds
    for step in gpu.steps_of(CUDA, "", "").values():
        assert step.longest <= step.seconds < seconds


# The build


@pytest.mark.usefixtures("fake_gpu")
def test_a_build_is_configured_for_this_gpu_by_cmake_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept folder is configured again."""
    commands: list[list[str]] = []
    monkeypatch.setattr(build, "run_aloud", commands.append)
    monkeypatch.setattr(shutil, "which", lambda name: f"/{name}")
    for _ in range(2):
        build.configure(tmp_path / "build", tmp_path / "package", CUDA)
    command, again = commands
    assert command == again
    assert command[:5] == ["cmake", "-S", str(TESTS.parent), "-B", str(tmp_path / "build")]
    expected = {"-DPYATTN_CUDA=ON", "-DPYATTN_CUDA_ARCHITECTURES=90", f"-DSKBUILD_PROJECT_VERSION={pyattn.__version__}"}
    assert expected <= set(command)
    assert "-DCMAKE_INSTALL_PREFIX=" + str(tmp_path / "package") in command


def test_what_a_build_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"a build needs cmake and c\+\+ and nvcc, not found here"):
        build.configure(tmp_path / "build", tmp_path / "package", CUDA)


def test_a_command_that_fails_says_how(capfd: pytest.CaptureFixture[str]) -> None:
    """Its output is in the log at once, and the end of it in the error."""
    program = "import sys; print('compiling'); print('out of memory', file=sys.stderr); sys.exit(3)"
    with pytest.raises(RuntimeError, match=r"(?s)status 3: .*out of memory"):
        build.run_aloud([sys.executable, "-S", "-c", program])
    assert "compiling\n" in capfd.readouterr().out


def test_facts_are_read_from_stdout_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; print('a warning', file=sys.stderr); print('a stray line'); print('GPU   Small  GPU')"
    monkeypatch.setattr(build, "output_of", lambda _: output_of([sys.executable, "-c", program]))
    assert build.facts(CPU) == {"GPU": "Small  GPU"}
