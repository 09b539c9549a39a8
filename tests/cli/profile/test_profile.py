"""Promise: a profile covers the kernels' time, counts their work, and shows both."""

import copy
import itertools
import json

import pytest
import torch
from support.cases import Case

import pyattn
from pyattn import _C, attention
from pyattn.cli import contention
from pyattn.cli.profile import command, report


def tasks_of(case: Case, dtype: torch.dtype = torch.float32) -> list:
    qkv = tuple(t.requires_grad_() for t in case.inputs(dtype))
    _C.start_profile()
    attention(*qkv, **case.options).sum().backward()
    return _C.stop_profile()


def flops(tasks: list, pass_name: str) -> dict[str, int]:
    counts = [task.flops for task in tasks if task.pass_name == pass_name]
    return {name: n for name, n in zip(_C.phases, map(sum, zip(*counts, strict=True)), strict=True) if n}


@pytest.mark.usefixtures("isa")
def test_every_product_is_counted():
    """Without a mask a tile computes exactly what is asked for; the rows fill whole vectors."""
    tasks = tasks_of(Case(2, 4, 2, 64, 192, 32, 48, causal=False))
    pairs = 2 * 4 * 64 * 192
    assert flops(tasks, "forward") == {"S = Q K^T": 2 * pairs * 32, "O = P V": 2 * pairs * 48}
    wide = {"dP = dO V^T": 2 * pairs * 48, "dV = P^T dO": 2 * pairs * 48}
    assert flops(tasks, "backward") == wide | dict.fromkeys(("S = Q K^T", "dK = dS^T Q", "dQ = dS K"), 2 * pairs * 32)
    assert {task.isa for task in tasks} == {pyattn.isa()}


def test_masked_tiles_compute_little_in_vain():
    computed = sum(flops(tasks_of(Case(1, 1, 1, 1000, 1000, 64, 64)), "forward").values())
    visible = 2 * 1000 * 1001 // 2 * 128
    assert visible < computed < 1.1 * visible


def test_decoding_is_counted():
    tasks = tasks_of(Case(1, 4, 1, 1, 2500, 64, 64))
    assert flops(tasks, "forward") == dict.fromkeys(("S = Q K^T", "O = P V"), 2 * 4 * 2500 * 64)
    assert "merge_out" in {task.pass_name for task in tasks}


def test_times_fit_in_their_task():
    """The phases are most of a task's time: every task counts the same number of ticks per second.

    Whether a second thread gets any item depends on the machine; attention/test_threads.py waits until one does.
    """
    torch.set_num_threads(2)
    tasks = [task for task in tasks_of(Case(1, 8, 8, 700, 700, 64, 64)) if task.pass_name in ("forward", "backward")]
    rates = [sum(task.ticks) / (task.end_ns - task.begin_ns) for task in tasks]
    assert max(rates) < 1.2 * min(rates)
    assert sum(task.items for task in tasks if task.pass_name == "forward") == 8 * 11


def test_nothing_is_kept_while_nobody_measures():
    attention(*Case(1, 1, 1, 70, 70, 8, 8).inputs(torch.float32))
    _C.start_profile()
    assert _C.stop_profile() == []
    attention(*Case(1, 1, 1, 70, 70, 8, 8).inputs(torch.float32))
    assert _C.stop_profile() == []


def test_run(tmp_path, shown, monkeypatch):
    monkeypatch.setattr(command, "SECONDS", 0.5)  # both threads get work in one of many calls
    trace = tmp_path / "trace.json"
    options = f"--shapes 1x4x300x16 --dtype bfloat16 --threads 2 --isa scalar --dropout 0.1 --trace {trace}"
    printed = shown(f"profile {options}").out
    for words in (*_C.phases, "scalar"):
        assert words in printed
    assert "Total GFLOPs" in printed or "Total MFLOPs" in printed
    events = json.loads(trace.read_text())["traceEvents"]
    whole = [e for e in events if e.get("name") == "pyattn::attention_backward"]
    tasks = [e for e in events if e.get("cat") == "pyattn" and e["name"] == "backward"]
    products = [e for e in events if e.get("name") == "dK = dS^T Q"]
    assert len({e["tid"] for e in tasks}) == 2
    assert len(products) == len(tasks)
    for task in tasks:
        assert any(w["ts"] - 50 <= task["ts"] <= task["ts"] + task["dur"] <= w["ts"] + w["dur"] + 50 for w in whole)
    for product in products:
        assert product["args"]["GFLOP/s"] > 0
        assert any(t["ts"] <= product["ts"] <= t["ts"] + t["dur"] for t in tasks if t["tid"] == product["tid"])


def test_shapes_are_profiled_one_by_one_and_rare_passes_explained(shown):
    printed = shown("profile --shapes 1x1x200x16 1x9x20x16 --threads 1").out
    first, second = printed.split("1x9x20x16 float32, 3 calls")
    assert "1x1x200x16 float32, 3 calls" in first
    assert f"reduce{'ms':>20}" in first
    assert report.EXPLAINED["reduce"] in first
    assert "reduce" not in second
    assert "dQ = dS K" in second


def test_a_busy_machine_is_told(shown, monkeypatch):
    waits = itertools.chain([1.0], itertools.repeat(3600.0))
    monkeypatch.setattr(contention, "waited", lambda: next(waits))
    said = "busy machine: threads waited for a core 100% of the time"
    assert said in shown("profile --shapes 1x1x9x4 --forward").out


