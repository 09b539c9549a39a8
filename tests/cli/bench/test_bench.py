"""Promise: the benchmark compares equal computations, measures what it claims, and restores all settings."""

import json
import math

import pytest
import torch

import pyattn
from pyattn import reference
from pyattn.cli import main, timing
from pyattn.cli.bench import command, comparisons
from pyattn.cli.bench.sides import contenders, mask_cost, runtimes


@pytest.fixture
def gpu(monkeypatch, small_gpu):
    """The CPU stands in for a GPU. Returns a record of the calls made to it."""
    done: dict[str, list] = {"randn": [], "to": [], "clock": [], "deterministic": []}
    randn, to, stopwatch = torch.randn, torch.nn.Module.to, timing.stopwatch

    def randn_here(*size, device, **options):
        done["randn"].append(device)
        return randn(*size, **options)

    def stay(self, device, dtype):
        done["to"].append(device)
        return to(self, dtype)

    monkeypatch.setattr(torch, "randn", randn_here)
    monkeypatch.setattr(torch.nn.Module, "to", stay)
    monkeypatch.setattr(timing, "stopwatch", lambda device: done["clock"].append(device) or stopwatch("cpu"))
    monkeypatch.setattr(pyattn, "set_deterministic", done["deterministic"].append)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    memory = {"reset_peak_memory_stats": None, "memory_allocated": 2, "max_memory_allocated": 9}
    for name, answer in memory.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    return done


FUNCTIONS = [("cpu", name) for name in contenders.functions("cpu", flex=False)]
ON_A_GPU = "pyattn", "pyattn nondeterministic", "torch sdpa", "torch sdpa flash", "plain torch"
FUNCTIONS += [("cuda", name) for name in ON_A_GPU]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("place", "name"), FUNCTIONS)
def test_functions_compute_the_same(place, name):
    q, k, v = torch.rand(3, 2, 3, 40, 16)
    out = contenders.functions(place, flex=False)[name](q, k, v)
    torch.testing.assert_close(out, reference.attention(q, k, v))


def test_fused_kernels_are_taken_one_by_one(monkeypatch):
    backends = torch.backends.cuda
    enabled = {
        "flash": backends.flash_sdp_enabled,
        "efficient": backends.mem_efficient_sdp_enabled,
        "cudnn": backends.cudnn_sdp_enabled,
        "math": backends.math_sdp_enabled,
    }
    monkeypatch.setattr(contenders, "sdpa", lambda *_: [name for name, is_enabled in enabled.items() if is_enabled()])
    functions = contenders.functions("cuda", flex=False)
    for name in ("flash", "efficient", "cudnn"):
        assert functions[f"torch sdpa {name}"](*torch.ones(3, 1, 1, 1, 1)) == [name]
    assert functions["torch sdpa"](*torch.ones(3, 1, 1, 1, 1)) == list(enabled)


def test_determinism_is_set_when_the_backward_runs(gpu):
    met = []
    functions = contenders.functions("cuda", flex=False)
    q = torch.rand(1, 2, 9, 4, requires_grad=True)
    with contenders.settings_kept():
        for name in ("pyattn nondeterministic", "pyattn", "pyattn nondeterministic"):
            out = functions[name](q, q, q)
            out.register_hook(lambda _: met.append(gpu["deterministic"][-1]))
            out.sum().backward()
    assert met == [False, True, False]
    assert gpu["deterministic"][-1] is True


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


@pytest.fixture
def least(monkeypatch):
    """Runs a tiny module, whatever the time."""
    monkeypatch.setattr(comparisons, "QUICK_MODULES", ((1, 8, 16, 2),))
    monkeypatch.setattr(command, "QUICK_SECONDS", math.inf)


