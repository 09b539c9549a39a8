"""Promise: in the emulated kernels, no two warps of a CUDA block share memory without a barrier between accesses.

The gate runs these tests; they take a minute, half of it to compile the kernels with the race detector.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated import ROOT
from races import DTYPES, places, races
from support.backends import Backend
from support.cases import Case, alternate

from pyattn.options import Packing

pytestmark = pytest.mark.gate

DIMS = (31, 32, 64, 96, 128, 192, 256)
"""31: rows that are not copied in units of 16 bytes."""
FULL_AND_CAUSAL = pytest.mark.parametrize(
    ("dtype", "causal"), [(dtype, causal) for dtype in DTYPES for causal in (False, True)], ids=str
)


FEATURES: list[dict[str, Any]] = [
    {"window": (40, -1), "sinks": True},
    {"key_ranges": "pieces", "softcap": 3.0},
    {"mask": "random hqk"},
    {"bias": "bands hqk", "alibi": "h", "dropout_p": 0.2},
    {"bias": "float qk", "wide": True},
    {"bias": "float k", "dropout_p": 0.2},
]
"""The last two broadcast, which takes a separate pass."""


def found(
    deterministic: bool,
    dim: int,
    dtype: torch.dtype,
    causal: bool,
    *,
    without: str = "",
    relative_bias: torch.Tensor | None = None,
    decoding: bool = False,
    **features: Any,
) -> list[str]:
    """The races on at least three tiles each way, and as few more as possible; or in decoding, over two splits of keys.

    With a causal mask some rows are NaN, because they are cleared in the tiles that it cuts.
    """
    seqlen_q, seqlen_k = (66, 130) if dtype.itemsize == 2 or dim <= 64 else (36, 70)
    if decoding:
        seqlen_q, seqlen_k = 3, 300
    heads = 2 if "bias" in features else 1
    case = Case(1, heads, 1, seqlen_q, seqlen_k, dim, dim, causal, **features)
    q, k, v, dout = *case.inputs(dtype), case.gradients(dtype)[0]
    if causal:
        for t in (q, k, v, dout):
            t[:, :, ::9] = torch.nan
    options = case.options | case.tensors(dtype)
    if relative_bias is not None:
        options["relative_bias"] = relative_bias
    return races((q, k, v), dout, deterministic=deterministic, without=without, **options)


@pytest.mark.usefixtures("emulator")
def test_without_a_barrier_or_a_wait_there_are_races() -> None:
    """So each of them is needed, and the detector notices its absence.

    The longest test of those that run last stands before them, so no process waits for it alone.
    """
    dropout: dict[str, Any] = {"dropout_p": 0.2}
    cases: list[tuple[int, dict[str, Any]]] = [(32, {}), (32, dropout), (256, {}), (31, {}), (32, {"bias": "float qk"})]
    cases.append((64, {"decoding": True}))

    def missed(place: str) -> bool:
        return not any(
            found(deterministic, dim, torch.float16, causal, without=place, **features)
            for dim, features in cases
            for causal in (False, True)
            for deterministic in (True, False)
        )

    missed("")
    assert sorted(places()) == sorted(in_sources())
    assert list(filter(missed, places())) == []


def in_sources() -> Iterator[str]:
    """The output of :func:`places` after kernels have passed all of them."""
    for path in (ROOT / "csrc" / "cuda").rglob("*.h"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for call in re.findall(r"\b(barrier|barrier_or|wait_for_copies)\(", line):
                if path.name != "ptx.h":
                    yield f"{call.split('_')[0]} {path.relative_to(ROOT)}:{number}"


@FULL_AND_CAUSAL
@pytest.mark.parametrize("dim", DIMS)
def test_head_dims(emulation: Backend, dim: int, dtype: torch.dtype, causal: bool) -> None:
    assert found(emulation.repeatable, dim, dtype, causal) == []


@FULL_AND_CAUSAL
def test_dropout(emulation: Backend, dtype: torch.dtype, causal: bool) -> None:
    assert found(emulation.repeatable, 32, dtype, causal, dropout_p=0.2) == []


@pytest.mark.parametrize(("dim", "features", "dtype"), alternate([32, 256], FEATURES, DTYPES), ids=str)
def test_features(emulation: Backend, dim: int, dtype: torch.dtype, features: dict[str, Any]) -> None:
    assert found(emulation.repeatable, dim, dtype, True, **features) == []


@pytest.mark.parametrize(
    ("dim", "features", "dtype"), alternate([31, 64, 256], [{}, {"dropout_p": 0.2}], DTYPES), ids=str
)
def test_relative_bias(emulation: Backend, dtype: torch.dtype, dim: int, features: dict[str, Any]) -> None:
    """Some of its diagonals lie between the ends of the table."""
    table = torch.randn(1, 41, requires_grad=True)
    assert found(emulation.repeatable, dim, dtype, False, relative_bias=table, **features) == []


@pytest.mark.parametrize(
    ("dim", "features", "dtype"),
    alternate([31, 64, 256], [{}, {"softcap": 3.0, "alibi": "h", "dropout_p": 0.2}], DTYPES),
    ids=str,
)
def test_packed_sequences(emulation: Backend, dtype: torch.dtype, dim: int, features: dict[str, Any]) -> None:
    """Some of their blocks have no work, or keys without a query."""
    case = Case(1, 1, 1, 80, 150, dim, dim, **features)
    q, k, v, dout = (t[0].transpose(0, 1) for t in (*case.inputs(dtype), case.gradients(dtype)[0]))
    for t in (q, k, v, dout):
        t[::9] = torch.nan
    packing = Packing(torch.tensor([0, 70, 70, 78]), torch.tensor([0, 130, 145, 150]), 75, 150, None)
    options = case.options | case.tensors(dtype) | {"packing": packing}
    assert races((q, k, v), dout, deterministic=emulation.repeatable, **options) == []


@pytest.mark.parametrize(
    ("dim", "features", "dtype"),
    alternate([31, 64, 128, 256], [{}, {"softcap": 3.0, "mask": "random k", "dropout_p": 0.2}], DTYPES),
    ids=str,
)
def test_splits(emulation: Backend, dtype: torch.dtype, dim: int, features: dict[str, Any]) -> None:
    """Two warps have rows, two have none; some rows are NaN."""
    case = Case(1, 2, 1, 10, 600, dim, dim, **features)
    q, k, v, dout = *case.inputs(dtype), case.gradients(dtype)[0]
    for t in (q, k, v, dout):
        t[:, :, ::9] = torch.nan
    options = case.options | case.tensors(dtype)
    assert races((q, k, v), dout, deterministic=emulation.repeatable, **options) == []
