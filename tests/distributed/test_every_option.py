"""Promise: every tensor option, in every form that its axes allow, goes through every function of several ranks."""

from typing import Any

import pytest
import torch
from support.axes import PUBLIC, forms, of_axes, with_seed
from support.ranks import every_option
from support.ranks.pool import pool
from torch import Tensor

from pyattn import attention

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")

B, HQ, HKV, S, D = 2, 4, 2, 8, 8
SIZES = {"b": B, "h": HQ, "g": HKV, "q": S, "k": S, "n": 2, "r": 9, "2": 2}
FORMS = [(name, *form) for name in PUBLIC for form in forms(name)]


def qkv() -> list[Tensor]:
    return [torch.randn(B, heads, S, D, dtype=torch.float64) for heads in (HQ, HKV, HKV)]


def given(name: str, broadcast: str, left_out: int) -> dict[str, Any]:
    return with_seed(name, of_axes(name, SIZES, broadcast, left_out))


def close(found: list[Tensor], expected: Tensor) -> None:
    for one in found:
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("function", "size", "layout"),
    [("ring_attention", 2, "zigzag"), ("ulysses_attention", 2, "contiguous"), ("usp_attention 2x4", 8, "contiguous")],
)
def test_sequences(function: str, size: int, layout: str) -> None:
    for form in FORMS:
        tensors, options = qkv(), given(*form)
        close(
            pool().run(size, every_option.sequences, function, layout, tensors, options), attention(*tensors, **options)
        )


def test_caches() -> None:
    for form in FORMS:
        (q, k, v), options = qkv(), given(*form)
        q = q[:, :, -3:]
        options |= {form[0]: of_axes(form[0], SIZES | {"q": 3}, *form[1:])}
        close(pool().run(2, every_option.cached, q, k, v, options), attention(q, k, v, **options))


@pytest.mark.parametrize("axis", ["b", "h", "q"])
def test_dtensors(axis: str) -> None:
    for form in FORMS:
        tensors, options = qkv(), given(*form)
        close(pool().run(2, every_option.sharded, axis, tensors, options), attention(*tensors, **options))
