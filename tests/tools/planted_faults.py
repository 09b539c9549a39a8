"""Plants faults in a copy of the native side, one at a time, and tells which of them the suite catches.

Not collected by pytest: run it by hand where PyTorch, pytest, pybind11, cmake and ninja are installed, after a change
of the kernels or of the tests. A fault whose old text is not there exactly once is an error: the list can't rot.
"""

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pybind11

ROOT = Path(__file__).parents[2]
TESTS = ("accuracy", "decode", "laws", "layouts", "dropout", "autograd", "errors", "build", "exp2")
WANTED = 0.95
TIMEOUT = 400

# An editable install would find the package it was made from, here and in the processes that tests start.
SITE = "import sys\nsys.meta_path = [f for f in sys.meta_path if 'editable' not in type(f).__module__]\n"
RUN = """
import sys
from pathlib import Path
import pyattn, pyattn._C, pytest
assert all(Path(m.__file__).is_relative_to(sys.argv[1]) for m in (pyattn, pyattn._C)), pyattn._C.__file__
sys.exit(pytest.main(sys.argv[2:]))
"""

FAULTS = (ROOT / "tests" / "tools" / "planted_faults.txt").read_text()
"""Files after #, and their faults: the name, the old text, the new."""


class Fault(NamedTuple):
    name: str
    file: str
    old: str
    new: str


NOTHING = Fault("nothing", "csrc/ops.cpp", "#include <pthread.h>", "#include <pthread.h>")
QUICK_BUILD = Fault("quick build", "CMakeLists.txt", "set(optimize -O3)", "set(optimize -O1)")


def parse(text: str) -> list[Fault]:
    faults, file = [], ""
    for header, name, old, new in re.findall(r"^# (.+)$|^([^:\n]+): (.+)\s=> ?(.*)$", text, re.MULTILINE):
        file = header or file
        if not header:
            faults.append(Fault(name, file, old, new))
    return faults


def replaced(folder: Path, fault: Fault) -> str:
    text = (folder / fault.file).read_text()
    if text.count(fault.old) != 1:
        sys.exit(f"{fault.name}: {text.count(fault.old)} times and not once in {fault.file}: {fault.old}")
    return text.replace(fault.old, fault.new)


def environment(copy: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(copy), "PYATTN_ISA": ""}


def prepare(copy: Path, isas: list[str]) -> None:
    """Copies what git tracks and builds it, quickly: the source alone decides the bits, so -O1 will do."""
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
        if name:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    (copy / "sitecustomize.py").write_text(SITE)
    text = replaced(copy, QUICK_BUILD)
    if isas:
        text = re.sub(r"foreach\(isa .*\)", f"foreach(isa {' '.join(isas)})", text)
        table = copy / "csrc" / "cpu" / "dispatch.cpp"
        others = rf'^ +\{{"(?!(?:{"|".join(isas)})")[\s\S]*?::kernels\}},\n'
        table.write_text(re.sub(others, "", table.read_text(), flags=re.MULTILINE))
    (copy / QUICK_BUILD.file).write_text(text)
    version = re.findall(r'__version__ = "(.*)"', (copy / "pyattn" / "__init__.py").read_text())[0]
    options = {"CMAKE_BUILD_TYPE": "Release", "PYATTN_WERROR": "OFF", "SKBUILD_PROJECT_VERSION": version}
    options |= {"Python_EXECUTABLE": sys.executable, "pybind11_DIR": pybind11.get_cmake_dir()}
    options |= {"CMAKE_LIBRARY_OUTPUT_DIRECTORY": str(copy / "pyattn")}
    command = ["cmake", "-S", ".", "-B", "build", "-G", "Ninja", *(f"-D{name}={x}" for name, x in options.items())]
    subprocess.run(command, cwd=copy, env=environment(copy), check=True, stdout=subprocess.DEVNULL)
    shutil.copy2(copy / "build" / "_build.py", copy / "pyattn")


def caught_by(copy: Path, file: str) -> str | None:
    """Builds the copy and runs the suite in it: the first test that fails, or None. What is CUDA's is emulated."""
    options: dict[str, Any] = {"cwd": copy, "env": environment(copy), "capture_output": True, "text": True}
    build = subprocess.run(["cmake", "--build", "build"], check=False, **options)
    if build.returncode:
        sys.exit(f"does not compile:\n{build.stdout[-3000:]}")
    names = ["cuda"] if file.startswith("csrc/cuda/") else TESTS
    tests = [f"tests/test_{name}.py" for name in names]
    command = [sys.executable, "-c", RUN, str(copy), "-x", "-v", "--tb=no", "-p", "no:cacheprovider", *tests]
    try:
        result = subprocess.run(command, check=False, timeout=TIMEOUT, **options)
    except subprocess.TimeoutExpired:
        return f"no end after {TIMEOUT} s"
    if result.returncode == 0:
        return None
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    last = re.findall(r"^tests/\S+", result.stdout, re.MULTILINE)
    if not last:
        sys.exit(f"the suite does not start:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return failed[0] if failed else f"exit status {result.returncode} in {last[-1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", action="append", help="plant only this fault; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    parser.add_argument("--jobs", type=int, default=2, help="copies that work side by side (2)")
    parser.add_argument("--isa", action="append", help="build only those that are named; scalar must be")
    arguments = parser.parse_args()
    faults = parse(FAULTS)
    for fault in (NOTHING, QUICK_BUILD, *faults):
        replaced(ROOT, fault)
    if arguments.only:
        if unknown := set(arguments.only) - {fault.name for fault in faults}:
            parser.error(f"no such fault: {', '.join(sorted(unknown))}")
        faults = [fault for fault in faults if fault.name in arguments.only]
    if arguments.list:
        print("\n".join(f"{fault.file}: {fault.name}" for fault in faults))
        return
    copies: queue.Queue[Path] = queue.Queue()

    def plant(fault: Fault) -> str | None:
        begin, copy = time.monotonic(), copies.get()
        path, before = copy / fault.file, (copy / fault.file).read_text()
        try:
            path.write_text(replaced(copy, fault))
            by = caught_by(copy, fault.file)
        finally:
            path.write_text(before)
            copies.put(copy)
        print(f"{time.monotonic() - begin:4.0f} s  {fault.name}: {by or 'NOT CAUGHT'}", flush=True)
        return by

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        for n in range(arguments.jobs):
            prepare(copy := Path(folder, str(n)), arguments.isa)
            copies.put(copy)
        without, *results = pool.map(plant, (NOTHING, *faults))
    if without:
        sys.exit(f"without a fault the suite fails too: {without}")
    missed = [fault.name for fault, by in zip(faults, results, strict=True) if not by]
    print(f"{len(faults) - len(missed)} of {len(faults)} caught", *missed, sep="\n  ")
    sys.exit(len(missed) > (1 - WANTED) * len(faults))


if __name__ == "__main__":
    main()
