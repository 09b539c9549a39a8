"""Promise: the elementary functions of every instruction set keep the contracts in csrc/cpu/simd/math.h, in C++."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def measure(isa: str, step: int, folder: Path) -> list[float]:
    """The largest errors in ulp, in float and double each: exp2, tanh, its derivative, log.

    Compiled with the flags of the build.
    """
    flags = re.search(rf"set\(flags_{isa} (.*)\)", (ROOT / "CMakeLists.txt").read_text())
    assert flags is not None
    command = ["c++", "-std=c++20", "-O2", "-ffp-contract=off", "-Wno-psabi", *flags[1].strip('"').split()]
    command += [f"-DPYATTN_ISA={isa}", f'-DPYATTN_ISA_HEADER="cpu/simd/{isa}.h"', f"-I{ROOT / 'csrc'}"]
    program = folder / "math"
    subprocess.run([*command, str(ROOT / "tests" / "tools" / "math.cpp"), "-o", str(program)], check=True)
    result = subprocess.run([str(program), str(step)], check=True, capture_output=True, text=True)
    return [float(x) for x in result.stdout.split()]


@pytest.mark.parametrize("step", [1009, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_errors_and_ends(isa: str, step: int, tmp_path: Path) -> None:
    errors = measure(isa, step, tmp_path)
    bounds = (2.1, 1.75, 2.6, 2.6, 5, 5, 1, 1) if isa == "scalar" else (1.8, 1.5, 2.6, 2.6, 2, 2, 1, 1)
    for error, bound in zip(errors, bounds, strict=True):
        assert 0.5 < error <= bound
