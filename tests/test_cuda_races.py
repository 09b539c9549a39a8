"""No two warps of a CUDA block meet in shared memory but for a barrier between them, in the emulated kernels."""

import re
from collections.abc import Iterator

import pytest
import torch
from backends import Backend
from emulated import ROOT
from helpers import Case
from races import places, races

DIMS = (31, 32, 64, 96, 128, 192, 256)
"""31: rows that are not copied by 16 bytes."""
FULL_AND_CAUSAL = pytest.mark.parametrize(
    ("dtype", "causal"),
    [(torch.float32, False), (torch.float32, True), (torch.float16, False), (torch.bfloat16, True)],
    ids=str,
)
"""The two 16-bit formats differ in no access."""


def found(
    deterministic: bool, dim: int, dtype: torch.dtype, causal: bool, dropout_p: float = 0.0, without: str = ""
) -> list[str]:
    """The races on at least three tiles each way, and as few more as there may be. Some rows are NaN where there is a
    mask, for they are cleared in the tiles that it cuts.
    """
    seqlen_q, seqlen_k = (66, 130) if dtype.itemsize == 2 or dim <= 64 else (36, 70)
    case = Case(1, 1, 1, seqlen_q, seqlen_k, dim, dim, causal, dropout_p=dropout_p)
    q, k, v, dout = *case.inputs(dtype), case.gradients(dtype)[0]
    if causal:
        for t in (q, k, v, dout):
            t[:, :, ::9] = torch.nan
    return races((q, k, v), dout, deterministic=deterministic, without=without, **case.options)


@FULL_AND_CAUSAL
@pytest.mark.parametrize("dim", DIMS)
def test_head_dims(emulation: Backend, dim: int, dtype: torch.dtype, causal: bool) -> None:
    assert found(emulation.repeatable, dim, dtype, causal) == []


@FULL_AND_CAUSAL
def test_dropout(emulation: Backend, dtype: torch.dtype, causal: bool) -> None:
    assert found(emulation.repeatable, 32, dtype, causal, dropout_p=0.2) == []


def test_without_a_barrier_or_a_wait_there_are_races() -> None:
    """So each of them is needed, and the detector sees that it is."""

    def missed(place: str) -> bool:
        return not any(
            found(deterministic, dim, torch.float16, causal, dropout_p, place)
            for dim, dropout_p in ((32, 0.0), (32, 0.2), (256, 0.0), (31, 0.0))
            for causal in (False, True)
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
