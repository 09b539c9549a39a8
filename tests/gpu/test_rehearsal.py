"""Promise: every step of tests/gpu.py runs by its own command line on this machine's processor.

Programs that only a GPU's machine has are planted on the PATH: tools that run the program they would watch, and
compilers that copy the installed libraries. The gate runs these tests; they take 40 seconds.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gpu
import pytest

from pyattn import _C

pytestmark = pytest.mark.gate

TESTS = Path(__file__).parents[1]

RUN_IT = 'while [ ! -x "$1" ]; do shift; done\n'
"""Skips a tool's options: the program that it runs comes after them."""
TO_OUTPUT = 'while [ "$1" != -o ]; do shift; done\n'
"""Leaves out what precedes the file that a compiler or linker writes."""

INSTALLED = Path(_C.__file__).parent

ONCE = 'case "$tool $*" in memcheck*\\ all) exec "$@" ;; esac'
"""Runs the program with all cases under one tool; smoke's memcheck of some of them and racecheck pass unrun."""

COUNTED = """"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"""
for number, kernel in enumerate(("forward", "backward_keys", "backward_queries")):
    COUNTED += (
        f'"{number}","7","void pyattn::cuda::<unnamed>::{kernel}<pyattn::bf16, 128>(P)","S","Duration","ns","1,0"\n'
    )

PLANTED = {
    "compute-sanitizer": f'tool=$2\n{RUN_IT}[ "$PYTORCH_NO_CUDA_MEMORY_CACHING" ] || exit\n{ONCE}',
    "ncu": f"{RUN_IT}\"$@\" || exit\necho '==PROF== Disconnected'\ncat << END\n{COUNTED}END",
    "nvidia-smi": "echo 580.65.06",
    "compile": f'case "$*" in */csrc/* | */Unity/*) ;; *) exec "$@" ;; esac\n{TO_OUTPUT}: > "$2"',
    "link": f'case "$*" in *libpyattn*) ;; *) exec "$@" ;; esac\n{TO_OUTPUT}cp {INSTALLED}/"${{2##*/}}" "$2"',
}


def planted(folder: Path) -> dict[str, str]:
    """The environment in which these programs are found; one thread, because the steps are many and sequential."""
    folder.mkdir()
    for name, script in PLANTED.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return os.environ | {
        "PATH": os.pathsep.join((str(folder), os.environ["PATH"])),
        "CMAKE_CXX_COMPILER_LAUNCHER": str(folder / "compile"),
        "CMAKE_CXX_LINKER_LAUNCHER": str(folder / "link"),
        "OMP_NUM_THREADS": "1",
        "PYATTN_COMMIT": "0123abc",
    }


def test_all_steps(tmp_path: Path) -> None:
    """Without a compiler, as in tests of wheels, the installed package is not rebuilt."""
    path = gpu.environment("")["PATH"]
    compiles = all(shutil.which(program, path=path) for program in ("cmake", "ninja", "c++"))
    build = ["--build", str(tmp_path / "build")] if compiles else ["--installed"]
    out = tmp_path / "out"
    command = [sys.executable, str(TESTS / "gpu.py"), "--device", "cpu", "--seconds", "3000", "--out", str(out), *build]
    result = subprocess.run(command, env=planted(tmp_path / "bin"), capture_output=True, text=True, check=False)
    shown = result.stdout + result.stderr + (out / "gpu.log").read_text()[-3000:]
    assert result.returncode == 0, shown
    record = json.loads((out / "gpu.json").read_text())
    assert (record["commit"], record["driver"]) == ("0123abc", "580.65.06")
    counts = {step["step"]: len(step["checks"]) for step in record["steps"]}
    assert list(counts) == list(gpu.steps_of(gpu.DEVICES["cpu"], "", ""))
    assert all(step["ended"] for step in record["steps"])
    assert {check["status"] for step in record["steps"] for check in step["checks"]} == {"passed"}, shown
    assert min(counts[name] for name in ("smoke", "on_gpu", "laws")) >= 3, counts
    (trained,) = record["steps"][-1]["checks"]
    for curve in trained["figures"]["validation_loss"].values():
        assert list(curve) == ["0", "2", "4"]
        assert all(0 < loss < 6 for loss in curve.values())
    report = (out / "report.txt").read_text()
    assert result.stdout.endswith(report)
    assert "backward_queries" in report
    assert sorted(file.name for file in out.iterdir()) == ["gpu.json", "gpu.log", "report.txt"]


def test_a_gpus_tests_are_collected(tmp_path: Path) -> None:
    """By the command lines of the suite's steps; collecting needs no GPU, and each test is in exactly one share."""
    steps = gpu.steps_of(gpu.DEVICES["cuda"], "", "")
    names: list[str] = []
    for step in (steps["on_gpu"], steps["laws"]):
        results = tmp_path / step.name
        command = [sys.executable, "-m", "support.gpu", step.module, str(results), "0", "1", "0", *step.arguments]
        environment = gpu.environment("") | {"PYTEST_ADDOPTS": "--collect-only"}
        shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        found, *broken = map(json.loads, results.read_text().splitlines())
        assert (len(found) >= 500, broken) == (True, []), shown[-3000:]
        names += found
    assert len(set(names)) == len(names)
    assert all("cuda" in name for name in names)
    files = {name.partition("::")[0] for name in names}
    assert {"gpu/test_on_gpu.py", "gpu/test_graphs.py", "gpu/test_pages.py", "attention/test_laws.py"} <= files
