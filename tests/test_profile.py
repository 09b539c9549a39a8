"""Promise: a profile covers the kernels' time and counts their work, and torch can count it too."""

import json
from collections.abc import Iterator

import pytest
import torch
from helpers import Case
from torch.utils.flop_counter import FlopCounterMode

from pyattn import _C, _ops, attention
from pyattn.cli import main


@pytest.fixture(autouse=True)
def state_kept() -> Iterator[None]:
    isa, threads = _C.active_isa(), torch.get_num_threads()
    yield
    _C.set_isa(isa)
    torch.set_num_threads(threads)


def tasks_of(case: Case, dtype: torch.dtype = torch.float32) -> list:
    qkv = tuple(t.requires_grad_() for t in case.inputs(dtype))
    _C.start_profile()
    attention(*qkv, **case.options).sum().backward()
    return _C.stop_profile()


def flops(tasks: list, pass_name: str) -> dict[str, int]:
    counts = [task.flops for task in tasks if task.pass_name == pass_name]
    return {name: n for name, n in zip(_C.phases, map(sum, zip(*counts, strict=True)), strict=True) if n}


@pytest.mark.usefixtures("isa")
def test_every_product_is_counted() -> None:
    """Without a mask a tile computes what is asked for and no more; the rows fill whole vectors."""
    tasks = tasks_of(Case(2, 4, 2, 64, 192, 32, 48, causal=False))
    pairs = 2 * 4 * 64 * 192
    assert flops(tasks, "forward") == {"S = Q K^T": 2 * pairs * 32, "O = P V": 2 * pairs * 48}
    wide = {"dP = dO V^T": 2 * pairs * 48, "dV = P^T dO": 2 * pairs * 48}
    assert flops(tasks, "backward") == wide | dict.fromkeys(("S = Q K^T", "dK = dS^T Q", "dQ = dS K"), 2 * pairs * 32)
    assert {task.isa for task in tasks} == {_C.active_isa()}


def test_masked_tiles_compute_little_in_vain() -> None:
    computed = sum(flops(tasks_of(Case(1, 1, 1, 1000, 1000, 64, 64)), "forward").values())
    visible = 2 * 1000 * 1001 // 2 * 128
    assert visible < computed < 1.1 * visible


def test_decoding_is_counted() -> None:
    tasks = tasks_of(Case(1, 4, 1, 1, 2500, 64, 64))
    assert flops(tasks, "forward") == dict.fromkeys(("S = Q K^T", "O = P V"), 2 * 4 * 2500 * 64)
    assert "merge_out" in {task.pass_name for task in tasks}


def test_times_fit_in_their_task() -> None:
    """The phases are most of a task's time: of its ticks, as many as a task without phases would have counted."""
    torch.set_num_threads(2)
    tasks = [task for task in tasks_of(Case(1, 8, 8, 700, 700, 64, 64)) if task.pass_name in ("forward", "backward")]
    rates = [sum(task.ticks) / (task.end_ns - task.begin_ns) for task in tasks]
    assert max(rates) < 1.2 * min(rates)
    assert len({task.thread for task in tasks}) == 2
    assert sum(task.items for task in tasks if task.pass_name == "forward") == 8 * 11


def test_nothing_is_kept_while_nobody_measures() -> None:
    attention(*Case(1, 1, 1, 70, 70, 8, 8).inputs(torch.float32))
    _C.start_profile()
    assert _C.stop_profile() == []
    attention(*Case(1, 1, 1, 70, 70, 8, 8).inputs(torch.float32))
    assert _C.stop_profile() == []


@pytest.mark.parametrize("q_offset", [-90, -3, 0, 2, 4, 90])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (5, 9), (9, 5), (4, 0)])
def test_visible_pairs(seqlen_q: int, seqlen_k: int, q_offset: int) -> None:
    counted = sum(min(max(i + q_offset + 1, 0), seqlen_k) for i in range(seqlen_q))
    assert _ops.visible_pairs(seqlen_q, seqlen_k, q_offset) == counted


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 2 * 4 * (6 * 7 // 2 + 6 * 3)),
        ({"causal": False}, 2 * 4 * 6 * 9),
        ({"q_offset": 0, "dropout_p": 0.1}, 2 * 4 * 6 * 7 // 2),
        ({"q_offset": torch.tensor([0, 9])}, 4 * (6 * 7 // 2 + 6 * 9)),
    ],
)
def test_torch_counts_what_the_mask_leaves(options: dict, pairs: int) -> None:
    qkv = tuple(t.requires_grad_() for t in Case(2, 4, 2, 6, 9, 16, 24).inputs(torch.float32))
    with FlopCounterMode(display=False) as counter:
        attention(*qkv, **options).sum().backward()
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert counts["pyattn.attention_forward"] == 2 * pairs * (16 + 24)
    assert counts["pyattn.attention_backward"] == 2 * pairs * (3 * 16 + 2 * 24)


def test_run(tmp_path, capsys) -> None:
    trace = tmp_path / "trace.json"
    options = f"--shapes 1x4x300x16 --dtype bfloat16 --threads 2 --isa scalar --dropout 0.1 --trace {trace}"
    assert main(["profile", *options.split()]) == 0
    shown = capsys.readouterr().out
    for phase in _C.phases:
        assert shown.count(phase) >= 1
    assert "scalar" in shown
    assert "Total GFLOPs" in shown or "Total MFLOPs" in shown
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--shapes 1x2x3", "pyattn: --shapes must be of the form BxHxTxD, each at least 1, got 1x2x3"),
        ("--threads 0", "pyattn: --threads must be at least 1, got 0"),
        ("--dropout 1", "pyattn: --dropout must be at least 0 and below 1, got 1.0"),
    ],
)
def test_bad_input(options, message, capsys) -> None:
    assert main(["profile", *options.split()]) == 2
    assert capsys.readouterr().err.strip() == message
