"""torch.export and ONNX see the plain code of converted models, before and after their first forward."""

import copy

import onnxruntime
import pytest
import torch
from support.adapters.written import Model
from torch import nn

from pyattn.adapters import scratch

# torch's own warnings while it traces.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")]


@pytest.fixture
def x():
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(2))


@pytest.fixture(params=["converted", "after a forward", "converted parts"])
def models(request, x):
    """A plain model, and the same converted."""
    plain = Model().float().eval()
    model = copy.deepcopy(plain)
    for part in model.blocks if request.param == "converted parts" else [model]:
        scratch.convert(part)
    if request.param == "after a forward":
        model(x)
        assert scratch.counts().taken == 2
    return plain, model


def targets(program) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("strict", [False, True])
def test_export(models, x, strict):
    plain, model = (torch.export.export(y, (x,), strict=strict) for y in models)
    assert targets(model) == targets(plain)
    torch.testing.assert_close(model.module()(x), models[0](x), rtol=0, atol=0)


def test_export_of_an_enabled_function(x):
    class Function(nn.Module):
        def forward(self, x):
            return (x @ x.mT).softmax(-1) @ x

    with scratch.enabled():
        ours = torch.export.export(Function(), (x,))
    assert targets(ours) == targets(torch.export.export(Function(), (x,)))
    assert scratch.counts() == (0, {})


def test_onnx(models, x):
    programs = [torch.onnx.export(y, (x,), dynamo=True, verbose=False) for y in models]
    plain, ours = ([node.op_type for node in program.model.graph] for program in programs)
    assert ours == plain
    assert "Softmax" in ours
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(programs[1].model_proto.SerializeToString(), options)
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), models[0](x))


def test_onnx_by_tracing(models, x, tmp_path):
    files = [tmp_path / f"{name}.onnx" for name in ("plain", "ours")]
    for model, file in zip(models, files, strict=True):
        torch.onnx.export(model, (x,), file, dynamo=False)
    assert files[0].read_bytes() == files[1].read_bytes()
