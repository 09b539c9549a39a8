"""Promise: packed sequences get what each would get alone, whatever lies around them."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from backends import Backend
from helpers import Case, Truth, assert_accurate_by, assert_equal, each_dtype
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from pyattn import attention, attention_varlen, reference
from pyattn.options import Options, Packing

forward = torch.ops.pyattn.attention_varlen_forward
backward = torch.ops.pyattn.attention_varlen_backward

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Inputs = tuple[Tensor, Tensor, Tensor]


def starts(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


class Packed:
    """Random packed sequences, and tokens behind them that belong to none."""

    def __init__(
        self, queries: list[int], keys: list[int] | None = None, heads: tuple[int, int] = (8, 8), rest: int = 0
    ) -> None:
        self.queries, self.keys = queries, queries if keys is None else keys
        self.heads, self.rest = heads, rest

    def on(self, backend: Backend, dtype: torch.dtype = torch.float32) -> "Packed":
        """These, or so many of them as the emulated kernels do in a second."""
        if backend.family != "emulated":
            return self
        most = 20 if dtype == torch.float64 else 70
        queries, keys = ([min(n, most) for n in lengths] for lengths in (self.queries, self.keys))
        return Packed(queries, keys, (self.heads[0] // self.heads[1], 1), self.rest)

    def inputs_of(self, backend: Backend, dtype: torch.dtype) -> Inputs:
        """On a GPU, packed sequences and batches have the same kernels for the same bits from 33 columns on."""
        return self.inputs(dtype, 40, 36) if backend.cuda_kernels else self.inputs(dtype)

    @property
    def packing(self) -> tuple[Tensor, Tensor, int, int]:
        return starts(self.queries), starts(self.keys), max(self.queries), max(self.keys)

    @property
    def spans(self) -> list[tuple[slice, slice]]:
        """The queries and the keys of each sequence."""
        cu_q, cu_k = (x.tolist() for x in self.packing[:2])
        return [(slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])) for b in range(len(self.queries))]

    def inputs(self, dtype: torch.dtype, head_dim: int = 16, head_dim_v: int = 20) -> Inputs:
        total_q, total_k = sum(self.queries) + self.rest, sum(self.keys) + self.rest
        sizes = (total_q, self.heads[0], head_dim), (total_k, self.heads[1], head_dim), (total_k, self.heads[1])
        q, k, v = torch.randn(sizes[0]), torch.randn(sizes[1]), torch.randn(*sizes[2], head_dim_v)
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def ranges(self) -> Tensor:
        """(total_q, 2), random ones, counted within the sequences."""
        counts = zip(self.queries, self.keys, strict=True)
        ranges = [sorted(torch.randint(n + 1, (2,)).tolist()) for m, n in counts for _ in range(m)]
        return torch.tensor(ranges + [[0, 0]] * self.rest, dtype=torch.int32)


def results(call: Callable[..., Any], qkv: Inputs, dout: Tensor, dlse: Tensor, **learned: Tensor) -> tuple[Tensor, ...]:
    """out, lse and the gradients of q, k, v and what else is learned."""
    leaves = [x.detach().requires_grad_() for x in (*qkv, *learned.values())]
    out, lse = call(*leaves[:3], **dict(zip(learned, leaves[3:], strict=True)), return_lse=True)
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    return out.detach(), lse.detach(), *grads


def results_of(
    packed: Packed, qkv: Inputs, attend: Callable[..., Any] = attention_varlen, **options: Any
) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    call = partial(attend, **options)
    dout = torch.randn(*qkv[0].shape[:2], qkv[2].shape[2]).to(qkv[0].dtype)
    dlse = torch.randn(qkv[0].shape[1], len(qkv[0]), dtype=torch.promote_types(qkv[0].dtype, torch.float32))
    return results(lambda q, k, v, **named: call(q, k, v, *packed.packing, **named), qkv, dout, dlse)


def one_by_one(packed: Packed, qkv: Inputs, attend: Callable[..., Any], **options: Any) -> tuple[Tensor, ...]:
    """The same by :func:`attention`, a call for each sequence."""
    q, k, v = qkv
    torch.manual_seed(1)
    dout = torch.randn(*q.shape[:2], v.shape[2]).to(q.dtype)
    dlse = torch.randn(q.shape[1], len(q), dtype=torch.promote_types(q.dtype, torch.float32))
    out, lse = torch.zeros_like(dout), torch.full_like(dlse, -math.inf)
    grads = [torch.zeros_like(x) for x in qkv]
    for b, (i, j) in enumerate(packed.spans):
        own = dict(options)
        if "key_ranges" in own:
            own["key_ranges"] = own["key_ranges"][None, i]
        if isinstance(own.get("q_offset"), Tensor):
            own["q_offset"] = own["q_offset"][b : b + 1]
        if own.get("alibi_slopes", torch.empty(0)).dim() == 2:
            own["alibi_slopes"] = own["alibi_slopes"][b]
        if (used := own.pop("seqused_k", None)) is not None:
            j = slice(j.start, j.start + int(used[b]))
        each = tuple(x[None, s].transpose(1, 2) for x, s in ((q, i), (k, j), (v, j)))
        one = results(partial(attend, **own), each, dout[None, i].transpose(1, 2), dlse[None, :, i])
        out[i], lse[:, i] = one[0][0].transpose(0, 1), one[1][0]
        for grad, s, x in zip(grads, (i, j, j), one[2:], strict=True):
            grad[s] = x[0].transpose(0, 1)
    return out, lse, *grads


MIXED = Packed([3, 0, 17, 70, 1, 130, 8, 0], [5, 4, 17, 100, 0, 300, 8, 0], rest=3)
GROUPED = Packed([5, 33, 1, 2, 100, 64], [5, 20, 1200, 40, 100, 90], heads=(24, 8))

SINGLE: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "offset": {"q_offset": -1},
    "window": {"window": (5, -1)},
    "windows": {"window": (9, 4), "causal": False},
    "softcap": {"softcap": 3.0, "softmax_scale": 0.7},
}


@each_dtype
@pytest.mark.parametrize("packed", [MIXED, GROUPED], ids=["mixed", "grouped"])
@pytest.mark.parametrize("options", SINGLE.values(), ids=list(SINGLE))
def test_as_one_by_one(backend: Backend, packed: Packed, options: dict[str, Any], dtype: torch.dtype) -> None:
    """To the bit: with eight KV heads, each alone is one work item of backward on a CPU too."""
    packed = packed.on(backend, dtype)
    qkv = packed.inputs_of(backend, dtype)
    alone = one_by_one(packed, qkv, backend.attention, **options)
    backend.assert_same(results_of(packed, qkv, backend.attention_varlen, **options), alone)


@pytest.mark.parametrize("packed", [MIXED, GROUPED], ids=["mixed", "grouped"])
@pytest.mark.parametrize("name", ["q_offset", "key_ranges", "alibi_slopes", "slopes_of_each", "sinks", "seqused_k"])
def test_options_of_each_sequence(repeatable: Backend, packed: Packed, name: str) -> None:
    packed = packed.on(repeatable)
    qkv, count, heads = packed.inputs_of(repeatable, torch.float32), len(packed.queries), packed.heads[0]
    options = {
        "q_offset": torch.randint(-9, 50, (count,)),
        "key_ranges": packed.ranges(),
        "alibi_slopes": torch.rand(heads),
        "slopes_of_each": torch.rand(count, heads),
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
    """The same work items, splits of keys among them: the same bits."""
    packed = Packed([seqlen] * 2, [seqlen + 90] * 2, heads).on(repeatable, dtype)
    seqlen, heads = packed.queries[0], packed.heads
    qkv = packed.inputs_of(repeatable, dtype)

    def batched(q: Tensor, k: Tensor, v: Tensor, *_: Any, return_lse: bool) -> tuple[Tensor, Tensor]:
        batch = (x.unflatten(0, (2, -1)).transpose(1, 2) for x in (q, k, v))
        out, lse = repeatable.attention(*batch, return_lse=return_lse)
        return out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1, 2)

    dout = torch.randn(2 * seqlen, heads[0], qkv[2].shape[2]).to(dtype)
    dlse = torch.randn(heads[0], 2 * seqlen, dtype=torch.promote_types(dtype, torch.float32))
    call = repeatable.attention_varlen
    ours = results(lambda *qkv, **named: call(*qkv, *packed.packing, **named), qkv, dout, dlse)
    assert_equal(ours, results(batched, qkv, dout, dlse))


class Unpadded:
    """:func:`attention_varlen` in place of a padded batch whose queries of padding see nothing."""

    def __init__(self, case: Case, queries: list[int], keys: list[int]) -> None:
        self.packed = Packed(queries, keys, (case.num_heads_q, case.num_heads_kv))
        self.is_query = torch.arange(case.seqlen_q) < torch.tensor(queries)[:, None]
        self.is_key = torch.arange(case.seqlen_k) < torch.tensor(keys)[:, None]
        lengths = torch.tensor(keys)[:, None].expand(-1, case.seqlen_q)
        ranges = torch.stack([torch.zeros_like(lengths), lengths], -1)
        if case.key_ranges:
            ranges = case.options["key_ranges"].clamp(max=lengths[..., None])
        self.ranges = ranges * self.is_query[..., None]
        self.offset = torch.tensor(keys) - torch.tensor(queries)

    def attend(
        self, call: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        masks = self.is_query, self.is_key, self.is_key
        qkv = [x.transpose(1, 2)[mask] for x, mask in zip((q, k, v), masks, strict=True)]
        options["key_ranges"] = self.ranges[self.is_query]
        if options["q_offset"] is self.offset:
            options["q_offset"] = None
        out, lse = call(*qkv, *self.packed.packing, **options)
        nothing = options.get("sinks", torch.tensor(-math.inf)).to(lse.dtype)
        padded = nothing.expand(*self.is_query.shape, q.shape[1]).masked_scatter(self.is_query[..., None], lse.mT)
        wide = out.new_zeros(*self.is_query.shape, *out.shape[1:]).masked_scatter(self.is_query[..., None, None], out)
        return wide.transpose(1, 2), padded.transpose(1, 2)


PADDED = [
    (Case(3, 2, 1, 70, 130, 16, 20, dropout_p=0.3), [70, 1, 20], [130, 40, 17]),
    (Case(2, 4, 2, 130, 130, 24, 24, softcap=3.0, alibi="bh", sinks=True), [130, 50], [130, 50]),
    (Case(3, 2, 2, 33, 100, 32, 16, causal=False, key_ranges="random", dropout_p=0.1), [33, 0, 9], [100, 9, 50]),
    (Case(2, 1, 1, 300, 300, 16, 16, window=(40, -1), alibi="h"), [300, 10], [300, 10]),
    (Case(2, 2, 1, 40, 40, 80, 72, window=(9, -1), softcap=5.0, alibi="bh", sinks=True), [40, 17], [40, 30]),
    (Case(2, 1, 1, 33, 66, 256, 200, dropout_p=0.2, key_ranges="random"), [33, 20], [66, 20]),
    (Case(3, 2, 2, 20, 30, 8, 8, alibi="h", sinks=True, dropout_p=0.2), [20, 0, 7], [30, 4, 0]),
    (Case(3, 6, 3, 8, 200, 32, 32, key_ranges="documents", sinks=True), [1, 8, 3], [200, 8, 150]),
    (Case(4, 1, 1, 400, 400, 8, 8, softcap=20.0, dropout_p=0.2, sinks=True, alibi="h"), [8, 400, 8, 7], [8, 400, 8, 7]),
]


@each_dtype
@pytest.mark.parametrize(("case", "queries", "keys"), PADDED, ids=[str(case) for case, *_ in PADDED])
def test_accurate(backend: Backend, case: Case, queries: list[int], keys: list[int], dtype: torch.dtype) -> None:
    """Dropout's draws are those of the sequence in a batch."""
    unpadded = Unpadded(case, queries, keys)
    dout, dlse = case.gradients(dtype)
    dlse = dlse.masked_fill(~unpadded.is_query[:, None], 0.0)
    q_offset = unpadded.offset if case.q_offset is None else case.q_offset
    options = case.options | case.tensors(dtype) | {"q_offset": q_offset, "key_ranges": unpadded.ranges}
    attend = partial(unpadded.attend, backend.attention_varlen)
    assert_accurate_by(Truth((case.inputs(dtype), (dout, dlse)), options), attend)


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
        torch.testing.assert_close(out[i], one[b].transpose(0, 1), rtol=0, atol=1e-14)
        torch.testing.assert_close(lse[:, i], its_lse[b], rtol=0, atol=1e-14)
    assert (out[-2:] == 0).all()
    assert (lse[:, -2:] == -math.inf).all()


