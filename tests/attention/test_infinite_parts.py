"""Promise: parts in which all scores of a row are -inf, and parts with inf and NaN, merge into what one call gives."""

import math
from random import Random
from typing import Any

import pytest
import torch
from attention.test_merge import part
from support.assertions import check_examples
from support.backends import Backend
from support.infinite import Infinite, infinite
from torch import Tensor

from pyattn import attention, attention_varlen
from pyattn.parts import Gradients, attention_backward, merge

LEARNED = ("bias", "alibi_slopes", "sinks", "relative_bias")


def with_gradients(attend: Any, call: Any) -> tuple[list[str], list[Tensor]]:
    """out, lse and all gradients of ``attend(q, k, v, options)``, and their names."""
    leaves = [t.clone().requires_grad_() for t in call.qkv]
    learned = {name: call.options[name].clone().requires_grad_() for name in LEARNED if name in call.options}
    results = attend(*leaves, call.options | learned)
    found = torch.autograd.grad(results, [*leaves, *learned.values()], call.into)
    return ["out", "lse", "dq", "dk", "dv", *learned], [*(t.detach() for t in results), *found]


def random_parts(draw: Random, seqlen_k: int) -> list[tuple[int, int]]:
    """Two to four parts of the keys, of which some may be empty."""
    ends = sorted(draw.choices(range(seqlen_k + 1), k=draw.randint(1, 3)))
    return list(zip([0, *ends], [*ends, seqlen_k], strict=True))


