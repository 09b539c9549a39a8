"""Promise: packed sequences with keys in pages get the results of contiguous keys."""

import functools
import math
from functools import partial
from typing import Any

import pytest
import torch
from support import case_options
from support.assertions import assert_close, graph_of
from support.cases import DTYPES, alternate, assert_equal, each_dtype
from support.packed import GROUPED, MIXED, Packed, gradients_of, results
from support.yardstick import in_double
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.flop_counter import FlopCounterMode

from pyattn import attention_varlen, reference
from pyattn.options import Options

forward = torch.ops.pyattn.attention_varlen_paged_forward

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

KINDS = {"mixed": MIXED, "grouped": GROUPED}
SIZES = [16, 21, 512]
each_size = pytest.mark.parametrize("page_size", SIZES)


class Paged:
    """The keys of packed sequences in pages, in any order, NaN around them, -1 after a sequence's last page."""

    def __init__(self, packed: Packed, page_size: int, spare: int = 2) -> None:
        self.packed, self.size = packed, page_size
        counts = [-(-n // page_size) for n in packed.keys]
        self.pages = torch.randperm(sum(counts) + spare)
        self.table = torch.full((len(counts), max(counts) + 1), -1)
        for row, pages in zip(self.table, self.pages.split([*counts, spare])[:-1], strict=True):
            row[: len(pages)] = pages

    def of(self, t: Tensor) -> Tensor:
        """(tokens, heads, dim) -> (pages, page_size, heads, dim)."""
        paged = t.new_full((len(self.pages), self.size, *t.shape[1:]), math.nan)
        for row, (_, keys) in zip(self.table.tolist(), self.packed.spans, strict=True):
            for page, some in zip(row, t[keys].split(self.size), strict=False):
                paged[page, : len(some)] = some
        return paged

    def back(self, paged: Tensor, like: Tensor) -> Tensor:
        """The inverse of :meth:`of`, 0 for tokens of no sequence."""
        t = torch.zeros_like(like)
        for row, (_, keys) in zip(self.table.tolist(), self.packed.spans, strict=True):
            t[keys] = torch.cat([paged[:0].flatten(0, 1), *(paged[page] for page in row if page >= 0)])[
                : keys.stop - keys.start
            ]
        return t


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": (40, 3), "causal": False},
    "softcap": {"softcap": 3.0, "softmax_scale": 0.7, "q_offset": 7},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
}


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    ("kind", "page_size", "name", "dtype"), alternate(list(KINDS), SIZES, list(OPTIONS), DTYPES), ids=str
)
def test_same_bits_as_one_behind_the_other(kind: str, page_size: int, name: str, dtype: torch.dtype) -> None:
    packed, options = KINDS[kind], OPTIONS[name]
    q, k, v = packed.inputs(dtype)
    paged = Paged(packed, page_size)
    expected = attention_varlen(q, k, v, *packed.packing, return_lse=True, **options)
    call = partial(attention_varlen, q, paged.of(k), paged.of(v), *packed.packing, return_lse=True, **options)
    for table in (paged.table, paged.table.int(), case_options.strided(paged.table)):
        assert_equal(call(block_table=table), expected)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("apart", [0, 1], ids=["keys", "values"])
def test_keys_or_values_alone_in_one_piece(apart: int) -> None:
    """Pages are adjacent; between those of k, or of v, there is a position of NaN."""
    packed = Packed([1], [100], (4, 2))
    q, *kv = packed.inputs(torch.float32, 32, 32)
    pages = [torch.full((7, 16 + (i == apart), 2, 32), math.nan) for i in range(2)]
    for t, paged in zip(kv, pages, strict=True):
        for page, part in zip(paged, t.split(16), strict=True):
            page[: len(part)] = part
    k, v = (paged[:, :16] for paged in pages)
    ours = attention_varlen(q, k, v, *packed.packing, block_table=torch.arange(7)[None], return_lse=True)
    assert_equal(ours, attention_varlen(q, *kv, *packed.packing, return_lse=True))