@pytest.mark.parametrize("names", ["", "alibi_slopes sinks", "dropout", "key_ranges"])
def test_gradients_are_differences(repeatable: Backend, names: str) -> None:
    packed = Packed([3, 0, 4, 1], [4, 2, 3, 2], (2, 1), rest=1)
    learned = {"alibi_slopes": torch.rand(2).double(), "sinks": torch.randn(2).double()}
    learned = {name: x.requires_grad_() for name, x in learned.items() if name in names}
    options: dict[str, Any] = {"softcap": 2.0} if learned else {}
    if names == "dropout":
        options = {"dropout_p": 0.4, "dropout_seed": 5}
    if names == "key_ranges":
        options = {"key_ranges": packed.ranges(), "causal": False}

    def out_and_lse(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        tensors = dict(zip(learned, more, strict=True))
        out, lse = repeatable.attention_varlen(q, k, v, *packed.packing, return_lse=True, **tensors, **options)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    leaves = (x.requires_grad_() for x in packed.inputs(torch.float64, 3, 2))
    assert gradcheck(out_and_lse, (*leaves, *learned.values()))


@each_dtype
def test_tokens_of_no_sequence_never_leak(backend: Backend, dtype: torch.dtype) -> None:
    """Behind the last sequence, or behind the keys in use."""
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
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    try:
        packed = Packed([0, 3, 0, 20], [5, 0, 0, 30], (4, 2), rest=2)
        for x in results_of(packed, packed.inputs(torch.float32)):
            assert not x.isnan().any()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)])
