"""The backends that the laws are tested on: this machine's instruction sets, the emulated CUDA kernels, a GPU.

One more backend, which no law is tested on, stands in for a GPU in tests of graphs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import emulated
import pytest
import rehearsed
import torch
from support.cases import Case
from support.yardstick import NAMES
from torch import Tensor

import pyattn
from pyattn.instruction_sets import BFLOAT16_PRODUCTS


@dataclass(frozen=True)
class Backend:
    """Kernels, and their promises where backends differ.

    Attributes:
        name: an instruction set, ``emulated``, ``cuda`` or ``rehearsed``.
        family: ``cpu``, ``emulated``, ``cuda`` or ``rehearsed``.
        repeatable: dq has the same bits each time. Only 16-bit kernels have a variant that adds it up atomically.
    """

    name: str
    family: str
    repeatable: bool = True

    def __str__(self) -> str:
        return self.name if self.repeatable else f"{self.name}-adding"

    @property
    def device(self) -> str:
        return "cuda" if self.family == "cuda" else "cpu"

    @property
    def cuda_kernels(self) -> bool:
        """Whether the kernels are CUDA's.

        A NaN or infinity in a value may then make its whole row NaN, head_dim is at most 256, float32 is split into
        TF32 halves, and a sequence has the same bits alone and in a batch.
        """
        return self.family in ("emulated", "cuda")

    def lengths(self, dtype: torch.dtype) -> tuple[int, ...]:
        """Sequence lengths around those of vectors (up to 32 numbers on a CPU), tiles (64 or 128) and key blocks."""
        if self.family == "cpu":
            return 1, 5, 16, 17, 33, 64, 100, 230
        if self.family == "cuda":
            return 1, 17, 64, 100, 230, 300
        return (17, 33) if dtype == torch.float64 else (17, 90)

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Head dimensions that fill vectors, tiles and 16 bytes, and some that don't."""
        return {"cpu": (20, 21, 32), "emulated": (21, 40), "cuda": (20, 21, 64, 128, 200)}[self.family]

    def keeps_infinity(self, dtype: torch.dtype) -> bool:
        """False on CUDA in float32: an infinite number, split into two halves, becomes NaN."""
        return not (self.cuda_kernels and dtype == torch.float32)

    def takes(self, dtype: torch.dtype | None, case: Case | None) -> bool:
        """Whether such kernels exist, and an emulated case takes a second rather than a minute.

        AVX512_BF16 and AMX have kernels for bfloat16 alone, beside AVX-512's. In float64, an emulated warp exchanges
        words for every pair of query and key.
        """
        if self.name in BFLOAT16_PRODUCTS and dtype not in (None, torch.bfloat16):
            return False
        if dtype is not None and not self.repeatable and dtype.itemsize != 2:
            return False
        if case is None or not self.cuda_kernels:
            return True
        pairs = case.batch * case.num_heads_q * case.seqlen_q * case.seqlen_k
        affordable = 6_000 if dtype == torch.float64 else 75_000
        return max(case.head_dim, case.head_dim_v) <= 256 and (self.family == "cuda" or pairs < affordable)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """``pyattn.attention`` by this backend's kernels."""
        if self.family != "emulated":
            return pyattn.attention(q, k, v, **options)
        return emulated.attention(q, k, v, deterministic=self.repeatable, **options)

    def attention_varlen(self, q: Tensor, k: Tensor, v: Tensor, *packing: Any, **options: Any) -> Any:
        """``pyattn.attention_varlen`` by this backend's kernels."""
        if self.family != "emulated":
            return pyattn.attention_varlen(q, k, v, *packing, **options)
        return emulated.attention_varlen(q, k, v, *packing, deterministic=self.repeatable, **options)

    def attention_backward(self, *tensors: Any, **options: Any) -> tuple[Tensor | None, ...]:
        """``pyattn.parts.attention_backward`` by this backend's kernels."""
        if self.family != "emulated":
            return pyattn.parts.attention_backward(*tensors, **options)
        return emulated.attention_backward(*tensors, deterministic=self.repeatable, **options)

    def needs_memory(self, size: float) -> None:
        """Skips a test that needs more memory than the GPU has. (A CPU's memory is not touched.)"""
        if self.family == "cuda" and torch.cuda.get_device_properties(0).total_memory < size:
            pytest.skip(f"needs a GPU of {size / 1e9:.0f} GB")

    @contextmanager
    def selected(self) -> Iterator[None]:
        """Inside the block, the backend's kernels run and tensors are created on its device."""
        if self.family == "cpu":
            before = pyattn.isa()
            pyattn.set_isa(self.name)
            assert pyattn.isa() == self.name
            yield
            pyattn.set_isa(before)
        elif self.family == "emulated":
            yield
        elif self.family == "rehearsed":
            with rehearsed.instead_of_cuda():
                yield
        else:
            exact_products()
            pyattn.set_deterministic(self.repeatable)
            with torch.device(self.device):
                yield
            pyattn.set_deterministic(True)

    def assert_same(self, ours: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
        """Asserts that the given ones of out, lse, dq, ... agree to the bit; dq up to a rounding if not repeatable."""
        for name, x, y in zip(NAMES, ours, expected, strict=False):
            if name == "dq" and not self.repeatable:
                bound = 2 * torch.finfo(x.dtype).eps * y.abs().max() if y.numel() else 0
                assert ((x - y).abs() <= bound).all(), name
            else:
                assert torch.equal(x, y), name


def exact_products() -> None:
    """Makes torch's products, the yardstick, exact: float32 in float32, and 16-bit products summed in float32."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False


CPU = [Backend(isa, "cpu") for isa in pyattn.isas()]
EMULATED = [Backend("emulated", "emulated", repeatable) for repeatable in (True, False)]
CUDA = [Backend("cuda", "cuda", repeatable) for repeatable in (True, False)]
REHEARSED = [Backend("rehearsed", "rehearsed")]


def chosen(names: list[str]) -> list[Backend]:
    """The backends with these names or families; without any, those of this processor."""
    if not names:
        return CPU + REHEARSED
    known = CPU + EMULATED + CUDA + REHEARSED
    allowed = dict.fromkeys(name for b in known for name in (b.family, b.name))
    if not set(names) <= allowed.keys():
        raise pytest.UsageError(f"--backend must be one of {', '.join(allowed)}, got {', '.join(names)}")
    return [b for b in known if {b.name, b.family} & set(names)]
