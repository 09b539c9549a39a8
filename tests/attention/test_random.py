"""Promise: random shapes, layouts, dtypes and instruction sets agree with float64, by the rule of yardstick.py.

``pytest tests/attention/test_random.py --examples 50000`` draws that many new
cases; without it, the same 700 run each time.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from support import case_options
from support.assertions import check_examples
from support.cases import DTYPES, Case, run, seeded
from support.yardstick import Yardsticks, in_double
from torch import Tensor

import pyattn
from pyattn import attention, reference

MORE: dict[str, Callable[[Random], Any]] = {
    "key_ranges": lambda draw: draw.choice(case_options.KEY_RANGES),
    "softcap": lambda draw: draw.uniform(0.1, 50),
    "bias": lambda draw: "{} {}{}".format(
        draw.choice(case_options.BIASES),
        "".join(x for x in "bhqk" if draw.random() < 0.5) or "-",
        draw.choice(["", " strided"]),
    ),
    "alibi": lambda draw: draw.choice(["h", "bh"]),
    "sinks": lambda draw: True,
    "wide": lambda draw: True,
    "relative": lambda draw: f"{draw.choice(['-', 'h', 'b', 'bh'])} {draw.choice((0, 1, 7, 60, 500))}",
}
"""Each option is present in a third of the cases, independently of the others."""


def drawn_case(draw: Random) -> Case:
    def either(*values: Any) -> Any:
        """One of the values; a range stands for one of its numbers."""
        value = draw.choice(values)
        return draw.choice(value) if isinstance(value, Sequence) else value

    small, edges = range(1, 21), (31, 32, 33, 63, 64, 65, 96, 97, 128, 193)
    num_heads_kv, seqlen_q, seqlen_k = draw.randint(1, 3), either(small, edges), either(small, edges)
    head_dim, side = either(small, (32, 40, 64, 80, 128)), (-1, range(21), range(seqlen_k + 3))
    scale = either(None, 0.0, 2.0**-100, *[draw.randint(-(2**21), 2**21) / 2**20] * 3)  # a float32
    return Case(
        draw.randint(1, 2),
        num_heads_kv * draw.randint(1, 4),
        num_heads_kv,
        seqlen_q,
        seqlen_k,
        head_dim,
        either(head_dim, range(1, 41)),
        causal=either(False, True),
        q_offset=either(None, range(-seqlen_q - 2, seqlen_k + 3)),
        softmax_scale=scale,
        dropout_p=either(0.0, draw.uniform(0, 0.9)),
        window=draw.choice([(-1, -1), (either(*side), either(*side))]),
        **{name: value(draw) for name, value in MORE.items() if not draw.randrange(3)},
    )


def laid_out(x: Tensor, order: list[int], padding: int) -> Tensor:
    """x with its dimensions stored in this order, inside a buffer of NaN."""
    buffer = torch.full([x.shape[d] + padding for d in order], math.nan, dtype=x.dtype)
    view = buffer.permute([order.index(d) for d in range(4)])[(slice(padding, None),) * 4]
    return view.copy_(x)


def strided_integers(case: Case) -> dict[str, Tensor]:
    """The case's options that can be integer tensors, with other strides than a new tensor's."""
    tensors = {"key_ranges": case.options["key_ranges"]} if case.key_ranges else {}
    if case.q_offset is not None:
        tensors["q_offset"] = torch.full((case.batch,), case.q_offset)
    return {name: case_options.strided(t) for name, t in tensors.items()}


@pytest.mark.usefixtures("threads")
def test_accuracy(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(1)  # faster than two at these sizes and on busy machines
    tensors: Counter[tuple[torch.dtype, str]] = Counter()
    refused: Counter[tuple[torch.dtype, str]] = Counter()
    reports: list[tuple[float, str]] = []

    def check(draw: Random) -> None:
        case, dtype, isa, seed = drawn_case(draw), draw.choice(DTYPES), draw.choice(pyattn.isas()), draw.getrandbits(32)
        pyattn.set_isa(isa)
        seeded(seed)
        qkv, dout, dlse = case.drawn(dtype)
        dlse = draw.choice([None, dlse])
        padding = draw.randrange(4)
        inputs = [laid_out(x, draw.sample(range(4), 4), padding) for x in (*qkv, dout)]
        options = case.given(dtype)
        integers = draw.choice([{}, strided_integers(case)])
        ours = run(attention, tuple(inputs[:3]), inputs[3], dlse, **options | integers)
        doubles = tuple(x.double() for x in qkv)
        exact = run(reference.attention, doubles, dout.double(), dlse, **in_double(options))
        for name, by in Yardsticks(exact, run, qkv, dout, dlse, **options).excesses(ours).items():
            tensors[dtype, name] += 1
            if by > 1:
                refused[dtype, name] += 1
                reports.append((by, f"{name} {dtype} {isa} {case} seed {seed}"))

    check_examples(request, 700, check)
    shares = {
        f"{dtype} {name}": f"{refused[dtype, name]} of {n}" for (dtype, name), n in sorted(tensors.items(), key=str)
    }
    print(*shares.items(), *sorted(reports, reverse=True)[:20], sep="\n")
    assert not reports
