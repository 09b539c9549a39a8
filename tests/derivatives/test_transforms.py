"""Promise: transforms of torch.func compose, two deep, over every differentiable public function."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.assertions import assert_close
from support.calls import FEATURES, Call
from support.transforms import FEW, TRANSFORMS, Function, assert_two_deep, flat, mapped, one_by_one, pattern
from torch import Tensor
from torch.nn.functional import pad

import pyattn
from pyattn import reference

# torch scripts its own forward-mode rules on first use; the category is FutureWarning since torch 2.15.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")

SCORES: dict[str, Any] = {"window": (2, -1), "softcap": 1.5, "dropout_p": 0.4, "dropout_seed": 3}


def dense(attend: Callable[..., Any], **options: Any) -> Function:
    def call(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Any:
        named = dict(zip(("bias", "alibi_slopes", "sinks"), learned, strict=False))
        return attend(q, k, v, return_lse=True, **options, **named)

    return call


def packed(attend: Callable[..., Any], **options: Any) -> Function:
    """A sequence without queries, and one of two queries and two keys."""

    def call(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Any:
        named = dict(zip(("alibi_slopes", "sinks"), learned, strict=False))
        lengths = torch.tensor([0, 0, 2]), torch.tensor([0, 1, 3]), 2, 2
        return attend(q, k, v, *lengths, return_lse=True, **options, **named)

    return call


def in_pages(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """The packed keys in pages of 16: the second sequence's two in page 0, the first one's in page 1."""
    paged = (torch.stack([pad(x[1:], (0, 0, 0, 0, 0, 14)), pad(x[:1], (0, 0, 0, 0, 0, 15))]) for x in (k, v))
    return packed(pyattn.attention_varlen, block_table=torch.tensor([[1], [0]]))(q, *paged)


def weights(q: Tensor, k: Tensor, sinks: Tensor) -> Any:
    return pyattn.attention_weights(q, k, heads=[1], rows=[1, 0], sinks=sinks, softcap=1.5)


def weights_by_formula(q: Tensor, k: Tensor, sinks: Tensor) -> Any:
    *_, found = reference.attention(q, k, k[..., :0], sinks=sinks, softcap=1.5, return_weights=True)
    return found[:, [1]][:, :, [1, 0]]


def merged_by_formula(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Any:
    a, b = lse_a.exp(), lse_b.exp()
    return (a[..., None] * out_a + b[..., None] * out_b) / (a + b)[..., None], (a + b).log()


def answers(attend: Callable[..., Any]) -> Function:
    """Two answers of one token to a prompt of two."""

    def call(q: Tensor, k: Tensor, v: Tensor, prefix_k: Tensor, prefix_v: Tensor, sinks: Tensor) -> Any:
        return attend(q, k, v, prefix_k, prefix_v, sinks=sinks, softcap=1.5, return_lse=True)

    return call


def over_cache(**sizes: Any) -> tuple[Function, Function]:
    """Two queries, the newest of three tokens, by attention_with_cache and by the formula."""
    cache = pyattn.KVCache(1, 1, 4, 2, head_dim_v=1, dtype=torch.float64, **sizes)
    k, v = pattern((1, 1, 3, 2)), pattern((1, 1, 3, 1))
    cache.append(k, v)
    window = cache.window or (-1, -1)

    def ours(q: Tensor, sinks: Tensor) -> Any:
        return pyattn.attention_with_cache(q, cache, sinks=sinks, return_lse=True)

    def truth(q: Tensor, sinks: Tensor) -> Any:
        return reference.attention(q, k, v, sinks=sinks, window=window, return_lse=True)

    return ours, truth


DENSE, PACKED = ((1, 2, 2, 2), (1, 1, 3, 2), (1, 1, 3, 1)), ((2, 2, 2), (3, 1, 2), (3, 1, 1))
OF_SCORES, OVER_CACHE = ((2, 1, 3), (2,), (2,)), ((1, 2, 2, 2), (2,))

CALLS: dict[str, tuple[tuple[Function, Function], tuple[tuple[int, ...], ...], tuple[str, ...]]] = {
    "attention": (
        (dense(pyattn.attention, **SCORES), dense(reference.attention, **SCORES)),
        (*DENSE, *OF_SCORES),
        tuple(TRANSFORMS),
    ),
    "attention_varlen": (
        (packed(pyattn.attention_varlen, **SCORES), packed(reference.attention_varlen, **SCORES)),
        (*PACKED, *OF_SCORES[1:]),
        tuple(TRANSFORMS),
    ),
    "attention_weights": ((weights, weights_by_formula), (*DENSE[:2], (2,)), tuple(TRANSFORMS)),
    "merge": ((pyattn.parts.merge, merged_by_formula), ((1, 2, 2, 1), (1, 2, 2)) * 2, tuple(TRANSFORMS)),
    "attention_with_prefix": (
        (answers(pyattn.attention_with_prefix), answers(reference.attention_with_prefix)),
        ((2, 2, 1, 2), (2, 1, 1, 2), (2, 1, 1, 1), (1, 1, 2, 2), (1, 1, 2, 1), (2,)),
        FEW,
    ),
    "plain": ((dense(pyattn.attention), dense(reference.attention)), DENSE, FEW),
    "pages": ((in_pages, packed(reference.attention_varlen)), PACKED, FEW),
    "cache": (over_cache(), OVER_CACHE, FEW),
    "ring": (over_cache(window=(1, 0)), OVER_CACHE, FEW),
    "pages of a cache": (over_cache(page_size=16), OVER_CACHE, FEW),
}
"""The function to transform, the one that it must equal, the shapes of its inputs, and the transforms."""

ANY_ORDER = ("attention_weights", "merge")
"""Functions composed of torch operations, differentiable any number of times."""


@pytest.mark.parametrize(("name", "outer"), [(name, outer) for name, (_, _, tried) in CALLS.items() for outer in tried])
def test_two_deep(name: str, outer: str) -> None:
    (ours, truth), shapes, tried = CALLS[name]
    assert_two_deep(ours, truth, shapes, outer, tried, name in ANY_ORDER)


def of_part(*inputs: Tensor) -> Any:
    dout, q, k, v, out, lse = inputs
    return pyattn.parts.attention_backward(dout, q, k, v, out, lse)[:3]


PART = ((1, 2, 2, 1), *DENSE, (1, 2, 2, 1), (1, 2, 2))


@pytest.mark.parametrize("inner", TRANSFORMS)
@pytest.mark.parametrize("outer", TRANSFORMS)
def test_backward_in_parts_has_no_derivatives(outer: str, inner: str) -> None:
    inputs = tuple(torch.randn(shape, dtype=torch.float64) for shape in PART)
    both = TRANSFORMS[outer][1](flat(TRANSFORMS[inner][1](flat(of_part))))
    if outer == inner == "vmap":
        torch.testing.assert_close(flat(both)(*inputs), flat(one_by_one(one_by_one(of_part)))(*inputs))
        return
    with pytest.raises(NotImplementedError, match=r"^pyattn: derivatives of attention_backward are not implemented$"):
        both(*inputs)


@pytest.mark.parametrize("which", range(3))
def test_one_input_of_many(which: int) -> None:
    """A derivative in one tensor, while others are mapped or constant: some tangents and gradients are absent."""
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in DENSE]

    def results(function: Any, transform: Any) -> Any:
        def of(x: Tensor) -> Any:
            return function(*inputs[:which], x, *inputs[which + 1 :])

        return [
            flat(TRANSFORMS[outer][1](flat(transform(of))))(inputs[which])
            for outer in ("jvp", "jacfwd", "grad", "hessian")
        ]

    found = results(dense(pyattn.attention), mapped)
    assert_close(found, results(dense(reference.attention), one_by_one), 1e-10)


@pytest.mark.parametrize("name", FEATURES)
def test_tangents_of_vmap_with_each_feature(name: str) -> None:
    call = Call(FEATURES[name])

    def results(function: Any, transform: Any) -> Any:
        moved = TRANSFORMS["jvp"][1](flat(transform(lambda *x: call(function, *x))))
        return flat(moved)(*call.inputs), flat(TRANSFORMS["grad"][1](flat(moved)))(*call.inputs)

    truth = results(reference.attention, one_by_one)
    assert_close(results(pyattn.attention, mapped), truth, 1e-11)