def merged(draw: Random, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The parts merged in any order, in any tree."""
    while len(parts) > 1:
        first, second = (parts.pop(draw.randrange(len(parts))) for _ in range(2))
        parts.append(merge(*first, *second))
    return parts[0]


def same(found: list[Tensor], expected: list[Tensor], names: list[str], about: Any) -> None:
    """NaN in the same places.

    Except in gradients of calls with inf or NaN: a row that is NaN because of one part makes no gradient NaN in a part
    that has weight 0 there.
    """
    rare = any(isinstance(t, Tensor) and (t.isnan() | (t == math.inf)).any() for t in about.options.values())
    rare = rare or bool(about.options.get("alibi_slopes", torch.zeros(1)).isinf().any())
    for name, x, y in zip(names, found, expected, strict=True):
        if rare and name not in ("out", "lse"):
            assert not (x.isnan() & ~y.isnan()).any(), f"{name} of {about.options}"
            x = torch.where(y.isnan(), y, x)
        torch.testing.assert_close(
            x, y, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda m, n=name: f"{n} of {about.options}: {m}"
        )


def test_dense(request: pytest.FixtureRequest) -> None:
    """Random splits, merged in random trees: out, lse, every gradient, and gradients in parts."""

    def check(draw: Random) -> None:
        seqlen_k = draw.randint(2, 12)
        call = infinite(draw, draw.randint(1, 6), seqlen_k, LEARNED)
        splits = random_parts(draw, seqlen_k)
        with_sinks = draw.randrange(len(splits))

        def options_of(number: int, options: dict[str, Any]) -> dict[str, Any]:
            own = {key: value for key, value in options.items() if key != "sinks"}
            sinks = {"sinks": options["sinks"]} if number == with_sinks and "sinks" in options else {}
            return part(own, *splits[number], options["q_offset"]) | sinks

        def in_parts(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
            results = [
                attention(q, k[:, :, begin:end], v[:, :, begin:end], return_lse=True, **options_of(number, options))
                for number, (begin, end) in enumerate(splits)
            ]
            return merged(draw, results)

        names, whole = with_gradients(lambda *qkv: attention(*qkv[:3], return_lse=True, **qkv[3]), call)
        _, found = with_gradients(in_parts, call)
        same(found, whole, names, call)

    check_examples(request, 60, check)


def test_gradients_in_parts(request: pytest.FixtureRequest) -> None:
    """attention_backward of each part, from the results of one call, beside the gradients of that call."""

    def check(draw: Random) -> None:
        seqlen_k = draw.randint(2, 12)
        call = infinite(draw, draw.randint(1, 6), seqlen_k, ("relative_bias", "bias", "sinks"))
        splits = random_parts(draw, seqlen_k)
        names, (out, lse, *whole) = with_gradients(lambda *qkv: attention(*qkv[:3], return_lse=True, **qkv[3]), call)
        (q, k, v), (dout, dlse) = call.qkv, call.into
        found = [
            attention_backward(
                *(dout, q, k[:, :, begin:end], v[:, :, begin:end], out, lse),
                dlse=dlse,
                **part(call.options, begin, end, call.options["q_offset"]),
            )
            for begin, end in splits
        ]
        kinds = Gradients(*zip(*found, strict=True))
        sums = {"dq": sum(kinds.q), "dk": torch.cat(kinds.k, 2), "dv": torch.cat(kinds.v, 2)}
        if "bias" in call.options:
            sums["bias"] = torch.cat(kinds.bias, -1)
        if "relative_bias" in call.options:
            sums["relative_bias"] = sum(kinds.relative_bias)
        expected = dict(zip(names[2:], whole, strict=True))
        same([*sums.values()], [expected[name] for name in sums], [*sums], call)

    check_examples(request, 40, check)


def test_max_score(request: pytest.FixtureRequest) -> None:
    """Sinks are merged last: out, lse and every gradient are those without max_score."""

    def check(draw: Random) -> None:
        call = infinite(draw, draw.randint(1, 6), draw.randint(2, 12), LEARNED)
        packed = draw.random() < 0.4 and "bias" not in call.options
        (attend, call) = packed_call(call) if packed else (attention, call)
        names, plain = with_gradients(lambda *qkv: attend(*qkv[:3], return_lse=True, **qkv[3]), call)

        def with_score(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
            out, lse, _ = attend(q, k, v, return_lse=True, return_max_score=True, **options)
            return out, lse

        same(with_gradients(with_score, call)[1], plain, names, call)

    check_examples(request, 60, check)


def packed_call(call: Infinite) -> tuple[Any, Infinite]:
    """The sequences of a batch, packed."""
    sizes = [t.shape[2] for t in call.qkv[:2]]
    begins = [torch.tensor([0, n, 2 * n]) for n in sizes]
    qkv = tuple(t.transpose(1, 2).flatten(0, 1) for t in call.qkv)
    dout, dlse = call.into[0].transpose(1, 2).flatten(0, 1), call.into[1].transpose(0, 1).flatten(1)

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return attention_varlen(q, k, v, *begins, *sizes, **options)

    return attend, Infinite(qkv, call.options, (dout, dlse))


def test_packed(request: pytest.FixtureRequest) -> None:
    """Parts of packed sequences by key_ranges, and the call without."""

    def check(draw: Random) -> None:
        call = infinite(
            draw, seqlen_q := draw.randint(1, 6), seqlen_k := draw.randint(2, 12), ("relative_bias", "sinks")
        )
        attend, call = packed_call(call)
        splits = random_parts(draw, seqlen_k)
        names, whole = with_gradients(lambda *qkv: attend(*qkv[:3], return_lse=True, **qkv[3]), call)

        def in_parts(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
            others = options | {"sinks": None}
            results = [
                attend(
                    q,
                    k,
                    v,
                    return_lse=True,
                    key_ranges=torch.tensor([ends]).expand(2 * seqlen_q, 2),
                    **(others if number else options),
                )
                for number, ends in enumerate(splits)
            ]
            return merged(draw, results)

        same(with_gradients(in_parts, call)[1], whole, names, call)

    check_examples(request, 40, check)


@pytest.mark.parametrize("mode", ["second", "forward"])
def test_derivatives(mode: str, request: pytest.FixtureRequest) -> None:
    """Second derivatives and forward mode of two parts, of which one has weight 0 in some rows, and of one call."""

    def check(draw: Random) -> None:
        torch.manual_seed(draw.getrandbits(32))
        qkv = [t[None, None] for t in torch.randn(3, 6, 4).double()]
        table = torch.randn(1, 7).double()
        table[0, draw.choice((slice(0, 2), slice(5, 7), slice(4, 6)))] = -math.inf
        options = {"causal": False, "relative_bias": table, "sinks": draw.choice((None, torch.zeros(1).double()))}

        def one(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return attention(q, k, v, return_lse=True, **options)

        def two(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            first, second = (
                attention(q, k[:, :, b:e], v[:, :, b:e], return_lse=True, **part(options, b, e, 0))
                for b, e in ((0, 3), (3, 6))
            )
            return merge(*first, *second)

        into = torch.randn_like(qkv[0]), torch.randn(1, 1, 6).double()
        directions = [torch.randn_like(t) for t in qkv]
        expected, found = (derivative(mode, f, qkv, into, directions) for f in (one, two))
        assert all(t.isfinite().all() for t in expected)
        torch.testing.assert_close(found, expected)

    check_examples(request, 8, check)


def derivative(mode: str, f: Any, qkv: list[Tensor], into: tuple[Tensor, Tensor], along: list[Tensor]) -> list[Tensor]:
    if mode == "forward":
        return [*torch.func.jvp(f, tuple(qkv), tuple(along))[1]]
    leaves = [t.clone().requires_grad_() for t in qkv]
    first = torch.autograd.grad(f(*leaves), leaves, into, create_graph=True)
    return [*torch.autograd.grad(first, leaves, along)]


@pytest.mark.parametrize("bias", [(1,), (5,), (2, 1, 5), (2, 1, 1), (1, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seqlen_q", range(1, 10))
@pytest.mark.parametrize("group", [2, 3])
def test_distances_that_no_pair_has(
    repeatable: Backend, seqlen_q: int, group: int, dtype: torch.dtype, bias: tuple[int, ...]
) -> None:
    """Kernels compute more rows and keys than there are: what a table says of these changes no gradient."""
    bias = tuple(group if n == 2 else n for n in bias)
    q, k, v = (torch.randn(2, heads, n, 8, dtype=dtype) for heads, n in ((group, seqlen_q), (1, 5), (1, 5)))
    table = torch.randn(group, 81, dtype=dtype)
    reached = torch.zeros(81, dtype=torch.bool)
    reached[40 - seqlen_q - 19 : 40 - 20 + 5] = True  # distances j - (i + 20)
    results = []
    for other in (0.0, math.inf, math.nan):
        leaves = [t.clone().requires_grad_() for t in (q, k, v, torch.ones(bias, dtype=dtype))]
        options = {"causal": False, "q_offset": 20, "relative_bias": torch.where(reached, table, other)}
        out = repeatable.attention(*leaves[:3], bias=leaves[3], **options)
        results.append(torch.autograd.grad(out.sin().sum(), leaves))
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))
