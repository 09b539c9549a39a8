"""Plants faults in a copy of the native side, one at a time, and tells which of them the suite catches.

Not collected by pytest: run it by hand where PyTorch, pytest, pybind11, cmake and ninja are installed, after a change
of the kernels or of the tests::

    python tests/tools/planted_faults.py --check            # every fault applies and compiles: a minute or two
    python tests/tools/planted_faults.py --results FILE     # plants them all; run again, it goes on where it stopped

A fault is planted for one instruction set after the other and in the emulated kernels, until a test fails. It fails
alone when it does not apply or compile. The exit status is 1 if one did, or if fewer than 95 % are caught.
"""

import argparse
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import emulated
import pybind11

from pyattn import _C

TOOLS = Path(__file__).parent
ROOT = TOOLS.parents[1]
WANTED = 0.95
IDLE = 60
"""Seconds after which processes that only sleep are taken for ones that hang."""
LOOP = 3600
"""Seconds of processor time, after which a process loops: a run of all tests takes a twentieth of it."""

LIKELY = {
    "decode": ("cpu/decode.h", "cpu/dots.h", "cpu/splits.h"),
    "dropout": ("cpu/dropout.h", "cuda/dropout.h"),
    "math": ("cpu/simd/math.h",),
    "laws": ("cpu/simd/half.h",),
    "layouts": ("ops.cpp", "params.h"),
}
"""The tests most likely to catch a fault, by its file in csrc; they run first."""
TESTS = ("accuracy", "masks", "scores", "laws", "decode", "layouts", "dropout", "math", "cuda", "cuda_races")
"""Tests that run for one backend."""
OTHER_TESTS = ("mask", "autograd", "build", "errors")
"""Tests that run with the active instruction set."""

# An editable install would find the package it was made from, here and in the processes that tests start.
SITE = "import sys\nsys.meta_path = [f for f in sys.meta_path if 'editable' not in type(f).__module__]\n"
RUN = """
import sys
from pathlib import Path
copy = Path(sys.argv[1])
sys.path.insert(0, str(copy / "tests" / "tools"))
import emulated, pyattn, pyattn._C, pytest
assert all(Path(m.__file__).is_relative_to(copy) for m in (emulated, pyattn, pyattn._C)), pyattn._C.__file__
compile_kernels = emulated.compile_kernels
emulated.compile_kernels = lambda *a: compile_kernels(*a) if len(a) > 2 else copy / "emulated.so"  # more: instrumented
sys.exit(pytest.main(sys.argv[2:]))
"""


class Fault(NamedTuple):
    name: str
    file: str
    old: str
    new: str


class Unit(NamedTuple):
    """An object of the native side.

    Attributes:
        command: compiles it, in the folder ``build``.
        backend: whose kernels it holds; "" for the rest of the module.
    """

    object: str
    command: list[str]
    backend: str


def parse(text: str) -> list[Fault]:
    """Files after #, and their faults: the name, the old text, the new."""
    faults, file = [], ""
    for header, name, old, new in re.findall(r"^# (.+)$|^([^:\n]+): (.+)\s=> ?(.*)$", text, re.MULTILINE):
        file = header or file
        if not header:
            faults.append(Fault(name, file, old, new))
    assert len({fault.name for fault in faults}) == len(faults), "two faults with one name: results go by names"
    return faults


class BadFaultError(Exception):
    """The fault does not apply, or what it makes does not compile."""


