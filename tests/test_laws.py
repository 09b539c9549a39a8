"""Properties that hold to the bit: what is not seen does not matter, nor who computes it or where it lies."""

import math

import pytest
import torch
from helpers import DTYPES, Case, assert_accurate, assert_equal, each_dtype, run

from pyattn import _C, attention, reference

pytestmark = pytest.mark.usefixtures("isa")

# Two vectors of the widest instruction set are 32 floats; key blocks are 96.
LENGTHS = (1, 5, 16, 17, 33, 64, 100, 230)


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
    # VDPBF16PS takes subnormal numbers for 0.
    subnormal = torch.stack([(x != 0) & (x.abs() < torch.finfo(dtype).tiny) for x in (a, b)]).any(0)
    compared = ~subnormal if _C.active_isa() == "avx512_bf16" and dtype == torch.bfloat16 else slice(None)
    for x, y in ((mean, exact / 2), (total, exact)):
        torch.testing.assert_close(x.flatten()[compared], y.to(dtype)[compared], rtol=0, atol=0, equal_nan=True)


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
def test_rows_that_see_nothing(dtype: torch.dtype) -> None:
    case = Case(1, 2, 1, 80, 50, 16, 16, q_offset=-70)
    out, lse, dq, dk, dv = run(attention, case.inputs(dtype), *case.gradients(dtype), **case.options)
    assert (out[:, :, :70] == 0).all()
    assert (lse[:, :, :70] == -math.inf).all()
    assert (dq[:, :, :70] == 0).all()
    assert lse[:, :, 70:].isfinite().all()
    assert (dk[:, :, 10:] == 0).all()
    assert (dv[:, :, 10:] == 0).all()


@pytest.mark.parametrize(("value", "gradient"), [(1e36, 1), (1, 1e36)])
def test_weights_below_the_smallest_normal_number_are_zero(value: float, gradient: float) -> None:
    """Weights of e^-95 would be denormal in float32, and their products many times slower; large factors show them."""
    q, k, v = Case(1, 1, 1, 256, 256, 64, 64).inputs(torch.float32)
    q[:], k[:], v[:] = 0, 0, value
    q[..., 0], k[:, :, 1:, 0], v[:, :, 0] = 8, -95, 0
    out, _, _, dk, dv = run(attention, (q, k, v), torch.full_like(v, gradient))
    for x in (out, dk[:, :, 1:], dv[:, :, 1:]):
        assert (x == 0).all()


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
def test_same_bits_over_a_hundred_repeats() -> None:
    """Small enough to repeat, large enough for threads; one head, so that its keys are split."""
    case = Case(1, 1, 1, 130, 250, 32, 20)
    qkv, (dout, dlse) = case.inputs(torch.float32), case.gradients(torch.float32)
    torch.set_num_threads(3)
    once = run(attention, qkv, dout, dlse)
    for _ in range(100):
        assert_equal(run(attention, qkv, dout, dlse), once)


@pytest.mark.usefixtures("threads")
def test_two_threads_are_used() -> None:
    """In forward and in backward, also where there is one head only.

    On a busy machine one thread may finish a call before the other wakes, so the threads of up to 100 calls count.
    """
    torch.set_num_threads(2)
    qkv, (dout, _) = (case := Case(1, 1, 1, 2048, 2048, 64, 64)).inputs(torch.float32), case.gradients(torch.float32)
    threads: dict[str, set[int]] = {"forward": set(), "backward": set()}
    for _ in range(100):
        _C.start_profile()
        run(attention, qkv, dout)
        for task in _C.stop_profile():
            threads.setdefault(task.pass_name, set()).add(task.thread)
        if all(len(threads[name]) == 2 for name in ("forward", "backward")):
            return
    pytest.fail(f"threads of each pass: {threads}")


@each_dtype
def test_decoding_equals_the_whole(dtype: torch.dtype) -> None:
    """One query at a time against the keys so far, as a KV cache has them."""
    q, k, v = Case(1, 4, 2, 110, 110, 24, 20).inputs(dtype)
    steps = [attention(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1]) for t in range(110)]
    plain, exact = (reference.attention(*(x.to(t) for x in (q, k, v))) for t in (dtype, torch.float64))
    assert_accurate("out", torch.cat(steps, 2), plain, exact)


@each_dtype
def test_parts_of_the_keys_merge_to_the_whole(dtype: torch.dtype) -> None:
    """lse weighs the parts, as in split-key decoding."""
    q, k, v = Case(1, 4, 2, 30, 250, 24, 20).inputs(dtype)
    parts = [
        attention(q, k[:, :, i], v[:, :, i], causal=False, return_lse=True) for i in (slice(0, 70), slice(70, 250))
    ]
    weights = torch.stack([lse for _, lse in parts]).softmax(0)
    merged = sum(w[..., None] * out.to(w.dtype) for w, (out, _) in zip(weights, parts, strict=True))
    plain, exact = (reference.attention(*(x.to(t) for x in (q, k, v)), causal=False) for t in (dtype, torch.float64))
    assert_accurate("out", merged.to(dtype), plain, exact)


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
