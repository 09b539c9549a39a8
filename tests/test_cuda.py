"""What only the emulated CUDA kernels can be asked: their index functions, and accesses beyond the end of a tensor."""

import subprocess
from pathlib import Path
from typing import Any

import emulated
import pytest
import torch
from backends import Backend
from helpers import Case, each_dtype, run

FEATURES: list[dict[str, Any]] = [
    {},
    {"window": (30, 2), "causal": False, "key_ranges": "random", "bias": "bool bhqk"},
    {"bias": "bands hqk", "wide": True, "alibi": "bh", "softcap": 3.0, "sinks": True, "key_ranges": "prefix"},
    {"bias": "float hq", "alibi": "h"},
]


@each_dtype
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (72, 20), (13, 250)])
def test_nothing_beyond_the_end_is_touched(
    emulation: Backend, dtype: torch.dtype, dims: tuple[int, int], features: dict[str, Any]
) -> None:
    """Each tensor ends where memory does: an access beyond it ends the process."""

    def walled(t: Any) -> Any:
        return emulated.before_a_wall(*t.shape, dtype=t.dtype).copy_(t) if isinstance(t, torch.Tensor) else t

    case = Case(1, 2, 1, 37, 70, *dims, dropout_p=0.1, **features)
    q, k, v, dout = map(walled, (*case.inputs(dtype), case.gradients(dtype)[0]))
    options = case.options | case.tensors(dtype)
    if "key_ranges" in options:
        options["key_ranges"] = options["key_ranges"].long()  # which the call would copy
    results = run(emulation.attention, (q, k, v), dout, **{name: walled(t) for name, t in options.items()})
    assert all(not t.isnan().any() for t in results)


@each_dtype
def test_ranges_are_clamped(emulation: Backend, dtype: torch.dtype) -> None:
    """The host reads nothing on a GPU, so nobody has checked them; reversed ends are a row without keys."""
    case = Case(1, 2, 1, 20, 40, 16, 16, causal=False)
    begin, end = torch.tensor([[-(2**40), 2**40], [-5, 7], [30, 99], [30, 10], [41, 60]]).repeat(4, 1).unbind(1)
    clamped = torch.stack([begin.clamp(0, 40), end.clamp(0, 40)], 1)
    qkv, dout = case.inputs(dtype), case.gradients(dtype)[0]
    wild, checked = (
        run(emulation.attention, qkv, dout, **case.options, key_ranges=ranges[None])
        for ranges in (torch.stack([begin, end], 1), clamped)
    )
    emulation.assert_same(wild, checked)


@pytest.fixture(scope="module")
def index_check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("index") / "index_check"
    sources = ["tests/tools/emulation/index_check.cpp"]
    command = ["c++", *emulated.FLAGS, "-Wno-unused-function", *emulated.INCLUDES, *sources, "-o", str(program)]
    subprocess.run(command, cwd=emulated.ROOT, check=True)
    return program


@pytest.mark.usefixtures("emulation")
def test_index_functions(index_check: Path) -> None:
    result: Any = subprocess.run([index_check], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ok" in result.stdout