@pytest.mark.usefixtures("least")
def test_run(tmp_path, shown):
    before = pyattn.isa()
    options = f"--quick --shapes 1x2x9x4 2x1x70x8 --dtype float32 float16 --threads 1 --out {tmp_path}"
    printed = shown(f"bench {options}").out
    assert pyattn.isa() == before
    record = json.loads((tmp_path / "results.json").read_text())
    sides = {row["side"] for row in record["results"]}
    assert sides >= {f"pyattn {isa}" for isa in pyattn.isas()} | {"torch sdpa", "pyattn MultiHeadAttention"}
    for row in record["results"]:
        assert row["side"] in printed
        if row["side"] in runtimes.COMPILERS:  # present if installed; they may refuse these shapes
            continue
        assert row["forward"]["seconds"] > 0
        assert row["forward_backward"]["seconds"] > 0
        assert ("of_peak" in row["forward"]) == (not row["what"].startswith("module"))
        assert {"rounds", "wall_seconds", "cpu_seconds", "waited"} <= row["forward"].keys()


@pytest.mark.usefixtures("least")
def test_run_on_a_gpu(gpu, tmp_path, shown):
    lines = shown(f"bench --device cuda --quick --shapes 1x2x70x8 --dtype float32 --out {tmp_path}").out.splitlines()
    assert set(gpu["randn"]) == set(gpu["to"]) == set(gpu["clock"]) == {"cuda"}
    assert lines[0] == f"Small GPU, torch {torch.__version__}; speed-ups over torch sdpa"
    assert lines[1] == "--quick makes 2 of 3 comparisons, in fewer rounds"
    heads = [line for line in lines if line.startswith("forward")]
    assert ["TFLOP/s" in line for line in heads] == [True, True, False, False]  # the function, then the module
    assert not any("peak" in line for line in heads)
    record = json.loads((tmp_path / "results.json").read_text())
    assert (record["gpu"], record["cuda"], record["peak_flops"]) == ("Small GPU", "13.0", {})
    rows = {row["side"]: row for row in reversed(record["results"])}
    ours, fused = ["pyattn", "pyattn nondeterministic"], [f"torch sdpa {name}" for name in contenders.FUSED]
    assert rows.keys() >= {*ours, "torch sdpa", *fused, "plain torch", "pyattn MultiHeadAttention"}
    assert "left_out" in rows["torch sdpa cudnn"]
    for row in (rows[name] for name in [*ours, "torch sdpa", "plain torch"]):
        for key, share in (("forward", 1.0), ("forward_backward", 3.5)):
            flops = share * 2 * 2 * 70 * 71 * 8
            assert row[key]["flops_per_second"] == pytest.approx(flops / row[key]["seconds"])
            assert "of_peak" not in row[key]
        assert row["peak_bytes"] == 7


# Files


def test_an_earlier_benchmark_is_overwritten_only_on_request(tmp_path, monkeypatch, refusal):
    monkeypatch.setattr(command, "comparisons", lambda options, peaks: {})
    monkeypatch.setattr(command, "measured_peaks", lambda dtypes, threads: {})
    (tmp_path / "results.json").write_text("precious")
    message = f"--out must be a new folder, or --overwrite be given, got {tmp_path} with results.json"
    assert refusal(f"bench --out {tmp_path}") == message
    assert (tmp_path / "results.json").read_text() == "precious"
    assert main(["bench", "--out", str(tmp_path), "--overwrite"]) == 0
    assert json.loads((tmp_path / "results.json").read_text())["results"] == []


@pytest.mark.usefixtures("least")
def test_features(shown):
    """Every mask and score is timed, and torch's too, unless the T x T tensors would be too large."""
    printed = shown("bench --only features --shapes 1x2x40x8 --dtype float32 --threads 1").out
    assert "speed-ups over pyattn causal" in printed
    assert "left out" not in printed
    qkv = torch.randn(3, 1, 2, 40, 8)
    all_sides, fewer = (mask_cost.sides(qkv, qkv[0], dense) for dense in (True, False))
    assert all(name in printed for name in all_sides)
    assert fewer.keys() < all_sides.keys()


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--shapes 1x2x3", "--shapes must be of the form BxHxTxD, each at least 1 and below 2^63, got 1x2x3"),
        (
            "--shapes 1x2x0x4",
            "--shapes must be of the form BxHxTxD, each at least 1 and below 2^63, got 1x2x0x4",
        ),
        ("--only cache --shapes 1x2x3x4", "--shapes must be left out with --only cache, got 1x2x3x4"),
    ],
)
def test_bad_input(options, message, refusal):
    assert refusal(f"bench {options}") == message
