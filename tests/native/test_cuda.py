"""Promise: emulated CUDA kernels stay inside each tensor, and their index functions are right."""

import subprocess
from pathlib import Path
from typing import Any

import emulated
import pytest
import torch
from params import before_a_wall
from support.backends import Backend
from support.cases import DTYPES, Case, alternate, each_dtype, run
from torch import Tensor

from pyattn.options import Packing

FEATURES: list[dict[str, Any]] = [
    {},
    {"window": (30, 2), "causal": False, "key_ranges": "random", "mask": "random bhqk"},
    {"bias": "bands hqk", "wide": True, "alibi": "bh", "softcap": 3.0, "sinks": True, "key_ranges": "prefix"},
    {"bias": "float hq", "alibi": "h"},
]


@pytest.mark.parametrize(
    ("dims", "features", "dtype"), alternate([(64, 64), (72, 20), (13, 250)], FEATURES, DTYPES), ids=str
)
def test_nothing_beyond_the_end_is_touched(
    emulation: Backend, dtype: torch.dtype, dims: tuple[int, int], features: dict[str, Any]
) -> None:
    """Each tensor ends at the end of accessible memory: an access beyond it ends the process."""

    def walled(t: Any) -> Any:
        return before_a_wall(*t.shape, dtype=t.dtype).copy_(t) if isinstance(t, torch.Tensor) else t

    case = Case(1, 2, 1, 37, 70, *dims, dropout_p=0.1, **features)
    q, k, v, dout = map(walled, (*case.inputs(dtype), case.gradients(dtype)[0]))
    options = case.options | case.tensors(dtype)
    if "key_ranges" in options:
        options["key_ranges"] = options["key_ranges"].long()  # the call would copy int32 ranges
    results = run(emulation.attention, (q, k, v), dout, **{name: walled(t) for name, t in options.items()})
    assert all(not t.isnan().any() for t in results)


@each_dtype
def test_ranges_are_clamped(emulation: Backend, dtype: torch.dtype) -> None:
    """On a GPU the host reads nothing, so the ranges are unchecked; reversed ends mean a row without keys."""
    case = Case(1, 2, 1, 20, 40, 16, 16, causal=False)
    begin, end = torch.tensor([[-(2**40), 2**40], [-5, 7], [30, 99], [30, 10], [41, 60]]).repeat(4, 1).unbind(1)
    clamped = torch.stack([begin.clamp(0, 40), end.clamp(0, 40)], 1)
    qkv, dout = case.inputs(dtype), case.gradients(dtype)[0]
    wild, checked = (
        run(emulation.attention, qkv, dout, **case.options, key_ranges=ranges[None])
        for ranges in (torch.stack([begin, end], 1), clamped)
    )
    emulation.assert_same(wild, checked)


PACKED_FEATURES: list[dict[str, Any]] = [
    {},
    {"window": (9, 2), "causal": False, "key_ranges": "random", "alibi": "bh", "softcap": 3.0, "sinks": True},
]


def packed_inputs(case: Case, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor]:
    """q, k, v and dout of the case's only sequence: (tokens, heads, columns), each before a wall."""
    tensors = (t[0].transpose(0, 1) for t in (*case.inputs(dtype), case.gradients(dtype)[0]))
    q, k, v, dout = (before_a_wall(*t.shape, dtype=t.dtype).copy_(t) for t in tensors)
    return (q, k, v), dout


@each_dtype
@pytest.mark.parametrize("features", PACKED_FEATURES, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (72, 20), (13, 250)])
def test_nothing_beyond_packed_tokens_is_touched(
    emulation: Backend, dtype: torch.dtype, dims: tuple[int, int], features: dict[str, Any]
) -> None:
    case = Case(1, 2, 1, 37, 70, *dims, dropout_p=0.1, **features)
    qkv, dout = packed_inputs(case, dtype)
    options = case.options | case.tensors(dtype)
    if "key_ranges" in options:
        options["key_ranges"] = options["key_ranges"][0]
        options["alibi_slopes"] = options["alibi_slopes"].repeat(3, 1)
    packing = Packing(torch.tensor([0, 20, 20, 37]), torch.tensor([0, 50, 60, 70]), 33, 65, torch.tensor([50, 3, 9]))
    results = run(emulation.attention, qkv, dout, packing=packing, **options)
    assert all(not t.isnan().any() for t in results)


INVALID: list[tuple[str, Any, list[int]]] = [
    ("cu_seqlens_q", [0, 14, 5, 20], [0, 1, 2]),
    ("cu_seqlens_q", [0, 5, 14, 2**62], [0, 1, 2]),
    ("cu_seqlens_q", [-(2**62), 5, 14, 20], [0, 1, 2]),
    ("cu_seqlens_q", [1, 5, 14, 20], [0, 1, 2]),
    ("cu_seqlens_k", [0, 7, 16, 39], [0, 1, 2]),
    ("cu_seqlens_k", [0, 17, 16, 36], [0, 1, 2]),
    ("cu_seqlens_k", [2, 7, 16, 36], [0, 1, 2]),
    ("seqused_k", [7, 10, 20], [1]),
    ("seqused_k", [-1, 9, 20], [0]),
    ("seqused_k", [2**40, -(2**40), 21], [0, 1, 2]),
    ("max_seqlen_q", 8, [1]),
    ("max_seqlen_k", 19, [2]),
]
"""Values that the operator would refuse on a CPU; on a GPU their tokens are NaN. If starts are wrong, all are."""


@each_dtype
@pytest.mark.parametrize(("name", "value", "invalid"), INVALID, ids=[f"{name}-{value}" for name, value, _ in INVALID])
def test_sequences_whose_indices_are_invalid_are_nan(
    emulation: Backend, dtype: torch.dtype, name: str, value: Any, invalid: list[int]
) -> None:
    case = Case(1, 2, 1, 22, 38, 16, 20)
    qkv, dout = packed_inputs(case, dtype)
    starts = torch.tensor([0, 5, 14, 20]), torch.tensor([0, 7, 16, 36])
    packing = Packing(*starts, 9, 20, None)
    expected = run(emulation.attention, qkv, dout, packing=packing)
    changed = packing._replace(**{name: torch.tensor(value) if isinstance(value, list) else value})
    found = run(emulation.attention, qkv, dout, packing=changed)
    lse = [x[1].mT[..., None] for x in (expected, found)]
    pairs = zip((expected[0], lse[0], *expected[2:]), (found[0], lse[1], *found[2:]), (0, 0, 0, 1, 1), strict=True)
    for before, after, of in pairs:
        gone = torch.zeros(len(before), dtype=torch.bool)
        for b in invalid:
            gone[starts[of][b] : starts[of][b + 1]] = True
        if name.startswith("cu_seqlens"):
            gone[:] = True
        assert after[gone].isnan().all()
        torch.testing.assert_close(after[~gone], before[~gone], rtol=1e-2, atol=1e-2)


@pytest.fixture(scope="module")
def index_check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("index") / "index_check"
    sources = ["tests/tools/emulation/index_check.cpp"]
    flags = *emulated.FLAGS, *emulated.INCLUDES, "-DPYATTN_PACKED=false", "-Wno-unused-function"
    command = ["c++", *flags, *sources, "-o", str(program)]
    subprocess.run(command, cwd=emulated.ROOT, check=True)
    return program


@pytest.mark.usefixtures("emulator")
def test_index_functions(index_check: Path) -> None:
    result: Any = subprocess.run([index_check], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ok" in result.stdout
