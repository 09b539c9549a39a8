"""Promise: inference runtimes are compared if installed, with our settings, and only if their results agree."""

import math
import re
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from pyattn import attention, reference
from pyattn.cli import kinds, runtimes
from pyattn.cli.runtimes import COMPILERS, Forward, Program

SHAPES = [(1, 1, 1, 8), (2, 3, 40, 16), (1, 4, 300, 8)]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """Installs a stand-in for a module that may be missing."""
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(contents)
    monkeypatch.setitem(sys.modules, name, made)


class Options(SimpleNamespace):
    """onnxruntime's options, which also have entries by name."""

    def add_session_config_entry(self, name: str, value: str) -> None:
        setattr(self, name, value)


class Binding:
    """onnxruntime's inputs and outputs."""

    def __init__(self) -> None:
        self.inputs: dict[str, np.ndarray] = {}
        self.bound: list[str] = []
        self.out: Tensor | None = None

    def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
        assert array.flags.c_contiguous
        self.inputs[name] = array

    def bind_output(self, name: str) -> None:
        self.bound.append(name)

    def copy_outputs_to_cpu(self) -> list[np.ndarray]:
        assert self.out is not None
        return [self.out.numpy()]


class Session:
    """onnxruntime's session: evaluates our two models, with their sizes taken from the text."""

    made: ClassVar[list["Session"]] = []

    def __init__(self, model: str, options: Options, providers: list[str]) -> None:
        self.model, self.options = model, options
        assert providers == ["CPUExecutionProvider"]
        self.made.append(self)

    def io_binding(self) -> Binding:
        return Binding()

    def get_outputs(self) -> list[SimpleNamespace]:
        names = re.search(r"(\S+(?:, \S+)*) = ", self.model.split("{\n", 1)[1]).group(1)  # type: ignore[union-attr]
        return [SimpleNamespace(name=name) for name in names.split(", ")]

    def run_with_iobinding(self, binding: Binding) -> None:
        q, k, v = (torch.from_numpy(binding.inputs[name]) for name in "qkv")
        assert self.model.count(f"float[{', '.join(map(str, q.shape))}]") == 4
        if "GroupQueryAttention" not in self.model:
            assert binding.bound == ["out"]
            assert "is_causal = 1" in self.model
            binding.out = reference.attention(q, k, v)
            return
        assert binding.bound == ["out", "keys", "values"]
        (heads,) = set(re.findall(r"heads = (\d+)", self.model))
        batch, last = re.search(r"int32\[(\d+)\] last = {(.*?)}", self.model).groups()  # type: ignore[union-attr]
        assert [int(batch), *map(int, last.split(", "))] == [len(q), *[q.shape[1] - 1] * len(q)]
        assert f"total = {{{q.shape[1]}}}" in self.model
        heads_first = (t.unflatten(2, (int(heads), -1)).transpose(1, 2) for t in (q, k, v))
        binding.out = reference.attention(*heads_first).transpose(1, 2).flatten(2)


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
def stand_ins(monkeypatch):
    """The parts of the runtimes' interfaces that we use, over plain torch."""

    def compile_model(model, device, settings):
        assert (model, device) == (["attention"], "CPU")
        Request.settings = settings
        return SimpleNamespace(create_infer_request=Request)

    def sdpa(q, k, v, causal):
        assert q == k == v
        assert causal
        return "attention"

    parsed = SimpleNamespace(parse_model=lambda text: SimpleNamespace(SerializeToString=lambda: text))
    module(monkeypatch, "onnx", parser=parsed)
    module(monkeypatch, "onnx.parser", **vars(parsed))
    module(monkeypatch, "onnxruntime", SessionOptions=Options, InferenceSession=Session)
    core = SimpleNamespace(compile_model=compile_model)
    tensor = {"Tensor": lambda array, shared_memory: array, "Model": lambda results, parameters: results}
    module(monkeypatch, "openvino", Core=lambda: core, **tensor)
    module(monkeypatch, "openvino.opset13", parameter=lambda shape, dtype: shape, scaled_dot_product_attention=sdpa)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", COMPILERS)
def test_what_a_runtime_is_asked_for_is_causal_attention(name, shape):
    q, k, v = torch.randn(3, *shape).transpose(-1, -2).contiguous().transpose(-1, -2)
    side = runtimes.forwards(q, k, v)[name]
    side()
    torch.testing.assert_close(side.program.out(), reference.attention(q, k, v))


INSTALLED = [name for name, (packages, _) in COMPILERS.items() if all(map(find_spec, packages))]

if INSTALLED:

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("name", INSTALLED)
    def test_an_installed_runtime_computes_ours(name, shape):
        q, k, v = torch.randn(3, *shape)
        side = runtimes.forwards(q, k, v)[name]
        for _ in range(2):
            side()
            torch.testing.assert_close(side.program.out(), reference.attention(q, k, v))


@pytest.mark.usefixtures("stand_ins")
def test_runtimes_have_as_many_threads_as_torch_and_full_precision(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    Session.made.clear()
    for side in runtimes.forwards(*torch.randn(3, 1, 2, 5, 4)).values():
        side()
    assert [session.options.intra_op_num_threads for session in Session.made] == [7, 7]
    assert Request.settings["INFERENCE_NUM_THREADS"] == 7
    assert Request.settings["INFERENCE_PRECISION_HINT"] == "f32"


def test_only_what_is_installed_is_there(monkeypatch):
    q = torch.randn(1, 1, 2, 4)
    for package in ("onnx", "onnxruntime", "openvino"):
        monkeypatch.setitem(sys.modules, package, None)
    assert runtimes.forwards(q, q, q) == {}
    module(monkeypatch, "onnxruntime")
    assert runtimes.forwards(q, q, q) == {}
    module(monkeypatch, "onnx")
    assert list(runtimes.forwards(q, q, q)) == ["onnxruntime Attention", "onnxruntime GroupQueryAttention"]
    module(monkeypatch, "openvino")
    assert runtimes.forwards(q, q, q).keys() == COMPILERS.keys()
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


def without_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, causal=False)


def in_bfloat16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q.bfloat16(), k.bfloat16(), v.bfloat16()).float()


def without_numbers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.full_like(q, math.nan)


@pytest.mark.parametrize("wrong", [without_a_mask, in_bfloat16, without_numbers])
def test_another_result_is_left_out(wrong, monkeypatch):
    compilers = {"right": reference.attention, "wrong": wrong}
    made = {name: ((), lambda *qkv, f=f: program(f(*qkv), [])) for name, f in compilers.items()}
    monkeypatch.setattr(runtimes, "COMPILERS", made)
    result = kinds.KINDS["functions"].rows(kinds.Run("x", "float32", "cpu"), (1, 2, 30, 16), math.inf)
    found = {row["side"]: row for row in result}
    assert "forward" in found["right"]
    assert "forward_backward" not in found["right"]
    number = r"(\d\.\de[+-]\d\d|nan)"
    assert re.fullmatch(
        f"ValueError: out must differ from ours by at most {number}, got {number}", found["wrong"]["left_out"]
    )
