"""Promise: torch.export and AOTInductor keep the operator, for unknown lengths and across processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.assertions import assert_close
from torch import Tensor, nn

from pyattn import attention

# torch's own warnings while it traces.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")]


class Layer(nn.Module):
    """Attention with every kind of option: constants, parameters, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes, self.sinks = nn.Parameter(torch.rand(4)), nn.Parameter(torch.randn(4))
        self.register_buffer("seed", torch.tensor(7))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = {"softcap": 2.0, "alibi_slopes": self.slopes, "sinks": self.sinks}
        return attention(q, k, v, window=(5, -1), dropout_p=0.3, dropout_seed=self.seed, **scores)


def inputs(seqlen: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 4, seqlen, 8), torch.randn(2, 2, seqlen, 8), torch.randn(2, 2, seqlen, 8)


def exported(layer: Layer, strict: bool) -> torch.export.ExportedProgram:
    seqlen = torch.export.Dim("seqlen", min=2, max=4096)
    return torch.export.export(layer, inputs(6), dynamic_shapes=({2: seqlen},) * 3, strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool, tmp_path: Path) -> None:
    layer, tensors = Layer(), inputs(11)
    program = exported(layer, strict)
    path = tmp_path / "layer.pt2"
    torch.export.save(program, path)
    lowered = program.run_decompositions()
    assert torch.ops.pyattn.attention_forward.default in {node.target for node in lowered.graph.nodes}
    for known in (program, torch.export.load(path), lowered):
        assert_close(known.module()(*tensors), layer(*tensors), 0)


AFRESH = """
import sys
import torch
import pyattn
inputs, expected = torch.load(sys.argv[2])
assert_close(torch._inductor.aoti_load_package(sys.argv[1])(*inputs), expected, 0)
"""


@pytest.mark.slow
def test_ahead_of_time_in_a_fresh_process(tmp_path: Path) -> None:
    layer, tensors = Layer().requires_grad_(False), inputs(11)
    package, data = str(tmp_path / "layer.pt2"), str(tmp_path / "data.pt")
    torch._inductor.aoti_compile_and_package(exported(layer, False), package_path=package)
    torch.save((tensors, layer(*tensors)), data)
    subprocess.run([sys.executable, "-c", AFRESH, package, data], check=True)
