"""Promise: random shapes, layouts, dtypes and instruction sets agree with float64, by the rule of yardstick.py.

``pytest tests/attention/test_random.py --examples 50000`` draws that many new
cases; without it, the same 2,000 run each time.
"""

import math
from collections import Counter

import case_options
import pytest
import torch
from assertions import check_examples
from helpers import DTYPES, Case, run
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from yardstick import Yardsticks, in_double

import pyattn
from pyattn import attention, reference

MORE = {
    "key_ranges": st.sampled_from(case_options.KEY_RANGES),
    "softcap": st.floats(0.1, 50),
    "bias": st.tuples(
        st.sampled_from(case_options.BIASES),
        st.lists(st.sampled_from("bhqk"), unique=True).map(lambda full: "".join(full) or "-"),
        st.sampled_from(["", " strided"]),
    ).map(lambda words: "{} {}{}".format(*words)),
    "alibi": st.sampled_from(["h", "bh"]),
    "sinks": st.just(True),
    "wide": st.just(True),
}
"""Each option is present in a third of the cases, independently of the others."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = st.integers(1, 20) | st.sampled_from([31, 32, 33, 63, 64, 65, 96, 97, 128, 193])
    num_heads_kv = draw(st.integers(1, 3))
    seqlen_q, seqlen_k = draw(sizes), draw(sizes)
    head_dim = draw(st.integers(1, 20) | st.sampled_from([32, 40, 64, 80, 128]))
    sides = st.just(-1) | st.integers(0, 20) | st.integers(0, seqlen_k + 2)
    return Case(
        draw(st.integers(1, 2)),
        num_heads_kv * draw(st.integers(1, 4)),
        num_heads_kv,
        seqlen_q,
        seqlen_k,
        head_dim,
        draw(st.just(head_dim) | st.integers(1, 40)),
        causal=draw(st.booleans()),
        q_offset=draw(st.none() | st.integers(-seqlen_q - 2, seqlen_k + 2)),
        softmax_scale=draw(st.none() | st.floats(-2, 2, width=32)),
        dropout_p=draw(st.just(0.0) | st.floats(0, 0.9)),
        window=draw(st.just((-1, -1)) | st.tuples(sides, sides)),
        **{name: draw(values) for name, values in MORE.items() if draw(st.integers(0, 2)) == 0},
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
    drawn: set[tuple[object, ...]] = set()
    reports: list[tuple[float, str]] = []

    @given(
        case=cases(),
        dtype=st.sampled_from(DTYPES),
        isa=st.sampled_from(pyattn.isas()),
        seed=st.integers(0, 2**32),
        orders=st.lists(st.permutations(range(4)), min_size=4, max_size=4),
        padding=st.integers(0, 3),
        with_dlse=st.booleans(),
        strided=st.booleans(),
    )
    def check(
        case: Case,
        dtype: torch.dtype,
        isa: str,
        seed: int,
        orders: list[list[int]],
        padding: int,
        with_dlse: bool,
        strided: bool,
    ) -> None:
        if (key := (case, dtype, isa, seed, with_dlse)) in drawn:  # in another layout: no bit may change
            return
        drawn.add(key)
        pyattn.set_isa(isa)
        torch.manual_seed(seed)
        qkv, dout, dlse = case.drawn(dtype)
        dlse = dlse if with_dlse else None
        inputs = [laid_out(x, order, padding) for x, order in zip((*qkv, dout), orders, strict=True)]
        options = case.given(dtype)
        ours = run(
            attention, tuple(inputs[:3]), inputs[3], dlse, **options | (strided_integers(case) if strided else {})
        )
        plain = Yardsticks(run, qkv, dout, dlse, **options)
        doubles = tuple(x.double() for x in qkv)
        exact = run(reference.attention, doubles, dout.double(), dlse, **in_double(options))
        for name, by in plain.excesses(ours, exact).items():
            tensors[dtype, name] += 1
            if by > 1:
                refused[dtype, name] += 1
                reports.append((by, f"{name} {dtype} {isa} {case} seed {seed}"))

    check_examples(request, 2000, check)
    shares = {
        f"{dtype} {name}": f"{refused[dtype, name]} of {n}" for (dtype, name), n in sorted(tensors.items(), key=str)
    }
    print(*shares.items(), *sorted(reports, reverse=True)[:20], sep="\n")
    assert not reports
