"""Promise: attention over parts of the keys merges into attention over all keys, forward and backward."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.assertions import Refusals, assert_close, each_refusal, finite, graph_of, refused
from support.backends import Backend
from support.cases import DTYPES, Case, alternate, assert_case_accurate, assert_equal, each_dtype
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from pyattn import attention, attention_varlen
from pyattn.parts import merge

CASES = [
    Case(2, 4, 2, 33, 90, 24, 20),
    Case(1, 3, 3, 40, 30, 16, 16),  # the first queries see no key
    Case(1, 2, 1, 30, 90, 21, 21, causal=False),
    Case(2, 2, 2, 33, 70, 32, 32, q_offset=-5, alibi="bh", sinks=True, relative="bh 20"),
    Case(1, 4, 2, 30, 80, 20, 24, window=(20, 3), softcap=3.0, sinks=True),
    Case(2, 4, 2, 20, 60, 21, 21, causal=False, mask="random bhqk", key_ranges="random"),
    Case(1, 2, 2, 33, 64, 32, 32, bias="bands hqk", alibi="h"),
]


def part(options: dict[str, Any], begin: int, end: int, offset: int | Tensor) -> dict[str, Any]:
    """The options of a call with only the keys [begin, end); the first part carries the sinks."""
    mine = options | {"q_offset": offset - begin}
    if "key_ranges" in options:
        mine["key_ranges"] = (options["key_ranges"] - begin).clamp(0, end - begin)
    for name in {"mask", "bias"} & options.keys():
        if options[name].shape[-1] > 1:
            mine[name] = options[name][..., begin:end]
    if begin:
        mine.pop("sinks", None)
    return mine


def cuts(seqlen_k: int, count: int) -> list[tuple[int, int]]:
    """``count`` parts of unequal lengths, [begin, end)."""
    return list(itertools.pairwise(seqlen_k * (i * (i + 1)) // (count * (count + 1)) for i in range(count + 1)))


def in_parts(attend: Callable[..., Any], count: int) -> Callable[..., Any]:
    """``attend`` over ``count`` parts of unequal lengths, merged pairwise; more than two at least in float32."""

    def attend_parts(
        q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, q_offset: int | Tensor | None = None, **options: Any
    ) -> Any:
        seqlen_k = k.shape[2]
        offset = seqlen_k - q.shape[2] if q_offset is None else q_offset
        parts = []
        for begin, end in cuts(seqlen_k, count):
            mine = part(options, begin, end, offset)
            out, lse = attend(q, k[:, :, begin:end], v[:, :, begin:end], return_lse=True, **mine)
            parts.append((out if count == 2 else out.to(lse.dtype), lse))
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=False)
            parts = [merge(*a, *b) for a, b in pairs] + parts[len(parts) & ~1 :]
        out, lse = parts[0]
        return out.to(q.dtype), lse

    return attend_parts


@pytest.mark.parametrize(("case", "count", "dtype"), alternate(CASES, [2, 7], DTYPES), ids=str)
def test_parts_equal_the_whole(repeatable: Backend, case: Case, count: int, dtype: torch.dtype) -> None:
    """out, lse and every gradient, including one through lse; 7 parts of few keys leave some empty for every query."""
    assert_case_accurate(case, dtype, in_parts(repeatable.attention, count))


@each_dtype
def test_one_part_is_the_whole(isa: str, dtype: torch.dtype) -> None:
    """A part without keys changes no bit of the other part, on either side."""
    q, k, v = Case(2, 4, 2, 9, 21, 24, 20).inputs(dtype)
    whole = attention(q, k, v, return_lse=True)
    empty = attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    for found in (merge(*whole, *empty), merge(*empty, *whole)):
        assert_equal(found, whole)


def leaves(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """out_a, lse_a, out_b and lse_b, with rows that see keys in both parts, in either part, and in none."""
    out_a, out_b = torch.randn(2, 1, 2, 4, 3).to(dtype)
    lse_a, lse_b = torch.randn(2, 1, 2, 4, dtype=torch.promote_types(dtype, torch.float32))
    lse_a[..., 1::2], lse_b[..., 2:] = -math.inf, -math.inf
    out_a[..., 1::2, :], out_b[..., 2:, :] = 0.0, 0.0
    return [t.requires_grad_() for t in (out_a, lse_a, out_b, lse_b)]


def test_gradients_are_differences() -> None:
    rows = [t.detach()[..., :1, :] if t.dim() == 4 else t.detach()[..., :1] for t in leaves()]
    assert gradcheck(lambda *x: finite(*merge(*x)), [t.clone().requires_grad_() for t in rows])
    out_a, lse_a, out_b, lse_b = leaves()
    lse_a, lse_b = lse_a.detach(), lse_b.detach()  # some are -inf
    assert gradcheck(lambda a, b: finite(*merge(a, lse_a, b, lse_b)), (out_a, out_b))


def test_second_derivatives_of_equal_parts() -> None:
    """Where both have one lse, either may be the larger one."""
    out = torch.randn(2, 1, 1, 3, 2, dtype=torch.float64)
    lse = torch.zeros(1, 1, 3, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (out[0], lse, out[1], lse)]
    assert gradcheck(merge, leaves)
    assert gradgradcheck(merge, leaves)


@each_dtype
def test_empty_rows_have_no_gradient(dtype: torch.dtype) -> None:
    inputs = leaves(dtype)
    out, lse = merge(*inputs)
    assert (out[..., 3, :] == 0).all()
    assert (lse[..., 3] == -math.inf).all()
    gradients = torch.autograd.grad([out, lse], inputs, [torch.randn_like(out), torch.randn_like(lse)])
    assert all(g.isfinite().all() for g in gradients)
    douts, dlses = torch.stack(gradients[::2]), torch.stack(gradients[1::2])
    for which, row in ((0, 1), (1, 2), (0, 3), (1, 3)):
        assert (douts[which][..., row, :] == 0).all()
        assert (dlses[which][..., row] == 0).all()


def test_packed_sequences_have_their_heads_first_in_lse() -> None:
    out_a, lse_a, out_b, lse_b = (t.detach() for t in leaves())
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    packed = merge(out_a[0].transpose(0, 1), lse_a[0], out_b[0].transpose(0, 1), lse_b[0])
    assert torch.equal(packed[0].transpose(0, 1), out[0])
    assert torch.equal(packed[1], lse[0])


@pytest.mark.usefixtures("isa")
def test_parts_of_packed_sequences() -> None:
    """Parts computed by attention_varlen; some queries see keys of one part only."""
    q, k, v = (torch.randn(17, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    cu_seqlens = torch.tensor([0, 9, 9, 17], dtype=torch.int32)

    def attend(begin: int, end: int) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor([9] * 9 + [8] * 8)
        ranges = torch.stack([lengths.clamp(max=begin), lengths.clamp(max=end)], -1)
        return attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 9, 9, key_ranges=ranges, return_lse=True)

    whole, merged = attend(0, 9), merge(*attend(0, 5), *attend(5, 9))
    douts = [torch.randn_like(t) for t in whole]
    gradients = (torch.autograd.grad(results, (q, k, v), douts) for results in (whole, merged))
    for x, y in zip((*whole, *next(gradients)), (*merged, *next(gradients)), strict=True):
        assert_close(x, y, 1e-13)


@pytest.mark.parametrize("which", range(4))
def test_nan_arrives_in_its_row_alone(which: int) -> None:
    inputs = [t.detach() for t in leaves()]
    inputs[which][0, 1, 0] = math.nan
    out, lse = merge(*inputs)
    rows = torch.zeros(1, 2, 4, dtype=torch.bool)
    rows[0, 1, 0] = True
    assert torch.equal(out.isnan().all(-1), rows)
    assert torch.equal(lse.isnan(), rows & bool(which % 2))


def test_lse_far_apart_does_not_overflow() -> None:
    out_a, _, out_b, _ = (t.detach() for t in leaves(torch.float32))
    far, near = torch.full((1, 2, 4), -3e38), torch.full((1, 2, 4), 80.0)
    out, lse = merge(out_a, far, out_b, near)
    assert torch.equal(out, out_b)
    assert torch.equal(lse, near)


def test_transforms_and_compile() -> None:
    inputs = [t.detach() for t in leaves()]
    expected = merge(*inputs)
    compiled = graph_of(merge)(*inputs)
    mapped = torch.vmap(merge)(*(torch.stack([t, t]) for t in inputs))
    assert_equal(compiled, expected)
    assert_equal((x[1] for x in mapped), expected)
    grad = torch.func.grad(lambda out: merge(out, *inputs[1:])[0].sin().sum())(inputs[0])
    assert grad.isfinite().all()


BAD: Refusals = [
    ({0: 1.0}, TypeError, "out_a must be Tensor, got 1.0"),
    ({3: None}, TypeError, "lse_b must be Tensor, got None"),
    ({0: torch.ones(1, 2, 4, 3, dtype=torch.int64)}, TypeError, "out_a must be a floating-point tensor, got torch.int"),
    ({0: torch.ones(4, 3)}, ValueError, "or, packed, (total_q, num_heads, head_dim_v), got shape (4, 3)"),
    ({2: torch.ones(1, 2, 1, 3)}, ValueError, "out_b must have shape (1, 2, 4, 3), got (1, 2, 1, 3)"),
    ({2: torch.ones(1, 2, 4, 3).half()}, TypeError, "out_b must have dtype torch.float32 beside out_a of"),
    ({1: torch.ones(1, 2, 1)}, ValueError, "lse_a must have shape (1, 2, 4), got (1, 2, 1)"),
    ({3: torch.ones(2, 4)}, ValueError, "lse_b must have shape (1, 2, 4), got (2, 4)"),
    ({1: torch.ones(1, 2, 4).half()}, TypeError, "lse_a must have dtype torch.float32 beside out_a of torch.float32"),
    ({3: torch.ones(1, 2, 4).to("meta")}, ValueError, "lse_b must be on out_a's device, got meta and cpu"),
]


@each_refusal(BAD)
def test_wrong_input_is_refused(changes: dict[int, Any], kind: type[Exception], message: str) -> None:
    inputs: list[Any] = [t.detach() for t in leaves(torch.float32)]
    for which, value in changes.items():
        inputs[which] = value
    with refused(kind, message, inside=True):
        merge(*inputs)
