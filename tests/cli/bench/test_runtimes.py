"""Promise: inference runtimes are compared if installed, with our settings, and only if their results agree."""

import math
import re
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor

from pyattn import attention, reference
from pyattn.cli.bench import comparisons
from pyattn.cli.bench.sides import calls, runtimes
from pyattn.cli.bench.sides.runtimes import COMPILERS, Forward, Program


def module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """Installs a stand-in for a module that may be missing."""
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(contents)
    monkeypatch.setitem(sys.modules, name, made)


class Request:
    """OpenVINO's request for a compiled model."""

    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.inputs: dict[int, np.ndarray] = {}

    def set_input_tensor(self, place: int, tensor: np.ndarray) -> None:
        self.inputs[place] = tensor

    def infer(self) -> None:
        self.out = reference.attention(*(torch.from_numpy(self.inputs[i]) for i in range(3)))

    def get_output_tensor(self, place: int) -> SimpleNamespace:
        assert place == 0
        return SimpleNamespace(data=self.out.numpy())


@pytest.fixture
def openvino(monkeypatch):
    """The parts of OpenVINO's interface that we use, over plain torch."""

    def compile_model(model, device, settings):
        assert (model, device) == (["attention"], "CPU")
        Request.settings = settings
        return SimpleNamespace(create_infer_request=Request)

    def sdpa(q, k, v, causal):
        assert q == k == v
        assert causal
        return "attention"

    core = SimpleNamespace(compile_model=compile_model)
    tensor = {"Tensor": lambda array, shared_memory: array, "Model": lambda results, parameters: results}
    module(monkeypatch, "openvino", Core=lambda: core, **tensor)
    module(monkeypatch, "openvino.opset13", parameter=lambda shape, dtype: shape, scaled_dot_product_attention=sdpa)


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (2, 3, 40, 16), (1, 4, 300, 8)])
@pytest.mark.parametrize("name", COMPILERS)
def test_a_runtime_computes_causal_attention(name, shape):
    q, k, v = torch.randn(3, *shape).transpose(-1, -2).contiguous().transpose(-1, -2)
    side = runtimes.forwards(q, k, v)[name]
    for _ in range(2):
        side()
        torch.testing.assert_close(side.program.out(), reference.attention(q, k, v))


@pytest.mark.usefixtures("openvino")
def test_runtimes_have_as_many_threads_as_torch_and_full_precision(monkeypatch):
    made, options = [], onnxruntime.SessionOptions
    monkeypatch.setattr(onnxruntime, "SessionOptions", lambda: made.append(options()) or made[-1])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for side in runtimes.forwards(*torch.randn(3, 1, 2, 5, 8)).values():
        side()
    assert [session.intra_op_num_threads for session in made] == [3]
    assert Request.settings["INFERENCE_NUM_THREADS"] == 3
    assert Request.settings["INFERENCE_PRECISION_HINT"] == "f32"


def test_only_what_is_installed_is_there(monkeypatch):
    q = torch.randn(1, 1, 2, 4)
    for package in ("onnx", "onnxruntime", "openvino"):
        monkeypatch.setitem(sys.modules, package, None)
    for package, names in (
        ("onnxruntime", []),
        ("onnx", ["onnxruntime GroupQueryAttention"]),
        ("openvino", list(COMPILERS)),
    ):
        module(monkeypatch, package)
        assert list(runtimes.forwards(q, q, q)) == names
    for other in (q.double(), q.bfloat16(), q.to("meta")):
        assert runtimes.forwards(other, other, other) == {}


def program(out: Tensor, ran: list[str]) -> Program:
    return Program(lambda: ran.append("ran"), lambda: (ran.append("read"), out)[1])


def test_a_result_is_compared_once_before_it_is_timed():
    q, k, v = torch.randn(3, 1, 2, 30, 16)
    ran: list[str] = []
    side = Forward(lambda *qkv: program(reference.attention(*qkv), ran), q, k, v)
    for _ in range(3):
        side()
    assert ran == ["ran", "read", "ran", "ran"]


WRONG = {
    "without a mask": lambda *qkv: attention(*qkv, causal=False),
    "in bfloat16": lambda *qkv: attention(*(t.bfloat16() for t in qkv)).float(),
    "without numbers": lambda *qkv: torch.full_like(qkv[0], math.nan),
}


def test_another_result_is_left_out(monkeypatch):
    compilers = {"right": reference.attention} | WRONG
    made = {name: ((), lambda *qkv, f=f: program(f(*qkv), [])) for name, f in compilers.items()}
    monkeypatch.setattr(runtimes, "COMPILERS", made)
    result = comparisons.KINDS["functions"].rows(calls.Run("x", "float32", "cpu"), (1, 2, 30, 16), math.inf)
    found = {row["side"]: row for row in result}
    assert "forward" in found["right"]
    assert "forward_backward" not in found["right"]
    said = "ValueError: out must differ from ours by at most 0.0001, got "
    assert all(re.fullmatch(said + r"(\d\.\de[+-]\d\d|nan)", found[name]["left_out"]) for name in WRONG)
