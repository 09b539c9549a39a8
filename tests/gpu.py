"""Everything that needs a GPU: builds, checks, measures and trains on this machine's GPU, and records the results.

Run it by hand in a checkout on a machine with torch, pytest and nvcc; it needs no network::

    python tests/gpu.py --out FOLDER
    python tests/gpu.py --out FOLDER --steps laws,speed

A call ends within --seconds. A second call with the same FOLDER and --steps adds the steps that the first had no time
for; the build is kept. FOLDER/gpu.json has a record of each check and FOLDER/report.txt a summary, both rewritten as
checks end; FOLDER/gpu.log has the processes' output. --device cpu rehearses all steps without a GPU.

The exit status is 1 if a check failed, 2 if there is no GPU or an option is wrong.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.gpu import hardware
from support.gpu.child import FAILED, LEFT_OUT, Record, record
from support.gpu.device import DEVICES, Device
from support.gpu.log import Log
from support.gpu.report import table
from support.gpu.results import OtherRecordError, Results
from support.gpu.runner import Step, run_step, stop_all

TESTS = Path(__file__).resolve().parent


def steps_of(device: Device, target: str, wheel: str) -> dict[str, Step]:
    """The steps by name, in their order: the first ones tell whether the later ones are worth their time."""
    on = (device.name,)
    steps = (
        Step("build", "support.gpu.build", (*on, target, wheel), 400, longest=400),
        Step("smoke", "support.gpu.smoke", on, 120, longest=120),
        Step("on_gpu", "support.gpu.suite", (*on, "on_gpu"), 240, longest=120, shares=device.shares),
        Step("laws", "support.gpu.suite", (*on, "laws"), 360, longest=120, shares=device.shares),
        Step("speed", "support.gpu.speed", on, 120),
        Step("decoding", "support.gpu.decoding", on, 60),
        Step("ncu", "support.gpu.counters", on, 120, longest=120),
        Step("sanitizer", "support.gpu.sanitizer", on, 400, longest=120),
        Step("training", "support.gpu.training", on, 120, longest=120),
    )
    return {step.name: step for step in steps}


class UsageError(Exception):
    """An option is wrong; the message says which."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu.json, report.txt and gpu.log")
    parser.add_argument("--steps", help="comma-separated names; a build comes before any. Default: all")
    parser.add_argument("--seconds", type=float, default=570, help="in all; default: %(default)g")
    parser.add_argument("--commit", help="what is tested; default: $PYATTN_COMMIT, or what git says")
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="cpu: a rehearsal; default: %(default)s")
    kept = TESTS.parent / "build" / "gpu"
    parser.add_argument("--build", type=Path, default=kept, help="folder that is kept; default: build/gpu")
    build = parser.add_mutually_exclusive_group()
    build.add_argument("--installed", action="store_true", help="test the pyattn that Python finds; build none")
    build.add_argument("--wheel", type=Path, help="test this one; build none")
    return parser.parse_args(argv)


def chosen(names: str | None, steps: dict[str, Step]) -> list[Step]:
    """The build and the steps of these names, in the steps' order."""
    wanted = list(steps) if names is None else names.split(",")
    unknown = [name for name in wanted if name not in steps]
    if unknown:
        raise UsageError(f"--steps must be among {', '.join(steps)}, got {', '.join(unknown)}")
    return [step for step in steps.values() if step.name in {"build", *wanted}]


def environment(target: str) -> dict[str, str]:
    """The steps' environment: finds the package in ``target`` first, never the current folder, and CUDA's tools."""
    paths = [target, str(TESTS), str(TESTS / "tools"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONSAFEPATH": "1",
        "PATH": os.pathsep.join((os.environ["PATH"], str(Path(sys.executable).parent), "/usr/local/cuda/bin")),
    }


def said(path: str, *command: str) -> str | None:
    """The last line that the command prints; None if it can't run."""
    program = shutil.which(command[0], path=path)
    if program is None:
        return None
    result = subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False, cwd=TESTS)
    return result.stdout.strip().rpartition("\n")[2] or None


def tested(device: Device, commit: str | None) -> dict[str, Any]:
    """The commit and the machine that a record describes."""
    path = environment("")["PATH"]
    by_git = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return hardware.facts(device) | {
        "driver": said(path, "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": said(path, "nvcc", "--version"),
        "python": sys.version.split()[0],
        "commit": commit or os.environ.get("PYATTN_COMMIT") or said(path, *by_git),
    }


def run_steps(steps: Sequence[Step], results: Results, target: str, log: Log, seconds: float) -> None:
    """Runs the steps in turn; all results so far are always on disk."""
    begin = time.monotonic()
    is_built = True
    for step in steps:
        print(f"{time.monotonic() - begin:4.0f} s  {step.name}", flush=True)
        started = time.monotonic()

        def put(records: list[Record], *, ended: bool, step: Step = step, started: float = started) -> None:
            results.put(step.name, time.monotonic() - started, records, ended=ended)

        if is_built:
            end = begin + seconds
            records = run_step(step, environment(target), log, end, lambda known, put=put: put(known, ended=False))
            records = records or [record(step.name, FAILED, message="there is nothing to check")]
        else:
            records = [record(step.name, LEFT_OUT, message="there is no build")]
        put(records, ended=True)
        is_built &= not any(known["check"] == "install" and known["status"] != "passed" for known in records)


def call(options: argparse.Namespace) -> int:
    device = DEVICES[options.device]
    target = "" if options.installed else str((options.build / device.name / "package").resolve())
    steps = steps_of(device, target, str(options.wheel.resolve()) if options.wheel else "")
    mine = chosen(options.steps, steps)
    if not hardware.is_here(device):
        import torch

        raise UsageError(f"needs an NVIDIA GPU that torch can use, got torch {torch.__version__} without one")
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        results = Results(options.out, tested(device, options.commit), list(steps))
    except OtherRecordError as error:
        raise UsageError(f"--out must be empty or hold a record of the same, got one of {error}") from error
    run_steps(mine, results, target, Log(options.out / "gpu.log"), options.seconds)
    print("", table(results.known), sep="\n")
    return int(results.failed([step.name for step in mine]))


def main(argv: Sequence[str]) -> int:
    try:
        return call(parse(argv))
    except UsageError as error:
        print(f"gpu.py: {error}")
        return 2


def stopped(number: int, frame: Any) -> None:
    """Ends the call and its processes, which would hold the GPU if they outlived it."""
    stop_all()
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stopped)
    signal.signal(signal.SIGINT, stopped)
    sys.exit(main(sys.argv[1:]))