KERNELS = {
    "forward": [("void pyattn::(anonymous namespace)::forward<float>(Sizes)", 2.0)],
    "backward": [("rows", 0.5), ("columns", 4.0), ("rows", 0.5)],
}
"""Names and microseconds."""


class Watched(torch.profiler.profile):
    """Torch's profile as on a GPU: a pass launches its KERNELS, and an operator inside backward one more."""

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        for event in self.events():
            pass_name = event.name.removeprefix("pyattn::attention_")
            for name, microseconds in KERNELS.get(pass_name, []):
                event.append_kernel(name, 0, microseconds)
            if pass_name == "backward":
                inside = copy.copy(event)
                inside.kernels, inside.cpu_children = [], []
                inside.append_kernel("Memset (Device)", 0, 1.0)
                event.append_cpu_child(inside)


@pytest.fixture
def gpu(monkeypatch, small_gpu):
    """The CPU stands in for a GPU."""
    randn, place = torch.randn, {"cuda": "cpu"}
    monkeypatch.setattr(torch, "randn", lambda *size, device, **options: randn(*size, device=place[device], **options))
    monkeypatch.setattr(command, "SECONDS", 0.5)
    monkeypatch.setattr(command, "once", lambda call, repeats, device: {"cuda": 0.1}[device])
    monkeypatch.setattr(torch.profiler, "profile", Watched)


def test_run_with_masks_and_scores(shown):
    options = "--window 90 0 --documents 64 --mask --bias --softcap 9 --alibi --sinks --full"
    printed = shown(f"profile --shapes 1x4x300x16 --threads 1 {options}").out
    assert options in printed.splitlines()[0]
    for pass_name in ("mask_rows", "bias_rows", "mask_blocks", "bias_gradient", "head_gradients"):
        assert f"\n{pass_name} " in printed
        assert report.EXPLAINED[pass_name] in printed


@pytest.mark.parametrize(
    ("shape", "path"),
    [
        ("1x4x300x16 --num-heads-kv 4 --selected 40", "read in segments or blocks"),
        ("1x4x1400x16 --num-heads-kv 4 --queries 40 --selected 600", "read in ranges of 1,024"),
        ("1x4x300x16 --num-heads-kv 4 --queries 40 --selected 40", "read query by query"),
        ("1x16x300x16 --num-heads-kv 1 --selected 40", "read in segments or blocks"),
        ("1x160x90x16 --num-heads-kv 1 --selected 40", "read query by query"),
    ],
)
def test_selected_keys_say_how_they_are_read(shown, shape, path):
    printed = shown(f"profile --shapes {shape} --threads 1 --selected-block 2").out
    assert f"\nselected keys are {path}" in printed
    assert ("\nreduce " in printed) == ("--queries" not in shape)  # fewer queries are computed without gradient


@pytest.mark.usefixtures("gpu")
def test_run_on_a_gpu(tmp_path, shown):
    trace = tmp_path / "trace.json"
    printed = shown(f"profile --device cuda --shapes 1x4x300x64 --trace {trace}").out
    flops = 2 * 4 * 300 * 301 // 2 * 64
    assert printed.startswith(f"Small GPU, torch {torch.__version__} --device cuda --shapes 1x4x300x64 ")
    assert "\n1x4x300x64 float32, 5 calls\n" in printed
    assert [line.split() for line in printed.split("\ntorch.profiler")[0].splitlines()[3:]] == [
        ["forward", "ms", "share", "launches", "TFLOP/s"],
        ["pyattn::forward<float>(Sizes)", "0.002", "100.0%", "1"],
        ["all,", "as", "masked", "0.002", "100.0%", f"{2 * flops / 2e-6 / 1e12:.1f}"],
        [],
        ["backward", "ms", "share", "launches", "TFLOP/s"],
        ["columns", "0.004", "66.7%", "1"],
        ["rows", "0.001", "16.7%", "2"],
        ["Memset", "(Device)", "0.001", "16.7%", "1"],
        ["all,", "as", "masked", "0.006", "100.0%", f"{5 * flops / 6e-6 / 1e12:.1f}"],
    ]
    assert "pyattn::attention_backward" in {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}


@pytest.mark.usefixtures("gpu")
def test_a_profile_without_kernels_is_refused(monkeypatch, shown):
    monkeypatch.setitem(KERNELS, "forward", [])
    message = "pyattn: --device cuda needs a torch.profiler that sees kernels (CUPTI), got none in 5 calls"
    assert shown("profile --device cuda --shapes 1x1x9x4 --forward", 2).err.splitlines()[-1] == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dropout 1", "--dropout must be at least 0 and below 1, got 1.0"),
        ("--shapes 1x1x9x4 1x1x9x8 --trace t", "--trace takes one of --shapes, got 1x1x9x4 1x1x9x8"),
        ("--window 3 -2", "--window: each of its two numbers must be at least -1, got -2"),
        ("--queries 0 --shapes 1x1x9x4", "--queries must lie between 1 and T = 9, got 0"),
        ("--queries 10 --shapes 1x1x9x4", "--queries must lie between 1 and T = 9, got 10"),
        ("--num-heads-kv 0 --shapes 1x6x9x4", "--num-heads-kv must divide H = 6, got 0"),
        ("--num-heads-kv 4 --shapes 1x6x9x4", "--num-heads-kv must divide H = 6, got 4"),
        ("--device cuda --isa scalar", "--isa must be left out with --device cuda, got scalar"),
    ],
)
def test_bad_input(options, message, refusal):
    assert refusal(f"profile {options}") == message
