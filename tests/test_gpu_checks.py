"""What tests/gpu.py measures, on the CPU: speed, training, and the sanitizer's verdict."""

from pathlib import Path

import pytest
import torch
from gpu_steps import decoding, report, sanitizer, speed, training
from gpu_steps.child import FAILED, LEFT_OUT, PASSED, judge

from pyattn import _ops
from pyattn.cli import main


def test_the_sanitizers_program() -> None:
    sanitizer.small(torch.bfloat16, "cpu")


@pytest.mark.parametrize(
    ("status", "output", "result"), [(0, "", PASSED), (9, "race", FAILED), (1, "Device not supported", LEFT_OUT)]
)
def test_the_sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, output: str, result: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check = sanitizer.checks("float32")["racecheck float32"]
    assert judge("", check)["message"] == "compute-sanitizer not found"
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "{output} $2 $PYTORCH_NO_CUDA_MEMORY_CACHING"\nexit {status}\n')
    tool.chmod(0o755)
    found = judge("", check)
    assert found["status"] == result
    assert result != FAILED or "racecheck, status 9: race racecheck 1" in found["message"]


# Figures


@pytest.mark.parametrize("seqlen", [1, 2048])
def test_operations(seqlen: int) -> None:
    """The operator counts the diagonal whole, FlashAttention's papers by half."""
    shape = (2, 3, seqlen, 64)
    q = torch.empty(shape, device="meta")
    diagonal = 2 * 2 * 3 * seqlen * 64
    assert speed.forward_flops(shape) + diagonal == _ops.forward_flops(q, q, q)
    assert speed.BACKWARD * _ops.forward_flops(q, q, q) == _ops.backward_flops(q, None, q, q, q, q, None, None)


def test_shapes_have_as_many_tokens_and_columns() -> None:
    for batch, heads, seqlen, head_dim in (speed.shape_of(n, d) for n in (2048, 16384) for d in (64, 128)):
        assert (batch * seqlen, heads * head_dim) == (16384, 2048)


def test_speed_on_the_cpu() -> None:
    row = speed.measure((1, 2, 128, 16), torch.float32, "cpu", 0.01)
    assert row["forward"].keys() == row["backward"].keys()
    assert "torch sdpa" in row["forward"]
    for which, operations in (("forward", 1048576), ("backward", 2621440)):
        for side in row[which].values():
            assert side["tflops"] == pytest.approx(operations / side["seconds"] / 1e12)
    assert len(report.speeds([row])) == 2


def test_decoding_on_the_cpu() -> None:
    row = decoding.measure((2, 4, 2, 128, 16), torch.float32, "cpu", 0.01)
    assert row["sides"].keys() == {"torch sum", "pyattn", "torch sdpa"}
    for side in row["sides"].values():
        assert side["gb_per_s"] == pytest.approx(2 * 2 * 2 * 128 * 16 * 4 / side["seconds"] / 1e9)
    assert len(report.rates([row])) == 2


def test_curves_are_read_from_what_train_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("All work and no play makes Jack a dull boy. " * 200)
    size = "--layers 1 --heads 1 --width 8 --context 16 --batch 2 --steps 4 --eval-every 2 --sample 0"
    commands: list[list[str]] = []

    def output_of(command: list[str]) -> str:
        commands.append(command)
        assert main(command[3:]) == 0
        return capsys.readouterr().out

    monkeypatch.setattr(training, "output_of", output_of)
    curve = training.curve_of("sdpa", "float32", "cpu", (*size.split(), "--data", str(text)))
    assert list(curve) == [0, 2, 4]
    assert all(0 < loss < 6 for loss in curve.values())
    assert commands[0][1:4] == ["-m", "pyattn", "train"]


def test_curves_that_come_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "curve_of", lambda name, *_: {0: 5.0, 9: 2.0 if name == "sdpa" else 2.2})
    result = judge("", training.checks("cpu")["bfloat16"])
    assert result["message"].startswith("AssertionError: losses 0.200 apart")
