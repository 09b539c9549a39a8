"""Promise: csrc/shared/mask.h gives the same answers as a loop over every pair, in C++."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("options", [(), ("-DPYATTN_PACKED=false",)], ids=["CPU", "GPU"])
def test_answers(tmp_path: Path, options: tuple[str, ...]) -> None:
    """With the summaries of either kind of backend."""
    program = tmp_path / "mask_check"
    command = ["c++", "-std=c++20", "-O1", "-DPYATTN_ISA=check", *options, f"-I{ROOT / 'csrc'}"]
    subprocess.run([*command, str(ROOT / "tests" / "tools" / "mask_check.cpp"), "-o", str(program)], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "ok\n")
