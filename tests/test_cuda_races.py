"""No two warps of a CUDA block meet in shared memory but for a barrier between them, in the emulated kernels."""

import re
from collections.abc import Iterator

import pytest
import torch
from emulated import ROOT
from helpers import Case
from races import places, races
from torch import Tensor

DIMS = (32, 64, 96, 128, 192, 256)


def tiles(dim: int, dtype: torch.dtype, mask: bool, dropout_p: float = 0.0) -> Case:
    """At least three tiles each way, and as few more as there may be."""
    seqlen_q, seqlen_k = (66, 130) if dtype.itemsize == 2 or dim <= 64 else (36, 70)
    return Case(1, 1, 1, seqlen_q, seqlen_k, dim, dim, causal=mask, dropout_p=dropout_p)


def tensors(case: Case, dtype: torch.dtype, finite: bool) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """q, k, v and dout. Rows that are not finite are cleared in the tiles that the mask cuts."""
    (q, k, v), (dout, _) = case.inputs(dtype), case.gradients(dtype)
    if not finite:
        for t in (q, k, v, dout):
            t[:, :, ::9] = torch.nan
    return (q, k, v), dout


def found(
    dim: int, dtype: torch.dtype, deterministic: bool, mask: bool, dropout_p: float = 0.0, **more: str
) -> list[str]:
    case = tiles(dim, dtype, mask, dropout_p)
    qkv, dout = tensors(case, dtype, finite=not mask)
    return races(qkv, dout, deterministic=deterministic, **case.options, **more)


@pytest.mark.parametrize("mask", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("adding", [False, True], ids=["repeatable", "adding"])
def test_16_bits(dim: int, adding: bool, mask: bool) -> None:
    """Which of the two formats it is changes no access."""
    assert found(dim, torch.bfloat16 if mask else torch.float16, not adding, mask) == []


@pytest.mark.parametrize("mask", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", DIMS)
def test_float(dim: int, mask: bool) -> None:
    assert found(dim, torch.float32, True, mask) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dropout(dtype: torch.dtype) -> None:
    for mask in (False, True):
        assert found(32, dtype, True, mask, dropout_p=0.2) == []


def test_without_a_barrier_or_a_wait_there_are_races() -> None:
    """So each of them is needed, and the detector sees that it is."""

    def missed(place: str) -> bool:
        return not any(
            found(dim, torch.float16, deterministic, mask, dropout_p, without=place)
            for dim, dropout_p in ((32, 0.0), (32, 0.2), (256, 0.0))
            for mask in (False, True)
            for deterministic in (True, False)
        )

    missed("")
    assert sorted(places()) == sorted(in_sources())
    assert list(filter(missed, places())) == []


def in_sources() -> Iterator[str]:
    """What :func:`places` says once kernels have passed all of them."""
    for path in (ROOT / "csrc" / "cuda").glob("*.h"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for call in re.findall(r"\b(barrier|barrier_or|wait_for_copies)\(", line):
                if path.name != "ptx.h":
                    yield f"{call.split('_')[0]} {path.relative_to(ROOT)}:{number}"