def test_threads_change_no_bit(heads: tuple[int, int]) -> None:
    """One sequence is longer than all others together: its keys are split."""
    packed = Packed([9, 700, 14, 20, 3] * 2, None, heads)
    qkv, slopes = packed.inputs(torch.float32), torch.rand(heads[0])
    torch.set_num_threads(1)
    expected = results_of(packed, qkv, alibi_slopes=slopes)
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        assert_equal(results_of(packed, qkv, alibi_slopes=slopes), expected)


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
    packing = starts(MIXED.queries, dtype), starts(MIXED.keys, dtype), 2**40, 301
    assert torch.equal(attention_varlen(*qkv, *packing), expected)


@pytest.mark.parametrize("sizes", [(0, 4, 2), (3, 0, 0)])
def test_nothing(sizes: tuple[int, int, int]) -> None:
    count, heads, kv_heads = sizes
    packed = Packed([count, count], heads=(heads, kv_heads), rest=1)
    for x in results_of(packed, packed.inputs(torch.float32)):
        assert (x.nan_to_num(neginf=0.0) == 0).all()
    none = torch.zeros(1, dtype=torch.int64)
    assert (attention_varlen(*packed.inputs(torch.float32), none, none, 0, 0) == 0).all()


def inputs(**changes: Any) -> dict[str, Any]:
    packed = Packed([2, 3], [4, 3], (4, 2))
    q, k, v = packed.inputs(torch.float32, 8, 6)
    names = ("q", "k", "v", *Packing._fields[:4])
    return dict(zip(names, (q, k, v, *packed.packing), strict=True)) | changes


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"q": torch.zeros(1, 5, 4, 8)},
        ValueError,
        "3 dimensions (tokens, num_heads, head_dim), got q [1, 5, 4, 8], k [7",
    ),
    ({"q": torch.zeros(5, 3, 8)}, ValueError, "num_heads_q must be a multiple of num_heads_kv, got 3 and 2"),
    ({"q": torch.zeros(5, 4, 9)}, ValueError, "q and k must have the same head_dim, got 9 and 8"),
    ({"v": torch.zeros(6, 2, 6)}, ValueError, "v must have shape [7, 2, 6], got [6, 2, 6]"),
    ({"k": torch.zeros(7, 2, 8).double()}, TypeError, "k must have dtype float32, got float64"),
    ({"cu_seqlens_q": torch.zeros(3)}, TypeError, "cu_seqlens_q must have dtype int32 or int64, got float32"),
    ({"cu_seqlens_k": torch.tensor([0, 7])}, ValueError, "must have shape (sequences + 1), got [3] and [2]"),
    ({"cu_seqlens_q": torch.tensor([[0, 2, 5]])}, ValueError, "must have shape (sequences + 1), got [1, 3] and [3]"),
    (dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), starts([])[:0]), ValueError, "(sequences + 1), got [0] and [0]"),
    ({"cu_seqlens_q": torch.tensor([1, 2, 5])}, ValueError, "cu_seqlens_q must start at 0, got 1"),
    ({"cu_seqlens_k": torch.tensor([0, 5, 4])}, ValueError, "cu_seqlens_k must never decrease, got 4 after 5 at 2"),
    ({"cu_seqlens_k": torch.tensor([0, 4, 8])}, ValueError, "cu_seqlens_k must end within the 7 tokens, got 8 at 2"),
    ({"cu_seqlens_q": torch.tensor([0, 2**62, 5])}, ValueError, "within the 5 tokens, got 4611686018427387904 at 1"),
    ({"cu_seqlens_q": torch.tensor([0, -1, 5])}, ValueError, "cu_seqlens_q must never decrease, got -1 after 0 at 1"),
    ({"max_seqlen_q": 2}, ValueError, "max_seqlen_q must be at least the longest sequence, got 2 and 3"),
    ({"max_seqlen_k": 3}, ValueError, "max_seqlen_k must be at least the longest sequence, got 3 and 4"),
    ({"seqused_k": torch.tensor([4])}, ValueError, "seqused_k must have shape (2), got [1]"),
    ({"seqused_k": torch.tensor([4.0, 3.0])}, TypeError, "seqused_k must have dtype int32 or int64, got float32"),
    (
        {"seqused_k": torch.tensor([4, 4])},
        ValueError,
        "seqused_k must be between 0 and the 3 keys of sequence 1, got 4",
    ),
    ({"seqused_k": torch.tensor([-1, 3])}, ValueError, "between 0 and the 4 keys of sequence 0, got -1"),
    ({"bias": torch.zeros(1)}, NotImplementedError, "packed sequences take no bias, got one of shape [1]"),
    ({"q_offset": torch.zeros(3, dtype=torch.int64)}, ValueError, "q_offset must have shape [2], got [3]"),
    ({"alibi_slopes": torch.zeros(3, 4)}, ValueError, "alibi_slopes must have shape (4) or (2, 4), got [3, 4]"),
    ({"sinks": torch.zeros(2)}, ValueError, "sinks must have shape (4), got [2]"),
    (
        {"key_ranges": torch.zeros(1, 5, 2, dtype=torch.int64)},
        ValueError,
        "key_ranges must have shape (5, 2), got [1, 5",
    ),
    ({"key_ranges": torch.tensor([[0, 4]] * 5)}, ValueError, "seqlen_k = 3, got [0, 4] for query 0 of sequence 1"),
    ({"key_ranges": torch.tensor([[0, 1]] + [[2, 1]] * 4)}, ValueError, "got [2, 1] for query 1 of sequence 0"),
    ({"cu_seqlens_k": torch.tensor([0, 4, 7]).to("meta")}, ValueError, "cu_seqlens_k must be on q's device, got meta"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD, ids=[m[:40] for *_, m in BAD])
