"""Properties that hold to the bit: what is not seen does not matter, nor who computes it or where it lies."""

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from helpers import DTYPES, Case, assert_accurate, run
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from pyattn import _C, attention

pytestmark = pytest.mark.usefixtures("isa")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# Two vectors of the widest instruction set are 32 floats; key blocks are 96.
LENGTHS = (1, 5, 16, 17, 33, 64, 100, 230)


def assert_equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


@each_dtype
@pytest.mark.parametrize("seqlen", LENGTHS)
def test_rows_ignore_the_future(dtype: torch.dtype, seqlen: int) -> None:
    q, k, v = Case(2, 4, 2, seqlen, seqlen, 24, 20).inputs(dtype)
    dout = torch.randn(2, 4, seqlen, 20).to(dtype)
    t = seqlen // 2
    before = attention(q, k, v, return_lse=True)
    changed = [x.clone() for x in (k, v)]
    for x in changed:
        x[:, :, t + 1 :] = torch.randn_like(x[:, :, t + 1 :]) * 9
    after = attention(q, *changed, return_lse=True)
    assert_equal(tuple(x[:, :, : t + 1] for x in before), tuple(x[:, :, : t + 1] for x in after))
    dout[:, :, t + 1 :] = 0
    dq, dq_changed = (run(attention, (q, *kv), dout)[2] for kv in ((k, v), changed))
    assert torch.equal(dq[:, :, : t + 1], dq_changed[:, :, : t + 1])


@each_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("seqlen", LENGTHS)
def test_what_is_not_seen_changes_no_bit(dtype: torch.dtype, bad: float, seqlen: int) -> None:
    """Bad keys and values after position t, bad queries and dout before it: each row looks only at what it may."""
    q, k, v = Case(1, 2, 1, seqlen, seqlen, 24, 20).inputs(dtype)
    dout = torch.randn(1, 2, seqlen, 20).to(dtype)
    t = seqlen // 2
    clean = run(attention, (q, k, v), dout)
    future = [x.clone() for x in (k, v)]
    for x in future:
        x[:, :, t + 1 :] = bad
    out, lse, dq, _, _ = run(attention, (q, *future), dout)
    assert_equal(tuple(x[:, :, : t + 1] for x in (out, lse, dq)), tuple(x[:, :, : t + 1] for x in clean[:3]))
    past_q, past_dout = q.clone(), dout.clone()
    past_q[:, :, :t], past_dout[:, :, :t] = bad, bad
    for queries, gradient in ((past_q, dout), (q, past_dout), (past_q, past_dout)):
        assert_equal(
            tuple(x[:, :, t:] for x in run(attention, (queries, k, v), gradient)), tuple(x[:, :, t:] for x in clean)
        )


@each_dtype
@pytest.mark.parametrize("position", [63, 95])
def test_one_bad_element(dtype: torch.dtype, position: int) -> None:
    """In the last column and the last row of a block, for whoever looks for bad ones."""
    inputs = [*Case(1, 2, 1, 96, 96, 21, 19).inputs(dtype), torch.randn(1, 2, 96, 19).to(dtype)]
    clean = run(attention, tuple(inputs[:3]), inputs[3])
    for which in range(4):
        *qkv, dout = (x.clone() for x in inputs)
        (*qkv, dout)[which][:, :, position, -1] = math.nan
        results, keys = run(attention, tuple(qkv), dout), which in (1, 2)
        unaware = slice(0, position) if keys else slice(position + 1, None)
        for x, y in zip(results[:3] if keys else results[3:], clean[:3] if keys else clean[3:], strict=True):
            assert torch.equal(x[:, :, unaware], y[:, :, unaware])


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_every_16_bit_number_is_read_and_rounded_as_torch_does(dtype: torch.dtype) -> None:
    """The mean and the sum of each number and the next one lie halfway between two numbers, up to infinity."""
    a = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    b = a.roll(-1)
    largest, eps = torch.finfo(dtype).max, torch.finfo(dtype).eps
    b[a == largest] = largest / (2 - eps) * eps / 2  # half of the distance to what would come next
    pairs = torch.stack([a, b])[None, None]
    mean = attention(torch.zeros(1, 1, 1, 8, dtype=dtype), torch.zeros(1, 1, 2, 8, dtype=dtype), pairs)
    q, k, v = Case(1, 1, 1, 2, 1, 8, 2**16).inputs(dtype)
    *_, total = run(attention, (q, k, v), pairs, causal=False)
    exact = a.float() + b.float()
    for x, y in ((mean, exact / 2), (total, exact)):
        torch.testing.assert_close(x.flatten(), y.to(dtype), rtol=0, atol=0, equal_nan=True)


