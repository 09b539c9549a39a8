"""Promise: the page that compares pyattn with others is made from a record, hides no loss, and compares equals."""

import json
import math
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from comparison import __main__ as program
from comparison import attention, measure, models, page, runtimes
from comparison.attention import Shape
from support.assertions import assert_close
from torch.nn.attention import flex_attention

RECORDS = sorted((Path(__file__).parent / "records").glob("*-comparison/results.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_a_committed_page_is_made_from_its_record(path):
    assert path.with_name("README.md").read_text() == page.page(json.loads(path.read_text()))


# Sides


@pytest.fixture
def eager(monkeypatch):
    """Compiled functions run as they are written."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


SHAPES = [
    Shape("causal", 2, 4, 4, 9, 9, 8, True),
    Shape("grouped", 1, 6, 2, 9, 9, 8, True),
    Shape("full", 2, 2, 2, 9, 9, 8, False),
    Shape("a token", 2, 4, 4, 1, 9, 8, False),
    Shape("a token, grouped", 1, 6, 2, 1, 9, 8, False),
]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_all_sides_compute_the_same(shape):
    contest = attention.contest(shape, torch.float64)
    assert list(contest.forwards)[:5] == list(attention.functions(shape))
    with torch.no_grad():
        ours = contest.forwards["pyattn"]()
        outs = {name: call() for name, call in contest.forwards.items() if name not in ("onnxruntime", "OpenVINO")}
    for out in outs.values():
        assert_close(out, ours)
    gradients = {name: call() for name, call in contest.trainings.items()}
    assert set(gradients) == (set() if shape.queries == 1 else set(outs) - set(attention.FORWARD_ONLY))
    for found in gradients.values():
        for gradient, expected in zip(found, gradients["pyattn"], strict=True):
            assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("causal", "heads_kv", "queries"), [(True, 6, 9), (True, 2, 9), (False, 6, 9), (False, 6, 1), (False, 2, 1)]
)
def test_onnxruntime_computes_the_same(causal, heads_kv, queries):
    pytest.importorskip("onnxruntime")
    q = torch.randn(2, 6, queries, 8)
    k, v = torch.randn(2, 2, heads_kv, 9, 8)
    side = runtimes.forwards(q, k, v, causal)["onnxruntime"]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(side(), expected)
    assert side() is None  # later calls compute alone


def test_what_a_runtime_lacks_is_said():
    pytest.importorskip("onnxruntime")
    q, k = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8)
    with pytest.raises(ValueError, match="grouped heads"):
        runtimes.forwards(q, k, k, False)["onnxruntime"]()
    with pytest.raises(ValueError, match="float32"):
        runtimes.forwards(*[q.bfloat16()] * 3, True)["onnxruntime"]()


def test_a_step_trains_the_model():
    torch.manual_seed(0)
    weight = torch.nn.Linear(3, 1)
    trainer = models.Trainer(weight, lambda: weight(torch.ones(2, 3)).square().mean())
    losses = [trainer() for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[2]


# Measurement


def sides_of(**results):
    """The records of sides whose calls return these results, or raise them."""

    def call(result):
        if isinstance(result, Exception):
            raise result
        return result

    sides: dict = {}
    calls = {name: partial(call, result) for name, result in results.items()}
    measure.passed(calls, "forward", "float32", time.perf_counter(), sides)
    return sides


def test_results_that_differ_are_left_out():
    ours = torch.zeros(2, 2)
    sides = sides_of(
        pyattn=ours, near=(ours + 1e-5).view(4), far=ours + 1e-3, nan=ours / 0, broken=TypeError("no /tmp/a/b.so\nway")
    )
    assert {name for name, side in sides.items() if "rounds" in side.get("forward", {})} == {"pyattn", "near"}
    assert sides["near"]["difference"] == pytest.approx(1e-5)
    assert sides["far"]["left_out"] == "differs from pyattn by 1.0e-03"
    assert sides["nan"]["left_out"] == "differs from pyattn by nan"
    assert sides["broken"] == {"forward_left_out": "TypeError: no b.so"}
    assert len(sides["pyattn"]["forward"]["rounds"]) >= 3


def test_losses_are_compared_and_kept():
    sides = sides_of(pyattn=[2.0, 1.0], same=[2.0, 1.00001], other=[2.0, 1.1])
    assert sides["same"]["losses"] == [2.0, 1.00001]
    assert sides["other"]["left_out"] == "differs from pyattn by 1.0e-01"


def test_the_first_call_makes_steps_whose_losses_are_kept():
    losses = iter([5.0, 4.0, 3.0, 2.0])
    step = measure._after_steps(lambda: next(losses))
    assert step() == [5.0, 4.0, 3.0]
    assert step() == 2.0


def test_every_case_is_measured_in_every_dtype():
    todo = measure.cases(["float32", "bfloat16"])
    assert len(todo) == 2 * (len(attention.LAYERS) + len(attention.TOKENS) + len(models.MODELS))
    assert {kind for kind, *_ in todo} == set(page.TITLES)
    assert ("layer", "Llama, grouped heads", attention.LAYERS[2].described(), "bfloat16") in todo


def test_a_case_is_measured_whole(monkeypatch):
    shape = SHAPES[1]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, dynamic: function)
        patch.setattr(attention, "_flex", lambda shape, grouped: lambda q, k, v: 1 / 0)
        sides = measure.attention_case(shape, "float32", time.perf_counter())
    ours = sides["pyattn"]
    assert all(ours[key]["rounds"] for key in ("forward", "training"))
    assert sides["FlexAttention, compiled"] == {"forward_left_out": "ZeroDivisionError: division by zero"}


# The page


def side(*seconds, peak=None, **more):
    return {"forward": {"rounds": list(seconds), "peak_bytes": peak}, **more}


CASE = {
    "kind": "layer",
    "name": "small",
    "sizes": "batch 1",
    "dtype": "float32",
    "sides": {
        "pyattn": side(2e-3, 2e-3, 4e-3, peak=3 * 10**6, difference=0.0),
        "faster": side(1e-3, 1e-3, 2e-3, difference=2e-7),
        "slower": side(6e-3, 4e-3, 8e-3, difference=0.0),
        "absent": {"forward_left_out": "ValueError: no such operator"},
        "wrong": {"left_out": "differs from pyattn by 1.0e+00", "difference": 1.0},
    },
}
RECORD = {
    "command": "PYTHONPATH=tests/tools python -m comparison FOLDER",
    "date": "2026-11-26",
    "cpu": "A CPU",
    "cores": 2,
    "threads": 1,
    "isa": "avx2",
    "versions": {"torch": "2.13.0", "pyattn": "0.1.0"},
    "load_before": 0.1,
    "load_after": 1.0,
    "seconds": 90.0,
    "cases": [CASE],
}


def test_the_page_shows_losses_first_and_every_side():
    text = page.page(RECORD)
    losses, rest = text.split("## Where pyattn is not the fastest")[1].split("## Means")
    assert losses.split("\n")[2] == "- faster: small, float32, forward: 0.50 of pyattn's time"
    assert "slower" not in losses
    assert "| Attention of a layer, forward | float32 | slower | 2.00 | 1 |" in rest
    assert "| pyattn | 2.000 | 1.00 (1.00 to 1.00) | 3.0 |  |" in rest
    assert "| faster | 1.000 | **0.50 (0.50 to 0.50)** |  | 2e-07 |" in rest
    assert "| slower | 6.000 | 2.00 (2.00 to 2.50) |  | 0e+00 |" in rest
    assert "Left out: absent, forward: ValueError: no such operator" in rest
    assert "Left out: wrong: differs from pyattn by 1.0e+00" in rest
    for fact in ("A CPU, 2 cores, 1 thread, avx2", "torch 2.13.0, pyattn 0.1.0", RECORD["command"]):
        assert fact in text


def test_memory_that_others_save_is_told():
    peaks = {"pyattn": 12e6, "torch SDPA": 10e6, "OpenVINO": 11.5e6, "onnxruntime": 1.0}
    case = CASE | {"sides": {name: side(1.0, 1.0, peak=peak) for name, peak in peaks.items()}}
    assert list(page.heavier(RECORD | {"cases": [case]})) == [(10 / 12, "torch SDPA: small, float32, forward")]
    text = page.page(RECORD | {"cases": [case]})
    assert "- torch SDPA: small, float32, forward: 0.83 of pyattn's\n" in text


def test_steps_show_their_loss():
    ours = {"training": {"rounds": [1.0, 1.0]}, "losses": [7.0, 6.5, 6.25]}
    case = CASE | {"kind": "step", "name": "GPT", "sides": {"pyattn": ours, "torch SDPA": ours}}
    text = page.page(RECORD | {"cases": [case]})
    assert "| | training ms | times pyattn | MB | loss after 3 steps |" in text
    assert "| torch SDPA | 1000.000 | 1.00 (1.00 to 1.00) |  | 6.2500 |" in text
    assert "Nowhere in this run." in text


def test_quartiles():
    assert page.quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert page.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


def test_means_are_geometric():
    other = CASE | {"sides": CASE["sides"] | {"slower": side(16e-3, 16e-3, 32e-3)}}
    (line,) = [line for line in page.means(RECORD | {"cases": [CASE, other]}) if "slower" in line]
    assert line.endswith(f"| {math.sqrt(2 * 8):.2f} | 2 |")


def test_run(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "cases", lambda dtypes: {("layer", "x", "y", "float32"): lambda ends: CASE["sides"]})
    threads = torch.get_num_threads()
    try:
        program.main([str(tmp_path), "--threads", "1", "--dtype", "float32"])
    finally:
        torch.set_num_threads(threads)
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["command"].endswith("-m comparison FOLDER --threads 1 --dtype float32")
    assert record["versions"]["torch"] == torch.__version__
    made = (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").unlink()
    program.main([str(tmp_path), "--page"])
    assert (tmp_path / "README.md").read_text() == made == page.page(record)