def test_errors(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    arguments = inputs(**changes)
    with pytest.raises(kind, match="^pyattn: .*" + re.escape(message)):
        attention_varlen(**arguments)
    options = {"q_offsets" if name == "q_offset" else name: value for name, value in arguments.items()}
    with pytest.raises(kind, match="^pyattn: .*" + re.escape(message)):
        forward(**options)
    q = options["q"]
    out, rows = torch.zeros(*q.shape[:-1], 6), torch.zeros(q.shape[-2::-1][:2])
    with pytest.raises(kind, match="^pyattn: .*" + re.escape(message)):
        backward(out, None, out=out, row_max=rows, row_sum=rows, **options)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q must be at least 0, got -1"),
        ({"max_seqlen_k": 4.0}, TypeError, "max_seqlen_k must be int, got 4.0"),
        ({"cu_seqlens_q": [0, 2, 5]}, TypeError, "cu_seqlens_q must be Tensor, got [0, 2, 5]"),
        ({"seqused_k": [4, 3]}, TypeError, "seqused_k must be Tensor, got [4, 3]"),
        ({"is_causal": True}, TypeError, "attention_varlen has no argument is_causal (use causal"),
    ],
)
def test_errors_of_the_function(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match="^pyattn: " + re.escape(message)):
        attention_varlen(**inputs(**changes))


