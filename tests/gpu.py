"""Everything that needs a GPU: builds, checks, measures and trains on the one that is here, and records what came out.

Run it by hand in a checkout, where torch, pytest and nvcc are; it needs no network and less than eight minutes::

    python tests/gpu.py --out FOLDER

FOLDER/gpu.json has a record of each check, FOLDER/gpu.log what the processes printed. The exit status is 1 if a check
failed, 2 where there is no GPU.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_steps.child import FAILED, LEFT_OUT, Record, record
from gpu_steps.report import table
from gpu_steps.runner import Step, run_step

TESTS = Path(__file__).resolve().parent
DEVICE = ("cuda",)
STEPS = (
    Step("gpu_steps.suite", (str(TESTS), "--backend", "cuda"), 160, longest=120),
    Step("gpu_steps.sanitizer", ("bfloat16",), 60, longest=120),
    Step("gpu_steps.speed", DEVICE, 100),
    Step("gpu_steps.decoding", DEVICE, 30),
    Step("gpu_steps.training", DEVICE, 100, longest=90),
    Step("gpu_steps.sanitizer", ("float32", "float16", "float64"), 300, longest=120),
)
"""The steps that matter most come first; the last ones get the time that is left."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu.json and gpu.log")
    parser.add_argument("--seconds", type=float, default=480, help="in all; default: %(default)g")
    build = parser.add_mutually_exclusive_group()
    build.add_argument("--installed", action="store_true", help="test the pyattn that Python finds; build none")
    build.add_argument("--wheel", type=Path, help="test this one; build none")
    return parser.parse_args(argv)


def environment(target: str) -> dict[str, str]:
    """The steps' environment: the package in ``target`` before any other, no folder that happens to be current, and the
    tools beside Python and CUDA."""
    paths = [target, str(TESTS), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONSAFEPATH": "1",
        "PATH": os.pathsep.join((os.environ["PATH"], str(Path(sys.executable).parent), "/usr/local/cuda/bin")),
    }


def said(path: str, *command: str) -> str | None:
    """The last line that the command prints; None where it can't be run."""
    program = shutil.which(command[0], path=path)
    if program is None:
        return None
    result = subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False, cwd=TESTS)
    return result.stdout.strip().rpartition("\n")[2] or None


def machine(path: str) -> dict[str, Any]:
    """What is tested on what."""
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": said(path, "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": said(path, "nvcc", "--version"),
        "python": sys.version.split()[0],
        "commit": said(path, "git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"),
    }


def installing_failed(step: dict[str, Any]) -> bool:
    """Without the package nothing can be tested; no other check has that power."""
    return any(check["check"] == "install" and check["status"] == FAILED for check in step["checks"])


def run_steps(steps: Sequence[Step], result: dict[str, Any], target: str, out: Path, seconds: float) -> None:
    """Runs them one after the other; what is known so far is in gpu.json all the time."""
    begin = time.monotonic()
    for step in steps:
        print(f"{time.monotonic() - begin:4.0f} s  {step.name}", flush=True)
        started = time.monotonic()
        records: list[Record]
        if any(installing_failed(done) for done in result["steps"]):
            records = [record(step.name, LEFT_OUT, message="there is no build")]
        else:
            records = run_step(step, environment(target), out / "gpu.log", begin + seconds)
        now = time.monotonic()
        result["steps"].append({"step": step.name, "seconds": round(now - started, 1), "checks": records})
        result["seconds"] = round(now - begin, 1)
        (out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    if not torch.cuda.is_available():
        print(f"gpu.py needs an NVIDIA GPU that torch can use, got torch {torch.__version__} without one")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.log").write_text("")
    result: dict[str, Any] = machine(environment("")["PATH"]) | {"seconds": 0.0, "steps": []}
    with tempfile.TemporaryDirectory() as folder:
        target = "" if options.installed else str(Path(folder, "package"))
        wheel = str(options.wheel.resolve()) if options.wheel else ""
        build = Step("gpu_steps.build", (target, wheel), 240, longest=240)
        run_steps((build, *STEPS), result, target, options.out, options.seconds)
    print("", table(result), sep="\n")
    return int(any(check["status"] == FAILED for step in result["steps"] for check in step["checks"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