class Copy:
    """A configured copy of what git tracks. It compiles at -O1, because the source alone decides the bits."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.build = folder, folder / "build"
        for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
            if name:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        (folder / "sitecustomize.py").write_text(SITE)
        version = re.findall(r'__version__ = "(.*)"', (folder / "pyattn" / "__init__.py").read_text())[0]
        options = {"CMAKE_BUILD_TYPE": "Release", "PYATTN_CUDA": "OFF", "SKBUILD_PROJECT_VERSION": version}
        options |= {"Python_EXECUTABLE": sys.executable, "pybind11_DIR": pybind11.get_cmake_dir()}
        options |= {"CMAKE_LIBRARY_OUTPUT_DIRECTORY": str(folder / "pyattn"), "PYATTN_WERROR": "OFF"}
        defines = [f"-D{name}={value}" for name, value in options.items()]
        self.run(["cmake", "-S", ".", "-B", "build", "-G", "Ninja", *defines], cwd=folder)
        shutil.copy2(self.build / "_build.py", folder / "pyattn")
        self.units = list(self.native_units()) + list(self.emulated_units())

    def environment(self) -> dict[str, str]:
        """One that finds the copy alone."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return os.environ | {"PATH": path, "PYTHONPATH": str(self.folder)}

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """The command's result in ``build``."""
        defaults = {"cwd": self.build, "env": self.environment(), "capture_output": True, "text": True, "check": True}
        return subprocess.run(command, **(defaults | options))

    def native_units(self) -> Iterator[Unit]:
        for entry in json.loads((self.build / "compile_commands.json").read_text()):
            command = ["-O1" if x == "-O3" else x for x in shlex.split(entry["command"])]
            at = command.index("-o")
            isa = re.search(r"kernels_(\w+)\.dir", command[at + 1])
            if not isa or isa[1] in _C.available_isas():
                yield Unit(command[at + 1], command[:at] + command[at + 2 :], isa[1] if isa else "")

    def emulated_units(self) -> Iterator[Unit]:
        flags = ["-O1" if x == "-O2" else x for x in (*emulated.FLAGS, *emulated.INCLUDES)]
        flags = [f"-I../{x.removeprefix('-I')}" if x.startswith("-I") else x for x in flags]
        for dtype in emulated.DTYPES.values():
            source = ["-x", "c++", "-c", "../csrc/cuda/kernels.cu"]
            yield Unit(f"emulated_{dtype}.o", ["c++", *flags, "-w", f"-DPYATTN_DTYPE={dtype}", *source], "emulated")
        for source in emulated.SOURCES:
            yield Unit(f"emulated_{Path(source).stem}.o", ["c++", *flags, "-c", f"../{source}"], "emulated")

    def compile(self, unit: Unit, *options: str) -> None:
        result = self.run([*unit.command, *options], check=False)
        if result.returncode:
            error = re.search(r"error: .*", result.stderr)
            raise BadFaultError(f"does not compile: {error[0] if error else result.stderr[-300:]}")

    def link(self) -> None:
        """Makes the module, by CMake's command for it, and the library of the emulated kernels."""
        command = self.run(["ninja", "-t", "commands", "_C"]).stdout.splitlines()[-1]
        self.run(["sh", "-c", command])
        objects = [unit.object for unit in self.units if unit.backend == "emulated"]
        self.run(["c++", "-shared", "-pthread", "-o", "../emulated.so", *objects])

    def read(self, unit: Unit) -> set[str]:
        """The files of the project that the unit is made from."""
        made_from = self.run([*unit.command, "-MM"]).stdout.replace("\\\n", " ").split()[1:]
        paths = ((self.build / name).resolve() for name in made_from)
        return {
            str(path.relative_to(self.folder.resolve())) for path in paths if path.is_relative_to(self.folder.resolve())
        }

    def watch(self, command: list[str], isa: str) -> subprocess.CompletedProcess[str] | None:
        """The command's result; None if it hangs, as a fault that spoils the heap may."""
        environment = self.environment() | {"PYATTN_ISA": isa}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        before, since = "", time.monotonic()
        while True:
            try:
                out, err = process.communicate(timeout=5)
                return subprocess.CompletedProcess(command, process.returncode, out, err)
            except subprocess.TimeoutExpired:
                states = ["ps", "--sid", str(process.pid), "-o", "stat=", "-o", "cputimes="]
                now = subprocess.run(states, check=False, capture_output=True, text=True).stdout
                if now != before or re.search("^R", now, re.MULTILINE):  # waiting for a processor is no sleep
                    before, since = now, time.monotonic()
                elif time.monotonic() - since > IDLE:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
                    return None

    def first_failure(self, *arguments: str, isa: str = "") -> str | None:
        """The first test that fails."""
        command = [sys.executable, "-c", RUN, str(self.folder), "-x", "-v", "--tb=no", "-p", "no:cacheprovider"]
        result = self.watch(["prlimit", f"--cpu={LOOP}", *command, *arguments], isa)
        if result is None:
            return "hangs"
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
        if failed or result.returncode == 0:
            return failed[0] if failed else None
        if result.returncode > 0:
            raise BadFaultError(f"the suite does not run:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
        last = re.findall(r"^tests/\S+", result.stdout, re.MULTILINE)
        return f"signal {-result.returncode} in {last[-1] if last else 'the imports'}"

    def caught_by(self, file: str, backend: str) -> str | None:
        """The first test that fails, of one backend or, if "", of all instruction sets."""
        likely = [name for name, files in LIKELY.items() if file.removeprefix("csrc/") in files]

        def paths(names: tuple[str, ...]) -> list[str]:
            return [f"tests/test_{name}.py" for name in sorted(names, key=lambda name: name not in likely)]

        isa = backend.replace("emulated", "")
        by = self.first_failure("--backend", backend or "cpu", *paths(TESTS), isa=isa)
        return by if by or backend == "emulated" else self.first_failure(*paths(OTHER_TESTS), isa=isa)


def planted(copy: Copy, fault: Fault) -> str:
    """The file's text with the fault in it."""
    text = (copy.folder / fault.file).read_text()
    if text.count(fault.old) != 1:
        raise BadFaultError(f"does not apply: {text.count(fault.old)} times and not once in {fault.file}: {fault.old}")
    return text.replace(fault.old, fault.new)


def check(copy: Copy, fault: Fault, units: list[Unit]) -> str:
    """Raises BadFaultError, or says that it is none. The best instruction set has all code; float16 is as bfloat16."""
    checked = [
        unit for unit in units if unit.backend not in _C.available_isas()[1:] and unit.object != "emulated_f16.o"
    ]
    for unit in checked:
        copy.compile(unit, "-fsyntax-only")
    return f"compiles {len(checked)} times"


def plant(copy: Copy, fault: Fault, units: list[Unit]) -> str | None:
    """The test that catches the fault, planted for one backend after the other; portable kernels are the slowest."""
    changed = False
    for backend in sorted(dict.fromkeys(unit.backend for unit in units), key=("scalar", "emulated").count):
        mine = [unit for unit in units if unit.backend == backend]
        before = {copy.build / unit.object: (copy.build / unit.object).read_bytes() for unit in mine}
        try:
            for unit in mine:
                copy.compile(unit, "-o", unit.object)
            if all(path.read_bytes() == content for path, content in before.items()):
                continue
            changed = True
            copy.link()
            if by := copy.caught_by(fault.file, backend):
                return f"{by} ({backend or 'module'})"
        finally:
            for path, content in before.items():
                path.write_bytes(content)
    if not changed:
        raise BadFaultError("changes no object")
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="apply and compile each fault; run no test")
    parser.add_argument("--only", metavar="NAME", action="append", help="plant only this fault; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="copies that work side by side; default: %(default)d"
    )
    parser.add_argument(
        "--results", type=Path, help="a line of JSON for each fault that was planted; these are not planted again"
    )
    arguments = parser.parse_args()
    faults = parse((TOOLS / "planted_faults.txt").read_text())
    if arguments.only:
        if unknown := set(arguments.only) - {fault.name for fault in faults}:
            parser.error(f"no such fault: {', '.join(sorted(unknown))}")
        faults = [fault for fault in faults if fault.name in arguments.only]
    if arguments.list:
        print("\n".join(f"{fault.file}: {fault.name}" for fault in faults))
        return
    results: dict[str, str | None] = {}
    if arguments.results and arguments.results.exists():
        results = dict(json.loads(line) for line in arguments.results.read_text().splitlines())
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        copies: queue.Queue[Copy] = queue.Queue()
        made = list(pool.map(Copy, (Path(folder, str(n)) for n in range(arguments.jobs))))
        for copy in made:
            copies.put(copy)
        files = list(pool.map(made[0].read, made[0].units))
        if not arguments.check:
            for copy in made:
                list(pool.map(lambda unit, copy=copy: copy.compile(unit, "-o", unit.object), copy.units))
                copy.link()
            if not results and (by := made[0].caught_by("", "") or made[0].caught_by("", "emulated")):
                sys.exit(f"without a fault the suite fails too: {by}")
        work: Callable[[Copy, Fault, list[Unit]], str | None] = check if arguments.check else plant

        def attempt(fault: Fault) -> bool:
            """Whether the fault is a good one."""
            if fault.name in results:
                return True
            begin, copy = time.monotonic(), copies.get()
            path = copy.folder / fault.file
            before = path.read_text()
            try:
                path.write_text(planted(copy, fault))
                units = [unit for unit, read in zip(copy.units, files, strict=True) if fault.file in read]
                result, good = work(copy, fault, units), True
                results[fault.name] = result
            except BadFaultError as error:
                result, good = f"BAD FAULT: {error}", False
            finally:
                path.write_text(before)
                copies.put(copy)
            print(f"{time.monotonic() - begin:4.0f} s  {fault.name}: {result or 'NOT CAUGHT'}", flush=True)
            if good and arguments.results:
                with arguments.results.open("a") as file:
                    file.write(json.dumps([fault.name, result]) + "\n")
            return good

        bad = [fault.name for fault, good in zip(faults, pool.map(attempt, faults), strict=True) if not good]
    missed = [fault.name for fault in faults if fault.name in results and results[fault.name] is None]
    done = len(faults) - len(bad)
    print(f"{done} of {len(faults)} faults apply and compile", *bad, sep="\n  ")
    if not arguments.check:
        print(f"{done - len(missed)} of {done} caught", *missed, sep="\n  ")
    sys.exit(bool(bad) or len(missed) > (1 - WANTED) * len(faults))


if __name__ == "__main__":
    main()