def test_gradients_of_other_shapes() -> None:
    arguments = inputs()
    out, _, row_max, row_sum = forward(**arguments)
    tensors = {"dout": out, "dlse": row_sum, "out": out, "row_max": row_max, "row_sum": row_sum}
    backward(**tensors, **arguments)
    for name, good in tensors.items():
        for bad in (good[:-1], good.mT, good[None], good.double(), good.to("meta")):
            with pytest.raises(TypeError if bad.dtype != good.dtype else ValueError, match=f"pyattn: {name} must "):
                backward(**tensors | {name: bad}, **arguments)
    with pytest.raises(ValueError, match="pyattn: output_mask must ask for gradients of a float bias"):
        backward(**tensors, **arguments, output_mask=[True, False, False])


def learned(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"alibi_slopes": torch.rand(4).to(dtype), "sinks": torch.randn(4).to(dtype)}


SMALL = Packed([3, 0, 4], [4, 2, 3], (4, 2), rest=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("more", [False, True])
def test_opcheck(dtype: torch.dtype, more: bool) -> None:
    q, k, v = SMALL.inputs(dtype)
    options = Options(window=(2, 1), softcap=1.5, **learned(dtype)) if more else Options()
    arguments = *SMALL.packing, torch.tensor([4, 1, 3]) if more else None, *options
    out, _, row_max, row_sum = forward(q, k, v, *arguments)
    torch.library.opcheck(forward, (q, k, v, *arguments))
    rows = torch.randn_like(out), torch.randn_like(row_sum), q, k, v, out, row_max, row_sum
    torch.library.opcheck(backward, (*rows, *arguments, True, [False, more, more]))


def test_compiled_once_for_all_lengths() -> None:
    """Lengths of an equal total are values of a tensor, not sizes."""
    torch._dynamo.reset()

    def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        return attention_varlen(q, k, v, cu, cu, 9, 9, alibi_slopes=slopes, return_lse=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for lengths in ([3, 6, 0], [9, 0, 0], [1, 1, 7]):
        packed = Packed(lengths, heads=(4, 2))
        leaves = [x.requires_grad_() for x in (*packed.inputs(torch.float64), torch.rand(4).double())]
        both = []
        for function in (compiled, call):
            with torch._dynamo.config.patch(error_on_recompile=True):
                out, lse = function(*leaves[:3], packed.packing[0], leaves[3])
            both.append((out, lse, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves)))
        assert_equal(*both)


def grads_of(q: Tensor, k: Tensor, v: Tensor, **tensors: Tensor) -> tuple[Tensor, ...]:
    def loss(*qkv: Tensor) -> Tensor:
        out, lse = attention_varlen(*qkv, *SMALL.packing, return_lse=True, **tensors)
        return out.sin().sum() + lse.masked_fill(lse == -math.inf, 0.0).cos().sum()

    grads: tuple[Tensor, ...] = torch.func.grad(loss, (0, 1, 2))(q, k, v)
    return grads


@pytest.mark.parametrize("mapped", ["q", "k v", "q k v", "alibi_slopes", "sinks q", "key_ranges", "q_offset v"])
@pytest.mark.parametrize("size", [0, 3])
def test_vmap(mapped: str, size: int) -> None:
    inputs = dict(zip("qkv", SMALL.inputs(torch.float64), strict=True)) | learned()
    inputs |= {"key_ranges": SMALL.ranges(), "q_offset": torch.tensor([0, 3, 1])}
    dims = {name: (i % 2) if name in mapped.split() else None for i, name in enumerate(inputs)}
    stacks = {
        name: x if dims[name] is None else torch.stack([x, x.roll(1, 0), x], dims[name]).narrow(dims[name], 0, size)
        for name, x in inputs.items()
    }

    def call(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        q, k, v, slopes, sinks, ranges, offset = tensors.values()
        ranges = torch.zeros_like(ranges) if mapped == "key_ranges" else ranges
        more = {"alibi_slopes": slopes, "sinks": sinks, "key_ranges": ranges, "q_offset": offset}
        both = attention_varlen(q, k, v, *SMALL.packing, return_lse=True, **more)
        return *both, *grads_of(q, k, v, **more)

    found = torch.vmap(call, (dims,))(stacks)
    assert {len(x) for x in found} == {size}
    for i in range(size):
        one = {name: x if dims[name] is None else x.select(dims[name], i) for name, x in stacks.items()}
        torch.testing.assert_close(tuple(x[i] for x in found), call(one), rtol=0, atol=1e-12)


def test_vmap_of_gradients_of_scores() -> None:
    q, k, v = (torch.stack([x, 2 * x], 1) for x in SMALL.inputs(torch.float64))

    def grads(q: Tensor, k: Tensor, v: Tensor, **tensors: Tensor) -> dict[str, Tensor]:
        def loss(tensors: dict[str, Tensor]) -> Tensor:
            return attention_varlen(q, k, v, *SMALL.packing, **tensors).sin().sum()

        found: dict[str, Tensor] = torch.func.grad(loss)(tensors)
        return found

    for slopes in (torch.rand(4).double(), torch.rand(3, 4).double()):
        tensors = learned() | {"alibi_slopes": slopes}
        found = torch.vmap(partial(grads, **tensors), 1)(q, k, v)
        for i in range(2):
            one = grads(q[:, i], k[:, i], v[:, i], **tensors)
            torch.testing.assert_close({name: x[i] for name, x in found.items()}, one, rtol=0, atol=1e-12)


def test_vmap_with_dropout() -> None:
    q, k, v = (torch.stack([x, 2 * x]) for x in SMALL.inputs(torch.float64))
    call = partial(attention_varlen, dropout_p=0.5, dropout_seed=torch.tensor(4))
    found = torch.vmap(lambda q, k, v: call(q, k, v, *SMALL.packing))(q, k, v)
    for i in range(2):
        torch.testing.assert_close(found[i], call(q[i], k[i], v[i], *SMALL.packing), rtol=0, atol=1e-12)


def test_raw_operators_have_no_derivatives() -> None:
    q, k, v = (x.requires_grad_() for x in SMALL.inputs(torch.float64))
    with pytest.raises(RuntimeError, match="attention_varlen_forward"):
        forward(q, k, v, *SMALL.packing)[0].sum().backward()


def test_checkpoint_and_autocast() -> None:
    leaves = [x.requires_grad_() for x in SMALL.inputs(torch.float32)]
    call = partial(checkpoint, attention_varlen, use_reentrant=False)
    expected = torch.autograd.grad(attention_varlen(*leaves, *SMALL.packing).sin().sum(), leaves)
    assert_equal(torch.autograd.grad(call(*leaves, *SMALL.packing).sin().sum(), leaves), expected)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention_varlen(*leaves, *SMALL.packing)
    assert torch.equal(out, attention_varlen(*(x.bfloat16() for x in leaves), *SMALL.packing))
    assert [x.dtype for x in torch.autograd.grad(out.float().sum(), leaves)] == [torch.float32] * 3


def test_meta_tensors() -> None:
    q, k, v = (x.to("meta").requires_grad_() for x in SMALL.inputs(torch.float16))
    cu_seqlens = torch.empty(4, dtype=torch.int32, device="meta")
    out, lse = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 5, 5, return_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == ((8, 4, 20), (4, 8), torch.float32)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("name", ["", "window", "key_ranges"])
def test_operations_are_those_of_each_alone(name: str) -> None:
    known: dict[str, Any] = {"window": (3, -1), "key_ranges": GROUPED.ranges()}
    options = {name: known[name]} if name else {}
    qkv = [x.requires_grad_() for x in GROUPED.inputs(torch.float32)]
    with FlopCounterMode(display=False) as packed:
        attention_varlen(*qkv, *GROUPED.packing, **options).sum().backward()
    with FlopCounterMode(display=False) as alone:
        for i, j in GROUPED.spans:
            each = (x[None, s].transpose(1, 2) for x, s in zip(qkv, (i, j, j), strict=True))
            own = {name: x[None, i] if name == "key_ranges" else x for name, x in options.items()}
            attention(*each, **own).sum().backward()
    assert packed.get_total_flops() == alone.get_total_flops() > 0
