"""Promise: ranks that have only scores of -inf for a row, or inf and NaN, get what one process computes."""

import math
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from attention.test_infinite_parts import LEARNED, packed_call, with_gradients
from support.assertions import check_examples
from support.infinite import infinite
from support.ranks import decoding, ranks
from support.ranks.pool import pool
from torch import Tensor

from pyattn import attention, attention_with_cache

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")

LAYOUTS = ("zigzag", "contiguous", "chunk")


def assert_same(found: list[Tensor], expected: list[Tensor], names: list[str], options: dict[str, Any]) -> None:
    """NaN in the same places; but for gradients of sinks of inf and NaN: a row without keys gives these NaN or dlse."""
    for name, x, y in zip(names, found, expected, strict=True):
        if name == "sinks":
            finite = options[name] < math.inf
            x, y = x[finite], y[finite]
        torch.testing.assert_close(
            x, y, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda m, n=name: f"{n} of {options}: {m}"
        )


@pytest.mark.parametrize(
    ("name", "size"), [("ring_attention", 2), ("ring_attention", 3), ("ulysses_attention", 3), ("usp_attention 2x4", 8)]
)
def test_dense(name: str, size: int, request: pytest.FixtureRequest) -> None:
    """out, lse and every gradient."""

    def check(draw: Random) -> None:
        length = draw.randint(1, 14)
        call, layout = infinite(draw, length, length, LEARNED), draw.choice(LAYOUTS)
        names, expected = with_gradients(lambda *qkv: attention(*qkv[:3], return_lse=True, **qkv[3]), call)
        options = {key: value for key, value in call.options.items() if key not in LEARNED}
        options |= {key: call.options[key] for key in LEARNED if key in call.options}
        for found, _ in pool().run(size, ranks.dense, name, layout, call.qkv, *call.into, options):
            assert_same(found, expected, names, call.options)

    check_examples(request, 12, check)


@pytest.mark.parametrize("size", [2, 3])
def test_packed(size: int, request: pytest.FixtureRequest) -> None:
    def check(draw: Random) -> None:
        lengths = draw.randint(1, 9), draw.randint(1, 9)
        call = infinite(draw, *lengths, ("alibi_slopes", "sinks", "relative_bias"))
        attend, call = packed_call(call)
        names, expected = with_gradients(lambda *qkv: attend(*qkv[:3], return_lse=True, **qkv[3]), call)
        sizes = tuple(torch.tensor([0, n, 2 * n]) for n in lengths)
        layout = draw.choice((*LAYOUTS, "zigzag_varlen"))
        for found in pool().run(size, ranks.packed, layout, call.qkv, *call.into, sizes, call.options):
            assert_same(found, expected, names, call.options)

    check_examples(request, 12, check)


@pytest.mark.parametrize("size", [2, 3])
def test_caches(size: int, request: pytest.FixtureRequest) -> None:
    """Also max_score; some ranks have no key of a sequence."""

    def check(draw: Random) -> None:
        total = draw.randint(4, 14)
        call = infinite(draw, draw.randint(1, 3), total, LEARNED)
        q, k, v = call.qkv
        cuts = [sorted(draw.choices(range(total + 1), k=size - 1)) for _ in range(2)]
        lengths = torch.tensor([[end - begin for begin, end in pairwise((0, *cut, total))] for cut in cuts]).mT
        options = dict(call.options)
        if "bias" in options:
            options["bias"] = options["bias"].expand(2, -1, -1, -1)
        cache = decoding.filled(k, v, lengths.sum(0), None)
        one = dict(options)
        if "bias" in one:
            one["bias"] = torch.nn.functional.pad(one["bias"], (0, 3))
        expected = decoding.results(attention_with_cache, q, cache, call.into, one)
        if "bias" in one:
            expected[4] = expected[4][..., :total]
        names = ["out", "lse", "max_score", "dq", *(name for name in LEARNED if name in options)]
        for found in pool().run(size, decoding.decoded, q, k, v, lengths, call.into, options):
            assert_same(found, expected, names, options)

    check_examples(request, 12, check)


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
def test_a_sink_without_keys(value: float) -> None:
    """The first queries see no key: out is 0 and lse the sink, whatever it is."""
    torch.manual_seed(0)
    qkv = torch.randn(3, 1, 2, 6, 4).double().unbind()
    into = torch.randn(1, 2, 6, 4).double(), torch.randn(1, 2, 6).double()
    options: dict[str, Any] = {"sinks": torch.tensor([0.5, value]).double(), "q_offset": -3}
    out, lse = attention(*qkv, return_lse=True, **options)
    for name, size in (("ring_attention", 3), ("ulysses_attention", 2)):
        for found, _ in pool().run(size, ranks.dense, name, "zigzag", qkv, *into, options):
            assert_same(found[:2], [out, lse], ["out", "lse"], options)
