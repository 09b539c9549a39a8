"""Builds pyattn for this machine's GPU, or unpacks a wheel, and reports what will be tested.

CMake builds it without pip or scikit-build-core, so no network is needed and their versions don't matter. The build
folder is kept: after an interrupted build, the next one continues, and compiles only what has changed.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import deque
from functools import partial
from pathlib import Path

import torch
from editable import WITHOUT_EDITABLE
from support.gpu.child import Check
from support.gpu.device import Device
from support.gpu.hardware import build_settings

ROOT = Path(__file__).resolve().parents[3]

PYBIND11 = """function(pybind11_add_module name)
  list(REMOVE_ITEM ARGN NO_EXTRAS)
  Python_add_library(${name} MODULE WITH_SOABI ${ARGN})
  target_include_directories(${name} SYSTEM PRIVATE "@TORCH@/include")
endfunction()
"""
"""The parts of pybind11's CMake package that CMakeLists.txt uses; torch's headers include pybind11's."""

LAST_LINES = 25
"""Lines of a failed command's output to show in its error."""

MADE = ("__pycache__", "*.so", "_build.py")
"""Generated files among the package's sources."""


def output_of(command: list[str]) -> str:
    """The command's stdout; if it fails, raises with the end of its output."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"status {result.returncode}: {(result.stdout + result.stderr)[-1500:]}")
    return result.stdout


def run_aloud(command: list[str]) -> None:
    """Runs the command with its output passed on at once, so a stopped process has shown its progress."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        last = deque[str](maxlen=LAST_LINES)
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last.append(line)
    if process.returncode:
        raise RuntimeError(f"status {process.returncode}: {''.join(last)[-1500:]}")


def processors() -> int:
    """The processors that this process may use: in a container possibly fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def configure(build: Path, target: Path, device: Device) -> None:
    """Runs CMake over the checkout; ``target`` is the install folder."""
    missing = [program for program in ("cmake", *device.compilers) if shutil.which(program) is None]
    if missing:
        raise RuntimeError(f"a build needs {' and '.join(missing)}, not found here; --wheel takes one built elsewhere")
    package = build / "pybind11"
    package.mkdir(parents=True, exist_ok=True)
    (package / "pybind11Config.cmake").write_text(PYBIND11.replace("@TORCH@", torch.__path__[0]))
    (version,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    defines = {
        "SKBUILD_PROJECT_VERSION": version,
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_INSTALL_PREFIX": str(target),
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": str(package),
        "PYATTN_WERROR": "OFF",
    } | build_settings(device)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = [f"-D{name}={value}" for name, value in defines.items()]
    run_aloud(["cmake", "-S", str(ROOT), "-B", str(build), *generator, *options])


def install(device: Device, target: Path, wheel: str) -> None:
    """Puts the package into ``target``, from the wheel if given, else from the checkout."""
    shutil.rmtree(target, ignore_errors=True)
    if wheel:
        output_of([sys.executable, "-m", "zipfile", "-e", wheel, str(target)])
    else:
        build = target.with_name("cmake")
        configure(build, target, device)
        run_aloud(["cmake", "--build", str(build), "--parallel", str(processors())])
        shutil.copytree(ROOT / "pyattn", target / "pyattn", ignore=shutil.ignore_patterns(*MADE))
        run_aloud(["cmake", "--install", str(build)])
    (target / "sitecustomize.py").write_text(WITHOUT_EDITABLE)
    file = Path(output_of([sys.executable, "-c", "from pyattn import _C; print(_C.__file__)"]).strip())
    if not file.is_relative_to(target):
        raise RuntimeError("another pyattn is found before the one built here: uninstall it, or take --installed")


def facts(device: Device) -> dict[str, str]:
    """The output of ``pyattn info``, which fails if there is no GPU or no kernel."""
    lines = output_of([sys.executable, "-m", "pyattn", "info", "--device", device.name]).splitlines()
    return {name: value.strip() for name, gap, value in (line.partition("  ") for line in lines) if gap}


def checks(device: Device, target: str, wheel: str) -> dict[str, Check]:
    """``target`` "": the installed package is tested. ``wheel`` "": the checkout is built."""
    installed: dict[str, Check] = {"install": partial(install, device, Path(target), wheel)} if target else {}
    return installed | {"info": partial(facts, device)}
