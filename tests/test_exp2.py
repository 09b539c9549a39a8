"""The exponential of every instruction set keeps the contract in csrc/cpu/simd/math.h, measured in C++."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def measure(isa: str, step: int, folder: Path) -> tuple[float, float]:
    """The largest errors in ulp, float and double; compiled with the flags of the build."""
    flags = re.search(rf"set\(flags_{isa} (.*)\)", (ROOT / "CMakeLists.txt").read_text())
    assert flags is not None
    command = ["c++", "-std=c++20", "-O2", "-ffp-contract=off", "-Wno-psabi", *flags[1].strip('"').split()]
    command += [f"-DPYATTN_ISA={isa}", f'-DPYATTN_ISA_HEADER="cpu/simd/{isa}.h"', f"-I{ROOT / 'csrc'}"]
    program = folder / "exp2"
    subprocess.run([*command, str(ROOT / "tests" / "tools" / "exp2.cpp"), "-o", str(program)], check=True)
    result = subprocess.run([str(program), str(step)], check=True, capture_output=True, text=True)
    single, double = map(float, result.stdout.split())
    return single, double


@pytest.mark.parametrize("step", [1009, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_error_and_ends(isa: str, step: int, tmp_path: Path) -> None:
    single, double = measure(isa, step, tmp_path)
    assert 0.5 < single <= (2.1 if isa == "scalar" else 1.8)
    assert 0.5 < double <= (1.75 if isa == "scalar" else 1.5)