@functools.cache
def option_of_each_sequence(name: str) -> tuple[Any, ...]:
    """Inputs, the same in pages, their table, the option and the exact results, once for all instruction sets."""
    count, heads = len(GROUPED.queries), GROUPED.heads[0]
    options = {
        "q_offset": torch.randint(-9, 50, (count,)),
        "key_ranges": GROUPED.ranges(),
        "alibi_slopes": torch.rand(count, heads),
        "relative_bias": torch.randn(count, heads, 31),
        "sinks": torch.randn(heads),
        "seqused_k": torch.tensor([n * 2 // 3 for n in GROUPED.keys], dtype=torch.int32),
    }
    (q, k, v), paged = GROUPED.inputs(torch.float32), Paged(GROUPED, 48)
    paged_inputs, own = (q, paged.of(k), paged.of(v), *GROUPED.packing), {name: options[name]}
    exact = reference.attention_varlen(
        *(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in paged_inputs),
        **in_double(own),
        block_table=paged.table,
        return_lse=True,
    )
    return (q, k, v), paged_inputs, paged.table, own, tuple(x.float() for x in exact)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", ["q_offset", "key_ranges", "alibi_slopes", "relative_bias", "sinks", "seqused_k"])
def test_options_of_each_sequence(name: str) -> None:
    qkv, paged_inputs, table, option, exact = option_of_each_sequence(name)
    call = partial(attention_varlen, return_lse=True, **option)
    ours = call(*paged_inputs, block_table=table)
    assert_equal(ours, call(*qkv, *GROUPED.packing))
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("isa")
@each_dtype
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_gradients(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Gradients of pages have the pages' shape, and are 0 where no key lies."""
    q, k, v = GROUPED.inputs(dtype)
    slopes, paged = torch.rand(24).to(dtype), Paged(GROUPED, 48)
    gradients = gradients_of((q, k, v))

    def call(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
        return attention_varlen(q, k, v, *GROUPED.packing, **options, **named)

    expected = results(call, (q, k, v), *gradients, alibi_slopes=slopes)
    for table in (paged.table, paged.table.mT.contiguous().mT, case_options.strided(paged.table.int())):
        with_pages = partial(call, block_table=table)
        ours = results(with_pages, (q, paged.of(k), paged.of(v)), *gradients, alibi_slopes=slopes)
        assert_equal((*ours[:3], ours[5]), (*expected[:3], expected[5]))
        for grad, whole in zip(ours[3:5], expected[3:5], strict=True):
            assert torch.equal(paged.back(grad, whole), whole)
            kept = paged.of(torch.ones_like(whole)).nan_to_num(0.0)
            assert (grad[kept == 0] == 0).all()


def test_gradients_of_shared_pages_add_up() -> None:
    """Two sequences with a common beginning: the sum of both gradients, in order."""
    packed = Packed([5, 9], [40, 50], (4, 2))
    q = packed.inputs(torch.float64, 8)[0]
    table = torch.tensor([[3, 1, 0, -1], [3, 1, 2, 4]])
    pages = torch.randn(5, 16, 2, 8).double(), torch.randn(5, 16, 2, 6).double()
    dout, dlse = torch.randn(14, 4, 6).double(), torch.randn(4, 14).double()

    def call(packed: Packed, table: Tensor) -> Any:
        return lambda *qkv, return_lse=True: attention_varlen(
            *qkv, *packed.packing, block_table=table, return_lse=return_lse
        )

    total = results(call(packed, table), (q, *pages), dout, dlse)[2:]
    parts = [torch.zeros_like(t) for t in pages]
    for b, (i, _) in enumerate(packed.spans):
        alone = Packed([packed.queries[b]], [packed.keys[b]], (4, 2))
        own = results(call(alone, table[b : b + 1]), (q[i], *pages), dout[i], dlse[:, i])[2:]
        assert_close(total[0][i], own[0], 1e-14)
        parts = [x + y for x, y in zip(parts, own[1:], strict=True)]
    assert_close(total[1:], tuple(parts), 1e-14)
    small = (q[..., :2], *(t[..., :2] for t in pages))
    leaves = [t.detach().requires_grad_() for t in small]
    assert gradcheck(call(packed, table), leaves)


def test_any_strides() -> None:
    q, k, v = MIXED.inputs(torch.float32)
    paged = Paged(MIXED, 16)
    keys, values = paged.of(k), paged.of(v)
    expected = attention_varlen(q, keys, values, *MIXED.packing, block_table=paged.table)
    heads_outside = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (keys, values)]
    strided = [torch.stack([t, torch.full_like(t, math.nan)], -1)[..., 0] for t in (keys, values)]
    wide = [torch.nn.functional.pad(t, (1, 0, 1, 0, 1, 0), value=math.nan)[:, 1:, 1:, 1:] for t in (keys, values)]
    for views in (heads_outside, strided, wide):
        assert torch.equal(attention_varlen(q, *views, *MIXED.packing, block_table=paged.table), expected)
    table = paged.table.repeat_interleave(2, 1)[:, ::2]
    assert torch.equal(attention_varlen(q, keys, values, *MIXED.packing, block_table=table), expected)


def test_compiled_vmapped_and_counted() -> None:
    q, k, v = GROUPED.inputs(torch.float64)
    paged = Paged(GROUPED, 32)
    keys, values = paged.of(k), paged.of(v)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_varlen(q, k, v, *GROUPED.packing, block_table=paged.table)

    expected = call(q, keys, values)
    compiled = graph_of(call)
    assert torch.equal(compiled(q, keys, values), expected)
    leaves = [t.clone().requires_grad_() for t in (q, keys, values)]
    both = [torch.autograd.grad(f(*leaves).sin().sum(), leaves) for f in (compiled, call)]
    assert_equal(*both)
    found = torch.vmap(call, (0, None, 1))(torch.stack([q, 2 * q]), keys, torch.stack([values, -values], 1))
    torch.testing.assert_close(found[1], call(2 * q, keys, -values))
    grads = torch.func.grad(lambda k: call(q, k, values).sin().sum())(keys)
    assert torch.equal(grads, both[1][1])
    with FlopCounterMode(display=False) as ours:
        call(q, keys, values)
    with FlopCounterMode(display=False) as theirs:
        attention_varlen(q, k, v, *GROUPED.packing)
    assert ours.get_total_flops() == theirs.get_total_flops() > 0


@pytest.mark.parametrize("more", [False, True])
def test_opcheck(more: bool) -> None:
    packed = Packed([3, 0, 4], [4, 2, 30], (4, 2), rest=1)
    q, k, v = packed.inputs(torch.bfloat16)
    paged = Paged(packed, 16)
    options = Options(window=(2, 1), softcap=1.5, sinks=torch.randn(4).bfloat16()) if more else Options()
    used = torch.tensor([4, 1, 30]) if more else None
    torch.library.opcheck(forward, (q, paged.of(k), paged.of(v), paged.table, *packed.packing, used, *options))
