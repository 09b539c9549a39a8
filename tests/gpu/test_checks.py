"""Promise: the measurements of tests/gpu.py work on the CPU: speed, training, verdicts of sanitizer and ncu."""

from pathlib import Path

import pytest
import torch
from support.gpu import counters, decoding, device, hardware, report, sanitizer, speed, training
from support.gpu.child import FAILED, LEFT_OUT, PASSED, judge
from support.gpu.device import CPU, CUDA

from pyattn import ops
from pyattn.ops.flops import flops


def planted(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a program that is found before any other of its name."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_the_sanitizers_program(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, ...]] = []
    for program in ("batches", "packed"):
        monkeypatch.setitem(sanitizer.PROGRAMS, program, (lambda *arguments: tried.append(arguments),))
        sanitizer.main("cuda", "bfloat16", program)
    assert [dims for *_, dims in [(x[0], x[2:]) for x in tried]] == 2 * list(CUDA.watched)
    sanitizer.batches(torch.bfloat16, "cpu", 40, 33)


@pytest.mark.parametrize(
    ("status", "output", "result"), [(0, "", PASSED), (9, "race", FAILED), (1, "Device not supported", LEFT_OUT)]
)
def test_the_sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, output: str, result: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check = sanitizer.checks(CUDA)["racecheck float32"]
    assert judge("", check)["message"] == "compute-sanitizer not found"
    said = f'echo "{output} $2 $3 $4 $PYTORCH_NO_CUDA_MEMORY_CACHING"'
    planted(tmp_path, "compute-sanitizer", f"{said}\nexit {status}", monkeypatch)
    found = judge("", check)
    assert found["status"] == result
    assert result != FAILED or "racecheck, status 9: race racecheck --report-api-errors no 1" in found["message"]


NAMES = "void pyattn::cuda::(anonymous namespace)::{}<bf16, (int)128>(Params)", "{}", "void pyattn::<unnamed>::{}<f>(P)"
TABLE = """==PROF== Connected to process 7
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value","Rule Name"
"""


@pytest.mark.parametrize("name", NAMES)
def test_counters(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However ncu spells a kernel's name; its advice is not taken for a counter."""
    lines = [f'"0","{name.format(x)}","Duration","ns","1,234",""\n' for x in counters.KERNELS]
    text = TABLE + "".join(lines) + f'"0","{name.format("forward")}","","","","Advice"\n'
    planted(tmp_path, "ncu", f"cat << END\n{text}END", monkeypatch)
    figures = counters.count(CUDA)
    assert figures == {"kernels": {x: {"Duration": "1,234 ns"} for x in counters.KERNELS}}
    assert "1,234 ns" in report.counted([figures])[1]


@pytest.mark.parametrize(
    ("said", "status", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - no permission", LEFT_OUT, "ncu says: ERR_NVGPUCTRPERM - no permission"),
        ("==ERROR== The application returned an error code (1)", FAILED, "nothing counted of"),
        ("==WARNING== No kernels were profiled.", FAILED, "nothing counted of"),
    ],
)
def test_nothing_counted(said: str, status: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the machine does not let ncu count, nothing is wrong; if our program fails, something is."""
    check = counters.checks(CUDA)["4x16x4096x128"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert judge("", check)["message"] == "ncu not found"
    planted(tmp_path, "ncu", f"echo '{said}'\nexit 1", monkeypatch)
    found = judge("", check)
    assert found["status"] == status
    assert message in found["message"]


# Figures


@pytest.mark.parametrize("seqlen", [1, 2048])
def test_operations(seqlen: int) -> None:
    """The operator counts the whole diagonal, FlashAttention's papers half of it."""
    shape = (2, 3, seqlen, 64)
    q = torch.empty(shape, device="meta")
    diagonal = 2 * 2 * 3 * seqlen * 64
    assert speed.forward_flops(shape) + diagonal == flops(ops.attention_forward, q, q, q)
    assert speed.BACKWARD * flops(ops.attention_forward, q, q, q) == flops(
        ops.attention_backward, q, None, q, q, q, q, None, None
    )


def test_shapes_have_as_many_tokens_and_columns() -> None:
    for batch, heads, seqlen, head_dim in (device.shape_of(n, d) for n in (2048, 16384) for d in (64, 128)):
        assert (batch * seqlen, heads * head_dim) == (16384, 2048)


def test_speed_on_the_cpu() -> None:
    row = speed.measure(CPU, (1, 2, 128, 16), torch.float32)
    assert row["forward"].keys() == row["backward"].keys()
    assert "torch sdpa" in row["forward"]
    for which, operations in (("forward", 1048576), ("backward", 2621440)):
        for side in row[which].values():
            assert side["tflops"] == pytest.approx(operations / side["seconds"] / 1e12)
    assert len(report.speeds([row])) == 2


def test_decoding_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A side has enough calls to fill its device's cache four times; the time is that of one call."""
    size = 2 * 2 * 2 * 128 * 16 * 4
    monkeypatch.setattr(hardware, "cache_bytes", lambda _: 3 * size)
    row = decoding.measure(CPU, (2, 4, 2, 128, 16), torch.float32)
    assert row["calls"] == 13
    assert row["sides"].keys() == {"torch sum", "pyattn", "torch sdpa"}
    for side in row["sides"].values():
        assert side["low"] <= side["seconds"] <= side["high"] < side["wall_seconds"]
        assert side["gb_per_s"] == pytest.approx(size / side["seconds"] / 1e9)
    assert len(report.rates([row])) == 2


def test_a_side_that_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other sides are timed, and the report shows a dash."""

    def together(_: device.Device, calls: list[hardware.Call]) -> hardware.Call:
        if calls[0].func is decoding.attention:  # type: ignore[attr-defined]
            raise RuntimeError("not permitted while capturing")
        return calls[0]

    sides: dict[str, list[hardware.Call]] = {
        "torch sum": [decoding.partial(torch.sum, torch.ones(3))],
        "pyattn": [decoding.partial(decoding.attention)],
    }
    monkeypatch.setattr(hardware, "together", together)
    graphs, reasons = decoding.in_graphs(CPU, sides)
    assert list(graphs) == ["torch sum"]
    assert reasons == {"pyattn": "RuntimeError: not permitted while capturing"}
    rate = {"gb_per_s": 2.0}
    rows = [{"shape": "1", "dtype": "f", "sides": {"torch sum": rate, "pyattn": rate}}]
    rows += [{"shape": "2", "dtype": "f", "sides": {"torch sum": rate}}]
    assert report.rates(rows)[-1].split() == ["2", "f", "2", "-"]


def test_curves_that_come_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "curve_of", lambda name, *_: {0: 5.0, 9: 2.0 if name == "sdpa" else 2.2})
    result = judge("", training.checks(CUDA)["bfloat16"])
    assert result["message"].startswith("AssertionError: losses 0.200 apart")
