"""Promise: tests/tools/cuda_resources.py reads registers and spills from nvcc's log."""

import sys
from pathlib import Path

import cuda_resources
import pytest

KERNEL = "_ZN6pyattn4cuda7forwardINS_4bf16ELi128ENS0_5PlainIS2_EELb0EEEvNS_13ForwardParamsE"


def entry(arch: str, spilled: int = 0) -> str:
    return (
        f"ptxas info    : Compiling entry function '{KERNEL}' for 'sm_{arch}'\n"
        f"    0 bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads\n"
        f"ptxas info    : Used 250 registers, used 1 barriers\n"
    )


@pytest.mark.parametrize(
    ("archs", "spilled", "status"),
    [(["90", "80"], 0, 0), (["120", "90a", "90", "100f"], 0, 0), (["90a"], cuda_resources.MOST_SPILLED + 4, 1)],
)
def test_every_architecture_has_a_column(
    archs: list[str], spilled: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: object
) -> None:
    """In order: an architecture's specific instructions (90a) come after the generic ones."""
    (tmp_path / "log").write_text("".join(entry(arch, spilled) for arch in archs))
    monkeypatch.setattr(sys, "argv", ["cuda_resources.py", str(tmp_path / "log")])
    assert cuda_resources.main() == status
    head, row, last = capsys.readouterr().out.splitlines()  # type: ignore[attr-defined]
    order = ["80", "90", "90a", "100f", "120"]
    assert head.split()[-len(archs) :] == [f"sm_{arch}" for arch in order if arch in archs]
    assert row.startswith("forward<bf16, 128>")
    assert last.startswith(f"1 kernels for {len(archs)} architectures, at most {spilled} bytes")


def test_hopper_has_kernels_of_16_bits_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: object
) -> None:
    """A kernel that only 9.0 has, and one that all others have, are missing nowhere; one that 12.0 lacks is."""
    monkeypatch.setattr(sys, "argv", ["cuda_resources.py", str(tmp_path / "log")])
    together = KERNEL.replace("7forward", "16forward_together")
    own, others = entry("90a").replace(KERNEL, together), entry("80") + entry("120")
    floats = "".join(entry(arch).replace("bf16", "x") for arch in ("80", "90", "120"))
    for log, status in ((own + others + floats, 0), (own + entry("80") + floats, 1)):
        (tmp_path / "log").write_text(log)
        assert cuda_resources.main() == status


def test_a_log_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log").write_text("nothing was compiled\n")
    monkeypatch.setattr(sys, "argv", ["cuda_resources.py", str(tmp_path / "log")])
    assert cuda_resources.main() == 1
