"""The checks of tests/gpu.py, on the CPU: they pass there too, and say so where something is wrong."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gpu_steps import accuracy, features, laws, layouts, report, sanitizer, speed, training
from gpu_steps.child import FAILED, LEFT_OUT, PASSED, judge
from torch import Tensor

from pyattn import _ops, attention
from pyattn.cli import main

SMALL = re.compile(r"^[a-z_]+( 24x20)?( torch.bfloat16)?$|x20x20-(offset|full-scale|causal\().* torch.bfloat16$")

CHECKS = {
    name: check
    for step in (accuracy, laws, layouts, features)
    for name, check in step.checks("cpu").items()
    if SMALL.search(name)
} | {
    "offsets past 2^31": partial(layouts.far_apart, torch.bfloat16, "cpu", 2**10),
    "results past 2^31": partial(layouts.many_heads, "cpu", 9),
    "sanitizer": partial(sanitizer.small, torch.bfloat16, "cpu"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "REPEATS", 2)
    assert judge(name, CHECKS[name])["status"] == PASSED


def faulty(fault: str) -> Callable[..., Any]:
    """An attention of which one result is a hundredth too large, or that does something else wrong."""

    def attend(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False, **options: Any) -> Any:
        inputs = {"dq": q, "dk": k, "dv": v}
        if fault in inputs:
            inputs[fault] = inputs[fault] * 1.01 - (inputs[fault] * 0.01).detach()
        if fault == "mask":
            options["causal"] = False
        if fault == "seed":
            options["dropout_seed"] //= 2
        out, lse = attention(*inputs.values(), return_lse=True, **options)
        if fault == "out":
            out = out * 1.01
        if fault == "lse":
            lse = lse * 1.01
        if fault == "noise":
            out = out + torch.rand_like(out) / 1000
        return (out, lse) if return_lse else out

    return attend


@pytest.mark.parametrize(
    ("module", "fault", "check", "message"),
    [
        (accuracy, "out", "1x3x3x257x257x20x20-full-scale-0.3 torch.float64", "out is off by "),
        (accuracy, "lse", "1x3x3x257x257x20x20-full-scale-0.3 torch.float64", "lse is off by "),
        (accuracy, "dq", "1x3x3x257x257x20x20-full-scale-0.3 torch.float64", "dq is off by "),
        (accuracy, "dk", "1x3x3x257x257x20x20-full-scale-0.3 torch.float64", "dk is off by "),
        (accuracy, "dv", "1x3x3x257x257x20x20-full-scale-0.3 torch.float64", "dv is off by "),
        (laws, "dq", "gradients_are_differences", "GradcheckError"),
        (laws, "mask", "unseen_changes_nothing 24x20 torch.float32", "AssertionError: out"),
        (laws, "mask", "rows_that_see_nothing torch.float32", "(out[:, :, :170] == 0)"),
        (laws, "mask", "nan_that_is_seen_arrives torch.float32", "torch.equal(out.isnan(), expected)"),
        (laws, "seed", "dropout_is_that_of_the_cpu torch.float32", "torch.equal(out != 0, kept)"),
        (laws, "noise", "same_bits_each_time torch.float32", "assert torch.equal(x, y)"),
        (layouts, "noise", "nan_padded torch.float32", "assert torch.equal(x, y)"),
        (features, "noise", "autocast_casts", "assert torch.equal(out"),
    ],
    ids=lambda x: x.__name__ if isinstance(x, ModuleType) else x,
)
def test_a_check_fails(
    module: ModuleType, fault: str, check: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "attention", faulty(fault))
    result = judge(check, module.checks("cpu")[check])
    assert result["status"] == FAILED
    assert message in result["message"]


def test_what_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "attention", lambda q, k, v, **options: q)
    result = judge("", laws.checks("cpu")["bad_input_is_refused"])
    assert result["message"].startswith("AssertionError: k must have dtype float32, got float64: None")


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
