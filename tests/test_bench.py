"""Promise: the benchmark compares what computes the same, measures what it says, and leaves the state as it was."""

import json
import time

import pytest
import torch
from matplotlib import image

from pyattn import _C, reference
from pyattn.cli import bench, contenders, main
from pyattn.cli.timing import in_turn, peak_flops, peak_memory


@pytest.mark.parametrize("name", contenders.functions(flex=False))
def test_functions_compute_the_same(name):
    q, k, v = torch.randn(3, 2, 3, 40, 16)
    before = _C.active_isa()
    out = contenders.functions(flex=False)[name](q, k, v)
    _C.set_isa(before)
    torch.testing.assert_close(out, reference.attention(q, k, v))


@pytest.mark.parametrize("name", contenders.modules(16, 4, 10, flex=False))
def test_modules_are_causal(name):
    module = contenders.modules(16, 4, 10, flex=False)[name]
    x = torch.randn(2, 10, 16)
    changed = x.clone()
    changed[:, 6:] = 0
    out, other = module(x), module(changed)
    assert out.shape == x.shape
    torch.testing.assert_close(out[:, :6], other[:, :6])
    assert not torch.allclose(out[:, 6:], other[:, 6:])


def test_times_and_their_ratios():
    times = in_turn({"sdpa": lambda: time.sleep(0.002), "slow": lambda: time.sleep(0.006)}, "sdpa", 0.01)
    assert times["sdpa"].speedup == 1.0
    assert 0.1 < times["slow"].speedup < 0.7
    assert times["slow"].low <= times["slow"].seconds <= times["slow"].high
    assert times["slow"].seconds >= 0.006


def test_peak_memory_sees_an_allocation():
    assert 60 < peak_memory(lambda: torch.ones(2**24)) / 2**20 < 120


def test_peak_is_reached_by_no_product():
    """Of 512 x 512 matrices, in torch's own library, on one thread; of three tries one may be disturbed."""
    a = torch.randn(512, 512)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = in_turn({"sdpa": lambda: a @ a}, "sdpa", 0.1)["sdpa"].low
        peak = max(peak_flops("float32", 1) for _ in range(3))
    finally:
        torch.set_num_threads(threads)
    assert 0.2 < 2 * 512**3 / seconds / peak < 1.1


def test_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "MODULES", ((1, 8, 16, 2),))
    before = _C.active_isa()
    options = f"--quick --shapes 1x2x9x4 2x1x70x8 --dtype float32 float16 --threads 1 --out {tmp_path}"
    threads = torch.get_num_threads()
    try:
        assert main(["bench", *options.split()]) == 0
    finally:
        torch.set_num_threads(threads)
    assert _C.active_isa() == before
    shown = capsys.readouterr().out
    record = json.loads((tmp_path / "results.json").read_text())
    sides = {row["side"] for row in record["results"]}
    assert sides >= {f"pyattn {isa}" for isa in _C.available_isas()} | {"torch sdpa", "pyattn MultiHeadAttention"}
    for row in record["results"]:
        assert row["side"] in shown
        assert row["forward"]["seconds"] > 0
        assert row["forward_backward"]["seconds"] > row["forward"]["seconds"] / 2
        assert 0 < row["forward"].get("of_peak", 0.5) < 1
    assert image.imread(tmp_path / "speedups.png").shape[1] == 1680


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--shapes 1x2x3", "pyattn: --shapes must be of the form BxHxTxD, each at least 1, got 1x2x3"),
        ("--shapes 1x2x0x4", "pyattn: --shapes must be of the form BxHxTxD, each at least 1, got 1x2x0x4"),
        ("--threads 0", "pyattn: --threads must be at least 1, got 0"),
    ],
)
def test_bad_input(options, message, capsys):
    assert main(["bench", *options.split()]) == 2
    assert capsys.readouterr().err.strip() == message
