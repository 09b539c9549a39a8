"""Promise: packed sequences get the results that each would get alone, whatever lies around them."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from support.assertions import assert_close, assert_threads_change_no_bit, finite, nan_filled
from support.backends import Backend
from support.case_options import strided
from support.cases import DTYPES, Case, alternate, assert_equal, each_dtype
from support.packed import (
    GROUPED,
    MIXED,
    Packed,
    gradients_of,
    one_by_one,
    results,
    results_of,
    starts,
    truth_of_padded,
)
from torch import Tensor
from torch.autograd import gradcheck

from pyattn import attention_varlen, reference

backward = torch.ops.pyattn.attention_varlen_backward

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SINGLE: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "offset": {"q_offset": -1},
    "window": {"window": (5, -1)},
    "windows": {"window": (9, 4), "causal": False},
    "softcap": {"softcap": 3.0, "softmax_scale": 0.7},
}
KINDS = {"mixed": MIXED, "grouped": GROUPED}


@pytest.mark.parametrize(("name", "kind", "dtype"), alternate(list(SINGLE), list(KINDS), DTYPES), ids=str)
def test_as_one_by_one(repeatable: Backend, kind: str, name: str, dtype: torch.dtype) -> None:
    """To the bit: with eight KV heads, each sequence alone is one work item of backward, on a CPU too."""
    packed, options = KINDS[kind].on(repeatable, dtype), SINGLE[name]
    qkv = packed.inputs_of(repeatable, dtype)
    alone = one_by_one(packed, qkv, repeatable.attention, **options)
    assert_equal(results_of(packed, qkv, repeatable.attention_varlen, **options), alone)


@pytest.mark.parametrize("packed", [MIXED, GROUPED], ids=["mixed", "grouped"])
@pytest.mark.parametrize(
    "name", ["q_offset", "key_ranges", "alibi_slopes", "slopes_of_each", "relative_bias", "sinks", "seqused_k"]
)
def test_options_of_each_sequence(repeatable: Backend, packed: Packed, name: str) -> None:
    packed = packed.on(repeatable)
    qkv, count, heads = packed.inputs_of(repeatable, torch.bfloat16), len(packed.queries), packed.heads[0]
    options = {
        "q_offset": torch.randint(-9, 50, (count,)),
        "key_ranges": packed.ranges(),
        "alibi_slopes": torch.rand(heads),
        "slopes_of_each": torch.rand(count, heads),
        "relative_bias": torch.randn(count, heads, 31),
        "sinks": torch.randn(heads),
        "seqused_k": torch.tensor([n * 2 // 3 for n in packed.keys], dtype=torch.int32),
    }
    chosen = {"alibi_slopes" if name == "slopes_of_each" else name: options[name]}
    alone = one_by_one(packed, qkv, repeatable.attention, **chosen)
    assert_equal(results_of(packed, qkv, repeatable.attention_varlen, **chosen), alone)


@each_dtype
@pytest.mark.parametrize("heads", [(2, 1), (3, 3)])
@pytest.mark.parametrize("seqlen", [5, 64, 200])
def test_equal_lengths_are_a_batch(
    repeatable: Backend, heads: tuple[int, int], seqlen: int, dtype: torch.dtype
) -> None:
    """The work items are the same, including splits of keys, so the bits are too."""
    packed = Packed([seqlen] * 2, [seqlen + 90] * 2, heads).on(repeatable, dtype)
    qkv = packed.inputs_of(repeatable, dtype)

    def batched(q: Tensor, k: Tensor, v: Tensor, *_: Any, return_lse: bool) -> tuple[Tensor, Tensor]:
        batch = (x.unflatten(0, (2, -1)).transpose(1, 2) for x in (q, k, v))
        out, lse = repeatable.attention(*batch, return_lse=return_lse)
        return out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1, 2)

    assert_equal(results_of(packed, qkv, repeatable.attention_varlen), results(batched, qkv, *gradients_of(qkv)))


PADDED = [
    (Case(3, 2, 1, 70, 130, 16, 20, dropout_p=0.3), [70, 1, 20], [130, 40, 17]),
    (Case(2, 4, 2, 130, 130, 24, 24, softcap=3.0, alibi="bh", sinks=True), [130, 50], [130, 50]),
    (Case(3, 2, 2, 33, 100, 32, 16, causal=False, key_ranges="random", dropout_p=0.1), [33, 0, 9], [100, 9, 50]),
    (Case(2, 1, 1, 300, 300, 16, 16, window=(40, -1), alibi="h", relative="bh 50"), [300, 10], [300, 10]),
    (Case(2, 2, 1, 40, 40, 80, 72, window=(9, -1), softcap=5.0, alibi="bh", sinks=True), [40, 17], [40, 30]),
    (Case(2, 1, 1, 33, 66, 256, 200, dropout_p=0.2, key_ranges="random"), [33, 20], [66, 20]),
    (Case(3, 2, 2, 20, 30, 8, 8, alibi="h", sinks=True, dropout_p=0.2, relative="h 9"), [20, 0, 7], [30, 4, 0]),
    (Case(3, 6, 3, 8, 200, 32, 32, key_ranges="documents", sinks=True), [1, 8, 3], [200, 8, 150]),
    (Case(3, 4, 2, 100, 300, 32, 16, causal=False, key_ranges="pieces"), [100, 1, 33], [300, 100, 80]),
    (Case(4, 1, 1, 400, 400, 8, 8, softcap=20.0, dropout_p=0.2, sinks=True, alibi="h"), [8, 400, 8, 7], [8, 400, 8, 7]),
]


@each_dtype
@pytest.mark.parametrize(("case", "queries", "keys"), PADDED, ids=[str(case) for case, *_ in PADDED])
def test_accurate(backend: Backend, case: Case, queries: list[int], keys: list[int], dtype: torch.dtype) -> None:
    """Dropout draws the same numbers as for the sequence in a batch."""
    device = torch.get_default_device()
    unpadded, truth = truth_of_padded(case, tuple(queries), tuple(keys), dtype, device)
    truth.assert_allows(partial(unpadded.attend, backend.attention_varlen))


@pytest.mark.parametrize("options", [{}, {"window": (2, -1), "softcap": 2.0, "sinks": True, "alibi": True}, {"p": 0.3}])
def test_the_reference_takes_each_alone(options: dict[str, Any]) -> None:
    packed = Packed([3, 0, 6, 1], [4, 2, 3, 9], (4, 2), rest=2)
    named: dict[str, Any] = {"window": options.get("window", (-1, -1)), "softcap": options.get("softcap", 0.0)}
    if "p" in options:
        named |= {"dropout_p": 0.3, "dropout_seed": torch.tensor(3)}
    if "alibi" in options:
        named |= {"alibi_slopes": torch.rand(4).double(), "sinks": torch.randn(4).double()}
    q, k, v = packed.inputs(torch.float64)
    out, lse = reference.attention_varlen(q, k, v, *packed.packing, **named, return_lse=True)
    for b, (i, j) in enumerate(packed.spans):
        each = (x[None, s].transpose(1, 2).expand(b + 1, -1, -1, -1) for x, s in ((q, i), (k, j), (v, j)))
        one, its_lse = reference.attention(*each, **named, return_lse=True)  # the last of b + 1 draws as b does
        assert_close(out[i], one[b].transpose(0, 1), 1e-14)
        assert_close(lse[:, i], its_lse[b], 1e-14)
    assert (out[-2:] == 0).all()
    assert (lse[:, -2:] == -math.inf).all()


@pytest.mark.parametrize("names", ["", "alibi_slopes sinks", "relative_bias", "dropout", "key_ranges"])
def test_gradients_are_differences(repeatable: Backend, names: str) -> None:
    packed = Packed([3, 0, 4, 1], [4, 2, 3, 2], (2, 1), rest=1)
    learned = {"alibi_slopes": torch.rand(2).double(), "sinks": torch.randn(2).double()}
    learned["relative_bias"] = torch.randn(4, 1, 5).double()
    learned = {name: x.requires_grad_() for name, x in learned.items() if name in names}
    options: dict[str, Any] = {"softcap": 2.0} if learned else {}
    if names == "dropout":
        options = {"dropout_p": 0.4, "dropout_seed": 5}
    if names == "key_ranges":
        options = {"key_ranges": packed.ranges(), "causal": False}

    def out_and_lse(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        tensors = dict(zip(learned, more, strict=True))
        call = repeatable.attention_varlen
        return finite(*call(q, k, v, *packed.packing, return_lse=True, **tensors, **options))

    leaves = (x.requires_grad_() for x in packed.inputs(torch.float64, 3, 2))
    assert gradcheck(out_and_lse, (*leaves, *learned.values()), fast_mode=True)


@each_dtype
def test_tokens_of_no_sequence_never_leak(backend: Backend, dtype: torch.dtype) -> None:
    """After the last sequence, or after the keys in use."""
    packed = MIXED.on(backend, dtype)
    used = torch.tensor([n // 2 for n in packed.keys])
    qkv = packed.inputs(dtype)
    plain = results_of(packed, qkv, backend.attention_varlen, seqused_k=used)
    q, k, v = (x.clone() for x in qkv)
    q[-3:] = k[-3:] = v[-3:] = math.nan
    for (_, keys), n in zip(packed.spans, used.tolist(), strict=True):
        k[keys.start + n : keys.stop] = v[keys.start + n : keys.stop] = math.inf
    backend.assert_same(results_of(packed, (q, k, v), backend.attention_varlen, seqused_k=used), plain)
    out, lse, dq, dk, dv = plain
    assert (lse[:, -3:] == -math.inf).all()
    for x in (out, dq, dk, dv):
        assert (x[-3:] == 0).all()
    for (_, keys), n in zip(packed.spans, used.tolist(), strict=True):
        assert (dk[keys.start + n : keys.stop] == 0).all()
        assert (dv[keys.start + n : keys.stop] == 0).all()


def test_every_element_is_written() -> None:
    packed = Packed([0, 3, 0, 20], [5, 0, 0, 30], (4, 2), rest=2)
    with nan_filled():
        results = results_of(packed, packed.inputs(torch.float32))
    assert not any(x.isnan().any() for x in results)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)])
def test_threads_change_no_bit(heads: tuple[int, int]) -> None:
    """One sequence is longer than all others together: its keys are split."""
    packed = Packed([9, 700, 14, 20, 3] * 2, None, heads)
    qkv, slopes = packed.inputs(torch.float32), torch.rand(heads[0])
    assert_threads_change_no_bit(lambda: results_of(packed, qkv, alibi_slopes=slopes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_views(dtype: torch.dtype) -> None:
    qkv = Packed([20, 0, 45], heads=(8, 8)).inputs(dtype, 16, 16)
    packed = Packed([20, 0, 45])
    expected = results_of(packed, qkv)
    together = torch.stack(qkv, 1).unbind(1)
    heads_outside = tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in qkv)
    wide = tuple(torch.full((66, 9, 17), math.nan, dtype=dtype)[1:, 1:, 1:].copy_(x) for x in qkv)
    strided = tuple(torch.stack([x, x.new_full(x.shape, math.nan)], -1)[..., 0] for x in qkv)
    for views in (together, heads_outside, wide, strided):
        assert_equal(results_of(packed, views), expected)
    out = attention_varlen(*heads_outside, *packed.packing)
    assert out.stride() == torch.empty_like(heads_outside[0]).stride()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_types_and_bounds_of_lengths(dtype: torch.dtype) -> None:
    qkv = MIXED.inputs(torch.float32)
    expected = attention_varlen(*qkv, *MIXED.packing)
    lengths = starts(MIXED.queries, dtype), starts(MIXED.keys, dtype)
    for packing in (lengths, [strided(x) for x in lengths]):
        assert torch.equal(attention_varlen(*qkv, *packing, 2**40, 301), expected)


@pytest.mark.parametrize("sizes", [(0, 4, 2), (3, 0, 0)])
def test_nothing(sizes: tuple[int, int, int]) -> None:
    count, heads, num_heads_kv = sizes
    packed = Packed([count, count], heads=(heads, num_heads_kv), rest=1)
    for x in results_of(packed, packed.inputs(torch.float32)):
        assert (x.nan_to_num(neginf=0.0) == 0).all()
    none = torch.zeros(1, dtype=torch.int64)
    assert (attention_varlen(*packed.inputs(torch.float32), none, none, 0, 0) == 0).all()