@each_dtype
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seqlen", LENGTHS)
def test_nan_that_is_seen_arrives(dtype: torch.dtype, causal: bool, seqlen: int) -> None:
    q, k, v = Case(1, 2, 2, seqlen, seqlen, 24, 20).inputs(dtype)
    t = seqlen // 2
    for which in range(3):
        inputs = [x.clone() for x in (q, k, v)]
        inputs[which][0, 0, t, 3] = math.nan
        out, lse = attention(*inputs, causal=causal, return_lse=True)
        rows = slice(t, t + 1) if which == 0 else slice(t, None) if causal else slice(None)
        columns = slice(3, 4) if which == 2 else slice(None)
        expected = torch.zeros_like(out, dtype=torch.bool)
        expected[0, 0, rows, columns] = True
        assert torch.equal(out.isnan(), expected)
        assert torch.equal(lse.isnan(), expected.any(-1) & (which < 2))


@each_dtype
def test_scores_that_are_all_minus_infinity(dtype: torch.dtype) -> None:
    """Softmax of nothing but -inf is NaN; a row that has one other score does not see the rest."""
    q, k, v = Case(1, 1, 1, 2, 200, 2, 3).inputs(dtype)
    q[:], k[:] = -math.inf, 1
    assert attention(q, k, v).isnan().all()
    assert all(grad.isnan().all() for grad in run(attention, (q, k, v), torch.ones(1, 1, 2, 3).to(dtype))[2:4])
    q[:], k[:, :, :150], k[:, :, 150] = 1, -math.inf, 0
    k[:, :, 151:] = -math.inf
    assert torch.equal(attention(q, k, v), v[:, :, 150:151].expand(1, 1, 2, 3))


@each_dtype
def test_inf_values_arrive_as_inf(dtype: torch.dtype) -> None:
    q, k, v = Case(1, 1, 1, 70, 70, 8, 8).inputs(dtype)
    v[0, 0, 30, 2] = math.inf
    out = attention(q, k, v)
    assert (out[0, 0, 30:, 2] == math.inf).all()
    assert out[0, 0, :, 3:].isfinite().all()
    assert out[0, 0, :30].isfinite().all()


@each_dtype
@pytest.mark.parametrize("case", [Case(1, 1, 1, 700, 700, 32, 32), Case(5, 6, 2, 130, 190, 33, 20)], ids=str)
@pytest.mark.usefixtures("threads")
def test_same_bits_for_any_number_of_threads(dtype: torch.dtype, case: Case) -> None:
    qkv, (dout, dlse) = case.inputs(dtype), case.gradients(dtype)
    torch.set_num_threads(1)
    once = run(attention, qkv, dout, dlse)
    for n in (2, 3, 4, 7):
        torch.set_num_threads(n)
        for _ in range(3):
            assert_equal(run(attention, qkv, dout, dlse), once)


