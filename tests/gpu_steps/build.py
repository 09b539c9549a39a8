"""Builds pyattn for this machine's GPU, or unpacks a wheel, and says what will be tested.

CMake alone builds: it needs no network, and no version of pip or scikit-build-core can be the wrong one.
"""

import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from gpu_steps.child import Check

ROOT = Path(__file__).resolve().parents[2]

PYBIND11 = """function(pybind11_add_module name)
  list(REMOVE_ITEM ARGN NO_EXTRAS)
  Python_add_library(${name} MODULE WITH_SOABI ${ARGN})
endfunction()
"""
"""CMakeLists.txt uses this much of pybind11's CMake package; torch's headers include pybind11's."""


def output_of(command: list[str]) -> str:
    """The command's stdout; raises with the end of what it printed where it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"status {result.returncode}: {(result.stdout + result.stderr)[-1500:]}")
    return result.stdout


def architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}"


def configure(build: Path, target: Path) -> None:
    """Runs CMake over the checkout, for this GPU's architecture; ``target`` is where its install goes."""
    missing = [program for program in ("cmake", "c++", "nvcc") if shutil.which(program) is None]
    if missing:
        raise RuntimeError(f"a build needs {' and '.join(missing)}, not found here; --wheel takes one built elsewhere")
    package = build / "pybind11"
    package.mkdir(parents=True)
    (package / "pybind11Config.cmake").write_text(PYBIND11)
    (version,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    defines = {
        "SKBUILD_PROJECT_VERSION": version,
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_INSTALL_PREFIX": str(target),
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": str(package),
        "PYATTN_CUDA": "ON",
        "PYATTN_CUDA_ARCHITECTURES": architecture(),
        "PYATTN_WERROR": "OFF",
    }
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = [f"-D{name}={value}" for name, value in defines.items()]
    output_of(["cmake", "-S", str(ROOT), "-B", str(build), *generator, *options])


def install(target: Path, wheel: str) -> None:
    """Puts the package into ``target``, from the wheel or else from the checkout."""
    if wheel:
        output_of([sys.executable, "-m", "zipfile", "-e", wheel, str(target)])
    else:
        build = target.with_name("build")
        configure(build, target)
        output_of(["cmake", "--build", str(build), "--parallel"])
        shutil.copytree(ROOT / "pyattn", target / "pyattn", ignore=shutil.ignore_patterns("__pycache__"))
        output_of(["cmake", "--install", str(build)])
    file = Path(output_of([sys.executable, "-c", "from pyattn import _C; print(_C.__file__)"]).strip())
    if not file.is_relative_to(target):
        raise RuntimeError("another pyattn is found before the one built here: uninstall it, or take --installed")


def facts() -> dict[str, str]:
    """What ``pyattn info`` says, which fails where there is no GPU or no kernel."""
    lines = output_of([sys.executable, "-m", "pyattn", "info", "--device", "cuda"]).splitlines()
    return {name: value.strip() for name, gap, value in (line.partition("  ") for line in lines) if gap}


def checks(target: str, wheel: str) -> dict[str, Check]:
    """``target`` "": the installed one is tested. ``wheel`` "": the checkout is built."""
    installed: dict[str, Check] = {"install": partial(install, Path(target), wheel)} if target else {}
    return installed | {"info": facts}
