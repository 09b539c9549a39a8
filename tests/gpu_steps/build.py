"""Builds pyattn for this machine's GPU alone, or unpacks a wheel, and says what will be tested. Needs no network."""

import importlib.util
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from gpu_steps.child import Check

ROOT = Path(__file__).resolve().parents[2]
BUILD_TOOLS = {"scikit_build_core": "scikit-build-core", "pybind11": "pybind11"}
"""Modules, and what installs them. (scikit-build-core names cmake, ninja or nvcc itself, where one is missing.)"""


def output_of(command: list[str]) -> str:
    """What the command prints; raises with the end of it where it fails."""
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"status {result.returncode}: {result.stdout[-1500:]}")
    return result.stdout


def settings(build: Path) -> dict[str, str]:
    """Of scikit-build-core."""
    missing = [name for module, name in BUILD_TOOLS.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise RuntimeError(f"a build needs {' and '.join(missing)}, not found here; --wheel takes one built elsewhere")
    major, minor = torch.cuda.get_device_capability()
    defines = {"PYATTN_CUDA": "ON", "PYATTN_CUDA_ARCHITECTURES": f"{major}{minor}", "PYATTN_WERROR": "OFF"}
    return {"build-dir": str(build)} | {f"cmake.define.{name}": value for name, value in defines.items()}


def install(target: Path, wheel: str) -> None:
    """Into ``target``, from the wheel or else the checkout."""
    chosen = {} if wheel else settings(target.with_name("build"))
    options = [f"--config-settings={name}={value}" for name, value in chosen.items()]
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation"]
    output_of([*pip, "--target", str(target), *options, wheel or str(ROOT)])
    file = Path(output_of([sys.executable, "-c", "from pyattn import _C; print(_C.__file__)"]).strip())
    if not file.is_relative_to(target):
        raise RuntimeError("another pyattn is found before the one built here: uninstall it, or take --installed")


def facts() -> dict[str, str]:
    """What ``pyattn info`` says, which fails where there is no GPU or no kernel."""
    lines = output_of([sys.executable, "-m", "pyattn", "info", "--device", "cuda"]).splitlines()
    return {name: value.strip() for name, value in (line.split("  ", 1) for line in lines)}


def checks(target: str, wheel: str) -> dict[str, Check]:
    """``target`` "": the installed one is tested. ``wheel`` "": the checkout is built."""
    installed: dict[str, Check] = {"install": partial(install, Path(target), wheel)} if target else {}
    return installed | {"info": facts}