@pytest.mark.usefixtures("threads")
def test_two_threads_are_used() -> None:
    """Each of two threads gains processor time in forward and in backward, also where there is one head only.

    Ten times each: on a busy machine one thread may have done a whole call before the other wakes.
    """
    script = f"""
import glob, torch
from pyattn import _C, attention
def spent():
    return {{path: int(open(path).read().split()[0]) for path in glob.glob("/proc/self/task/*/schedstat")}}
_C.set_isa("{_C.active_isa()}")
torch.set_num_threads(2)
q, k, v = (torch.randn(1, 1, 2048, 64, requires_grad=True) for _ in range(3))
before = spent()
outs = [attention(q, k, v) for _ in range(10)]
between = spent()
for out in outs:
    torch.autograd.grad(out, (q, k, v), out)
after = spent()
for a, b in ((before, between), (between, after)):
    print(sum(b[t] - a.get(t, 0) > 1_000_000 for t in b))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == 0, result.stderr
    forward, backward = map(int, result.stdout.split())
    assert forward >= 2
    assert backward >= 2


@each_dtype
def test_grouped_heads_equal_repeated_heads(dtype: torch.dtype) -> None:
    case = Case(2, 6, 2, 45, 110, 24, 24)
    q, k, v = case.inputs(dtype)
    dout, dlse = case.gradients(dtype)
    grouped = run(attention, (q, k, v), dout, dlse)
    repeated = run(attention, (q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)), dout, dlse)
    assert_equal(grouped[:3], repeated[:3])
    for x, y in zip(grouped[3:], repeated[3:], strict=True):
        exact = y.double().unflatten(1, (2, 3)).sum(2)
        assert_accurate("dk, dv", x, exact.to(dtype), exact)


def nan_padded(x: Tensor) -> Tensor:
    buffer = torch.full([n + 3 for n in x.shape], math.nan, dtype=x.dtype)
    view = buffer[1:-2, 2:-1, 1:-2, 1:-2]
    return view.copy_(x)


def heads_inside(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def flipped_strides(x: Tensor) -> Tensor:
    return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)


def every_other_column(x: Tensor) -> Tensor:
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def expanded(x: Tensor) -> Tensor:
    return x[:1, :1].expand_as(x)


@each_dtype
@pytest.mark.parametrize("layout", [nan_padded, heads_inside, flipped_strides, every_other_column, expanded])
@pytest.mark.parametrize("head_dim", [20, 32])
def test_layout_changes_no_bit(dtype: torch.dtype, layout: Callable[[Tensor], Tensor], head_dim: int) -> None:
    case = Case(2, 4, 2, 37, 110, head_dim, head_dim)
    views = [layout(x) for x in (*case.inputs(dtype), case.gradients(dtype)[0])]
    *qkv, dout = views
    copies = tuple(x.contiguous() for x in qkv)
    assert_equal(run(attention, tuple(qkv), dout), run(attention, copies, dout.contiguous()))


@each_dtype
def test_results_are_dense_in_the_order_of_the_inputs(dtype: torch.dtype) -> None:
    q, k, v = (heads_inside(x) for x in Case(2, 4, 2, 9, 11, 8, 5).inputs(dtype))
    out, _, dq, dk, dv = run(attention, (q, k, v), torch.randn(2, 4, 9, 5).to(dtype))
    for x in (out, dq, dk, dv):
        assert x.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 1, 5), (1, 3, 5), (2, 3, 1)])
def test_out_lies_in_memory_as_empty_like(order: tuple[int, ...], shape: tuple[int, ...]) -> None:
    inverse = [order.index(d) for d in range(3)]
    q = torch.randn(*(shape[d] for d in order), 8).permute(*inverse, 3)
    out, like = attention(q, q, q), torch.empty_like(q)
    assert [out.stride(d) for d in range(4) if q.shape[d] > 1] == [like.stride(d) for d in range(4) if q.shape[d] > 1]


@each_dtype
def test_strides_of_what_goes_with_rows(dtype: torch.dtype) -> None:
    """row_max, row_sum, dlse and q_offset need not be contiguous."""
    case = Case(2, 4, 2, 9, 11, 8, 5)
    q, k, v = case.inputs(dtype)
    dout, dlse = case.gradients(dtype)
    offsets = torch.tensor([2, 77, -3, 77])[::2]
    results = [torch.ops.pyattn.attention_forward(q, k, v, q_offsets=x) for x in (offsets, offsets.contiguous())]
    assert_equal(*results)
    out, lse, row_max, row_sum = results[0]
    rows = [dlse.to(lse.dtype), row_max, row_sum]
    results = [
        torch.ops.pyattn.attention_backward(dout, dlse_, q, k, v, out, max_, sum_, q_offsets=offsets_)
        for (dlse_, max_, sum_), offsets_ in (
            (rows, offsets.contiguous()),
            ([flipped_strides(x[..., None])[..., 0] for x in rows], offsets),
        )
    ]
    assert_equal(*results)


@each_dtype
@pytest.mark.parametrize("q_offset", [-8, -66])
def test_every_element_is_written(dtype: torch.dtype, q_offset: int) -> None:
    case = Case(2, 3, 3, 70, 45, 24, 20, q_offset=q_offset)
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    try:
        results = run(attention, case.inputs(dtype), case.gradients(dtype)[0], **case.options)
    finally:
        torch.use_deterministic_algorithms(False)
    for x in results:
        assert not x.isnan().any()


@each_dtype
@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("dimension", ["batch", "heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"])
def test_sizes_zero_and_one(dtype: torch.dtype, dimension: str, size: int) -> None:
    sizes = {"batch": 2, "heads": 2, "seqlen_q": 3, "seqlen_k": 5, "head_dim": 4, "head_dim_v": 6} | {dimension: size}
    b, h, sq, sk, d, dv = sizes.values()
    case = Case(b, h, h, sq, sk, d, dv, causal=False)
    q, k, v = case.inputs(dtype)
    out, lse, *grads = run(attention, (q, k, v), case.gradients(dtype)[0], causal=False)
    assert out.shape == (b, h, sq, dv)
    assert lse.shape == (b, h, sq)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    if dimension == "seqlen_k" and size == 0:
        assert (out == 0).all()
        assert (lse == -math.inf).all()
    elif dimension == "head_dim" and size == 0:
        plain, exact = (x.mean(2, keepdim=True).expand_as(out) for x in (v, v.double()))
        assert_accurate("out", out, plain, exact)
    assert all(g.isfinite().all() for g in grads)


@each_dtype
def test_rows_that_see_nothing(dtype: torch.dtype) -> None:
    case = Case(1, 2, 1, 80, 50, 16, 16, q_offset=-70)
    out, lse, dq, dk, dv = run(attention, case.inputs(dtype), *case.gradients(dtype), **case.options)
    assert (out[:, :, :70] == 0).all()
    assert (lse[:, :, :70] == -math.inf).all()
    assert (dq[:, :, :70] == 0).all()
    assert lse[:, :, 70:].isfinite().all()
    assert (dk[:, :, 10:] == 0).all()
    assert (dv[:, :, 10:] == 0).all()


def test_many_batches() -> None:
    for batch in (65535, 65536, 65537):
        q, k, v = Case(batch, 1, 1, 1, 2, 1, 1).inputs(torch.float32)
        out = attention(q, k, v)
        assert torch.equal(out[-1:], attention(q[-1:], k[-1:], v[-1:]))


def test_offsets_past_two_to_the_31st() -> None:
    """A key every 2^26 elements: the memory between them is never touched."""
    stride = 2**26
    buffer = torch.empty(40 * stride, dtype=torch.float32)
    k = buffer.as_strided((1, 1, 40, 8), (0, 0, stride, 1)).copy_(torch.randn(1, 1, 40, 8))
    q = torch.randn(1, 1, 40, 8)
    assert torch.equal(attention(q, k, k), attention(q, k.contiguous(), k.contiguous()))


def allocated(seqlen: int) -> int:
    """Bytes that forward and backward allocate, scratch and results, as the profiler counts them."""
    q, k, v = (torch.randn(1, 1, seqlen, 16, requires_grad=True) for _ in range(3))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        attention(q, k, v).sum().backward()
    return sum(max(0, event.self_cpu_memory_usage) for event in profiler.key_averages())


def test_extra_memory_is_linear() -> None:
    half, whole = allocated(8192), allocated(16384)
    assert 0 < whole <= 2 * half
    assert whole < 16384 * 16384 * 4 / 50
