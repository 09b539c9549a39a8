"""Promise: attention on parts of a sequence is attention on the whole, with every option, forward and backward."""

from random import Random
from typing import Any

import pytest
import torch
from attention.test_random import drawn_case
from distributed import ranks
from distributed.pool import pool
from helpers import DTYPES, run, seeded
from yardstick import Yardsticks, in_double

from pyattn import reference

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")

LAYOUTS = ("zigzag", "contiguous")


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["ring_attention", "ulysses_attention"])
def test_accuracy(name: str, size: int) -> None:
    """Random cases of all options, judged by the rule of yardstick.py."""
    draw, reports = Random(f"{name} {size}"), list[Any]()
    for _ in range(20):
        case, dtype, layout, seed = __import__("dataclasses").replace(drawn_case(draw),dropout_p=0.0), draw.choice(DTYPES), draw.choice(LAYOUTS), draw.getrandbits(32)
        seeded(seed)
        qkv, dout, dlse = case.drawn(dtype)
        dlse = draw.choice([None, dlse])
        options = case.given(dtype)
        ours, *others = pool().run(size, ranks.dense, name, layout, qkv, dout, dlse, options)
        for other in others:
            torch.testing.assert_close(other, ours, rtol=0, atol=0, equal_nan=True)
        doubles = tuple(x.double() for x in qkv)
        exact = run(reference.attention, doubles, dout.double(), dlse, **in_double(options))
        excesses = Yardsticks(exact, run, qkv, dout, dlse, **options).excesses(tuple(ours))
        reports += [(by, f"{of} {dtype} {layout} {case} seed {seed}") for of, by in excesses.items() if by > 1]
    print(*reports, sep="\n")
    assert not reports
