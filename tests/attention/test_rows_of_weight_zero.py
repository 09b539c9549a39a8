"""Promise: a row whose scores are all -inf adds 0 to every gradient if none arrives at it, and NaN otherwise."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.assertions import graph_of
from support.backends import Backend
from support.cases import Case, Drawn, each_dtype, run
from torch import Tensor

from pyattn import attention
from pyattn.parts import merge

CASES = [
    Case(2, 4, 2, 17, 20, 24, 20, relative="h 30"),
    Case(1, 4, 2, 40, 230, 21, 40, relative="h 300"),
    Case(1, 4, 2, 1, 1300, 24, 24, relative="h 1300"),
    Case(2, 4, 4, 7, 25, 21, 21, causal=False, mask="random bhqk", key_ranges="random", relative="bh 3"),
    Case(1, 4, 2, 33, 90, 21, 40, window=(60, 3), softcap=3.0, alibi="h", bias="float bhqk", relative="h 5"),
    Case(2, 4, 2, 9, 40, 32, 40, dropout_p=0.3, bias="bands k", relative="bh 50"),
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def with_dead_head(case: Case, dtype: torch.dtype) -> tuple[Drawn, dict[str, Any], dict[str, Any]]:
    """A call in which query head 1 gets no gradient; its options, and the same with scores of -inf in that head.

    Rows of heads that share a KV head lie side by side in a tile.
    """
    (qkv, dout, dlse), options = case.drawn(dtype), case.given(dtype)
    dout[:, 1], dlse[:, 1] = 0, 0
    dead = options["relative_bias"].clone()
    dead[..., 1, :] = -math.inf
    return (qkv, dout, dlse), options, options | {"relative_bias": dead}


@each_dtype
@each_case
@pytest.mark.parametrize("with_dlse", [True, False])
def test_adds_nothing(repeatable: Backend, case: Case, with_dlse: bool, dtype: torch.dtype) -> None:
    """The gradients have the bits of those with finite scores, which add 0 because dout and dlse are 0."""
    (qkv, dout, dlse), finite, dead = with_dead_head(case, dtype)
    into = dout, dlse if with_dlse else None
    expected, found = (run(repeatable.attention, qkv, *into, **options) for options in (finite, dead))
    assert found[0][:, 1].isnan().any()
    for x, y in zip(found[2:], expected[2:], strict=True):
        assert torch.equal(x, y)


@each_dtype
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_adds_nothing_packed(repeatable: Backend, case: Case, dtype: torch.dtype) -> None:
    (qkv, dout, dlse), finite, dead = with_dead_head(case, dtype)
    q, k, v, dout = (t.transpose(1, 2).flatten(0, 1) for t in (*qkv, dout))
    lengths = [torch.arange(case.batch + 1) * n for n in (case.seqlen_q, case.seqlen_k)]

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return repeatable.attention_varlen(q, k, v, *lengths, case.seqlen_q, case.seqlen_k, **options)

    dlse = dlse.transpose(0, 1).flatten(1)
    expected, found = (run(attend, (q, k, v), dout, dlse, **options) for options in (finite, dead))
    for x, y in zip(found[2:], expected[2:], strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_dlse", [True, False])
@pytest.mark.parametrize(
    ("case", "entries", "block"),
    [
        (Case(1, 4, 2, 9, 40, 24, 20), 9, 1),
        (Case(1, 3, 3, 100, 100, 64, 64), 100, 1),
        (Case(1, 16, 1, 80, 700, 64, 64), 200, 1),
        (Case(1, 16, 1, 80, 700, 64, 64), 6, 64),
        (Case(1, 4, 2, 130, 160, 64, 64), 2, 32),
        (Case(2, 6, 2, 70, 333, 40, 31, window=(200, 0), sinks=True), 5, 40),
    ],
    ids=str,
)
def test_adds_nothing_with_lists(
    isa: str, case: Case, entries: int, block: int, with_dlse: bool, dtype: torch.dtype
) -> None:
    """A table of distances would take the lists to other kernels, so products of q and k are -inf.

    In float16, such products would be finite.
    """
    (q, k, v), dout, dlse = case.drawn(dtype)
    dout[:, 1], dlse[:, 1] = 0, 0
    q[..., 0], k[..., 0] = 0, 100
    dead = q.clone()
    dead[:, 1, :, 0] = torch.finfo(dtype).min / 2
    options = case.given(dtype) | {"selected_block": block, "softmax_scale": 1.0}
    options["selected"] = torch.randint(0, -(-case.seqlen_k // block), (1, 1, case.seqlen_q, entries))
    expected, found = (run(attention, (x, k, v), dout, dlse if with_dlse else None, **options) for x in (q, dead))
    assert case.sinks or found[0][:, 1].isnan().any()
    assert (found[1][:, 0] != found[1][:, 1]).any()
    for x, y in zip(found[2:], expected[2:], strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("bias", ["", "bands bhqk"])
def test_infinite_slopes_with_lists(bias: str) -> None:
    """Scores of -inf hide no key, as with the same mask: a row of them is 0 / 0, unless its bias hides all keys."""
    case = Case(1, 4, 2, 17, 40, 24, 20, q_offset=90, bias=bias, alibi="h")
    (q, k, v), dout, dlse = case.drawn(torch.float64)
    options, selected = case.given(torch.float64), torch.randint(-1, 40, (1, 1, 17, 9))
    options["alibi_slopes"][1] = math.inf
    dout[:, 1], dlse[:, 1] = 0, 0
    mask = (selected.unsqueeze(-1) == torch.arange(40)).any(-2)
    found, expected = (
        run(attention, (q, k, v), dout, dlse, **options | {n: t}) for n, t in (("selected", selected), ("mask", mask))
    )
    assert found[0][:, 1].isnan().any()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, equal_nan=True)


@each_dtype
@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_adds_nothing_in_a_part(repeatable: Backend, case: Case, pair: bool, dtype: torch.dtype) -> None:
    """Row statistics are those that the caller has: lse, or the largest score and the sum."""
    ((q, k, v), dout, dlse), _, dead = with_dead_head(case, dtype)
    out, lse = repeatable.attention(q, k, v, return_lse=True, **dead)
    rows = (lse, torch.where(lse == -math.inf, 0, torch.ones_like(lse))) if pair else lse
    found = repeatable.attention_backward(dout, q, k, v, out, rows, dlse=dlse.to(lse.dtype), **dead)
    for x in found:
        assert x is None or x.isfinite().all()
    assert not found[0][:, 1].any()
    assert not found[-1][..., 1, :].any()


@each_dtype
@pytest.mark.parametrize("arrives", ["dout", "dlse"])
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_a_gradient_that_arrives_is_nan(repeatable: Backend, case: Case, arrives: str, dtype: torch.dtype) -> None:
    """As 0 / 0 is in softmax. In the last row of head 1, which sees every key."""
    (qkv, dout, dlse), _, dead = with_dead_head(case, dtype)
    if arrives == "dout":
        dout[:, 1, -1, -1] = 1
    else:
        dlse[:, 1, -1] = 1
    _, _, dq, dk, dv, drelative = run(repeatable.attention, qkv, dout, dlse, **dead)
    assert dq[:, 1, -1].isnan().all()
    assert not dq[:, 1, :-1].any()
    assert dk[:, 0].isnan().all()
    assert dv[:, 0].isnan().all()
    assert drelative[..., 1, :].isnan().any()
    for x in (dq[:, 2:], dk[:, 1:], dv[:, 1:], drelative[..., 2:, :]):
        assert x.isfinite().all()


def merged(options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, relative_bias: Tensor) -> Tensor:
    """Attention over the keys before 20 and from 20 on, merged."""
    options = {"relative_bias": relative_bias, "return_lse": True} | options
    first = attention(q, k[:, :, :20], v[:, :, :20], q_offset=0, **options)
    return merge(*first, *attention(q, k[:, :, 20:], v[:, :, 20:], q_offset=-20, **options))[0]


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out.sum(), leaves)]


def test_merge_in_a_compiled_graph() -> None:
    """The first part has weight 0 for the last queries, whose scores there are all -inf."""
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    relative_bias = torch.zeros(1, 21)
    relative_bias[:, :1] = -math.inf
    options = {"causal": False}

    def attend(*inputs: Tensor) -> Tensor:
        return merged(options, *inputs)

    whole = with_gradients(
        lambda q, k, v, relative_bias: attention(q, k, v, q_offset=0, relative_bias=relative_bias, **options),
        *(q, k, v, relative_bias),
    )
    found = with_gradients(graph_of(attend), q, k, v, relative_bias)
    assert all(t.isfinite().all() for t in whole)
    torch.testing.assert_close(found, whole)
    torch.testing.assert_close(found, with_gradients(attend, q, k, v, relative_bias))
