"""What only a GPU has: graphs, streams, devices, results past 2^31 elements. Collected with ``--backend cuda``."""

import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from backends import Backend
from helpers import Case, assert_case_accurate, each_dtype, run
from test_layouts import AROUND_2_16
from torch import Tensor
from yardstick import assert_accurate

from pyattn import KVCache, attention, attention_with_cache, nn, reference
from pyattn.cli.timing import peak_memory
from pyattn.dropout import draw_seed

CASE = Case(2, 4, 2, 300, 300, 64, 64)
LONG_WAIT = 100_000_000
"""Cycles of a GPU's clock: some 50 ms."""

each_kind = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)

DIMS = (
    *((d, d) for d in (32, 64, 96, 128, 192, 256)),
    *((20, 20), (72, 72), (80, 80), (1, 1), (21, 77), (64, 128), (128, 33), (100, 256), (256, 64)),
)
"""Head dimensions of kernels, then some that are filled up to them, and values of another width."""

LARGER = [
    case
    for dims in DIMS
    for case in (
        Case(2, 4, 2, 130, 197, *dims),
        Case(1, 3, 3, 257, 257, *dims, causal=False, softmax_scale=-0.3),
        Case(2, 4, 1, 200, 129, *dims, q_offset=-30, dropout_p=0.2),
        Case(1, 6, 2, 100, 333, *dims, causal=False, dropout_p=0.5),
        Case(1, 8, 2, 1, 515, *dims),
        Case(2, 4, 2, 200, 333, *dims, window=(90, 5), causal=False, bias="bool hqk", sinks=True),
        Case(2, 4, 2, 257, 300, *dims, key_ranges="documents", softcap=3.0, alibi="bh", bias="bands bhqk"),
        Case(2, 4, 2, 130, 150, *dims, bias="float k", dropout_p=0.2),
    )
] + [
    Case(1, 4, 2, 1500, 1500, 64, 64),
    Case(2, 8, 2, 1, 20000, 64, 64, sinks=True),
    Case(1, 8, 1, 5, 40000, 128, 128, window=(30000, 0), alibi="h"),
    Case(1, 4, 4, 3, 9000, 256, 256, causal=False, dropout_p=0.2, bias="bool k"),
    Case(1, 2, 2, 1100, 2300, 128, 128, q_offset=900, dropout_p=0.1),
    Case(1, 4, 2, 1500, 1500, 64, 64, key_ranges="documents", bias="bands qk", alibi="h", sinks=True),
]
"""Masks, scores, groups, dropout, and lengths that fill no tile; each would take minutes in an emulation."""


@each_dtype
@pytest.mark.parametrize("case", LARGER, ids=str)
def test_forward_and_backward(cuda: Backend, case: Case, dtype: torch.dtype) -> None:
    assert_case_accurate(case, dtype, cuda.attention)


@pytest.mark.parametrize("case", AROUND_2_16, ids=str)
def test_sizes_around_two_to_the_16th(cuda: Backend, case: Case) -> None:
    """The kernels with tiles count right too; test_layouts.py has float64."""
    assert_case_accurate(case, torch.bfloat16, cuda.attention)


@each_dtype
@pytest.mark.parametrize("head_dim", [64, 128])
def test_same_bits_each_time(cuda: Backend, dtype: torch.dtype, head_dim: int) -> None:
    case = Case(2, 8, 4, 700, 700, head_dim, head_dim, dropout_p=0.1)
    tensors = (case.inputs(dtype), *case.gradients(dtype))
    first = run(cuda.attention, *tensors, **case.options)
    for _ in range(20):
        cuda.assert_same(run(cuda.attention, *tensors, **case.options), first)


def inputs(dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    return CASE.inputs(dtype), CASE.gradients(dtype)[0]


def both(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seed: Tensor | None = None) -> tuple[Tensor, ...]:
    """out, dq, dk and dv of a forward and a backward with dropout."""
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    out = attention(*leaves, dropout_p=0.5, dropout_seed=seed)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


@each_kind
def test_a_graph_replays(cuda: Backend, dtype: torch.dtype) -> None:
    """Each replay draws a seed, and computes what an eager call with that seed does."""
    (q, k, v), dout = inputs(dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both(q, k, v, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seed = draw_seed(q.device)
        seeded, drawn = both(q, k, v, dout, seed), both(q, k, v, dout)
    replays: list[tuple[Tensor, ...]] = []
    for _ in range(3):
        q.normal_()
        graph.replay()
        out, dq, dk, dv = both(q, k, v, dout, seed.clone())
        cuda.assert_same((seeded[0], seeded[0], *seeded[1:]), (out, out, dq, dk, dv))
        replays.append((seed.clone(), q.clone(), *(x.clone() for x in drawn)))
    assert len({int(x[0]) for x in replays}) == 3
    q.copy_(replays[-1][1])
    graph.replay()
    for x, y in zip(drawn, replays[-1][2:], strict=True):
        assert not torch.equal(x, y), "two replays on the same inputs dropped the same"


def test_a_graph_reads_masks_and_scores_anew(cuda: Backend) -> None:
    """What a replay sees, it finds on the device: ranges, a bias's holes, slopes and sinks."""
    case = Case(2, 4, 2, 200, 230, 64, 64, key_ranges="random", causal=False, bias="bands hqk", alibi="h", sinks=True)
    tensors = case.inputs(torch.bfloat16), *case.gradients(torch.bfloat16)
    options = case.options | case.tensors(torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(cuda.attention, *tensors, **options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(cuda.attention, *tensors, **options)
    for seed in (1, 2):
        torch.manual_seed(seed)
        for name, x in case.tensors(torch.bfloat16).items():
            options[name].copy_(x)
        options["key_ranges"].copy_(options["key_ranges"].flip(1))
        graph.replay()
        cuda.assert_same(captured, run(cuda.attention, *tensors, **options))


def test_a_graph_reads_lengths_anew(cuda: Backend) -> None:
    """A graph of packed sequences fixes how many tokens and sequences there are, and the longest that may come."""
    q, k, v, dout = torch.randn(4, 900, 4, 64, dtype=torch.bfloat16).unbind()
    lengths = torch.tensor([0, 300, 300, 600, 890], dtype=torch.int32)
    used = torch.tensor([300, 0, 9, 290])

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return cuda.attention_varlen(q, k, v, lengths, lengths, 500, 500, seqused_k=used, **options)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(call, (q, k, v), dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(call, (q, k, v), dout)
    for other in ([0, 1, 400, 890, 900], [0, 0, 0, 480, 500]):
        lengths.copy_(torch.tensor(other))
        used.copy_(lengths.diff() // 2)
        graph.replay()
        cuda.assert_same(captured, run(call, (q, k, v), dout))


@pytest.mark.parametrize("window", [None, 40])
@each_kind
def test_a_graph_decodes(cuda: Backend, dtype: torch.dtype, window: int | None) -> None:
    """A captured step appends a token to sequences of any lengths and attends over all so far, some keys split."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, heads, 1500, 64, dtype=dtype) for heads in (8, 2, 2))
    cached, expected = (KVCache(3, 2, 1600 if window is None else 90, 64, dtype=dtype, window=window) for _ in range(2))
    token = tuple(t[:, :, :1].clone() for t in (q, k, v))
    count = torch.ones(3, dtype=torch.int64)

    def step(cache: KVCache) -> Tensor:
        cache.append(*token[1:], count)
        return attention_with_cache(token[0], cache)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(cached)
    torch.cuda.current_stream().wait_stream(side)
    cached.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(cached)
    prompt, starts = (k[:, :, :1400], v[:, :, :1400]), torch.tensor([1400, 20, 700])
    for cache in (cached, expected):
        cache.reset()
        cache.append(*prompt, starts)
    places = torch.arange(3)
    for n in range(1400, 1440):
        at = starts + (n - 1400)
        for to, t in zip(token, (q, k, v), strict=True):
            to.copy_(t[places, :, at][:, :, None])
        graph.replay()
        assert torch.equal(captured, step(expected))
        assert torch.equal(cached.lengths, expected.lengths)
    for b, length in enumerate(cached.lengths.tolist()):
        now, seen = slice(length - 1, length), slice(0, length)
        mask = {} if window is None else {"window": (window - 1, 0)}
        alone = tuple(t[b : b + 1, :, part] for t, part in ((q, now), (k, seen), (v, seen)))
        exact = reference.attention(*(t.double() for t in alone), **mask)
        assert_accurate("out", captured[b : b + 1], reference.attention(*alone, **mask), exact)


def test_a_cache_that_is_full_stays_as_it_is(cuda: Backend) -> None:
    """What does not fit is left out; nobody reads the lengths to refuse it."""
    k, v = torch.randn(2, 2, 2, 5, 64)
    cached = KVCache(2, 2, 8, 64)
    cached.append(k, v, [5, 3])
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        cached.reorder(torch.zeros(2, dtype=torch.int64))  # captured, not run
    for _ in range(2):
        cached.append(k, v)
        assert cached.lengths.tolist() == [8, 8]
        assert torch.equal(cached.k[1], torch.cat([k[1, :, :3], k[1]], 1))
        assert torch.equal(cached.k[0], torch.cat([k[0], k[0, :, :3]], 1))
    cached.reorder([1, 9])
    assert torch.equal(cached.k[0], cached.k[1])
    with pytest.raises(NotImplementedError, match=r"^pyattn: keys in pages are on the CPU alone so far"):
        KVCache(2, 2, 64, 64, page_size=16)


def test_sequences_whose_indices_are_invalid_are_nan(cuda: Backend) -> None:
    q, k, v, dout = torch.randn(4, 300, 4, 64, dtype=torch.float16).unbind()
    for starts, longest, used, gone in (
        ([0, 100, 2**40, 300], 300, [100] * 3, slice(0, 300)),
        ([0, 200, 100, 300], 300, [100] * 3, slice(0, 300)),
        ([0, 100, 200, 300], 300, [100, 101, -1], slice(100, 300)),
        ([0, 100, 250, 300], 120, [0, 0, 0], slice(100, 250)),
    ):
        packing = torch.tensor(starts), torch.tensor(starts), longest, longest
        call = partial(cuda.attention_varlen, seqused_k=torch.tensor(used))
        results = run(lambda *qkv, call=call, packing=packing, **named: call(*qkv, *packing, **named), (q, k, v), dout)
        for x in (results[0], results[1].mT, *results[2:]):
            is_nan = torch.zeros(300, dtype=torch.bool)
            is_nan[gone] = True
            assert torch.equal(x.flatten(1).isnan().all(1), is_nan)


FIRST_CALL = """
import sys, torch
from pyattn import attention, set_deterministic
set_deterministic(sys.argv[2] == "True")
qkv = torch.randn(3, 1, 2, 300, 64, device="cuda", dtype=getattr(torch, sys.argv[1])).unbind()
leaves = [x.requires_grad_() for x in qkv]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = attention(*leaves)
    captured = (out, *torch.autograd.grad(out, leaves, out.detach()))
graph.replay()
out = attention(*leaves)
for x, y in zip(captured, (out, *torch.autograd.grad(out, leaves, out.detach()))):
    torch.testing.assert_close(x, y)
"""


@each_kind
def test_a_first_call_is_captured(cuda: Backend, dtype: torch.dtype) -> None:
    """A process's first call sets kernels up and looks up torch's stream, neither of which ends the capture."""
    command = [sys.executable, "-c", FIRST_CALL, str(dtype).removeprefix("torch."), str(cuda.repeatable)]
    result = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


@each_kind
def test_a_stream_is_kept(cuda: Backend, dtype: torch.dtype) -> None:
    """Forward and backward run on the current stream: on a side stream they wait for inputs that come late."""
    qkv, dout = inputs(dtype)
    expected = run(attention, qkv, dout)
    late = tuple(torch.zeros_like(x) for x in (*qkv, dout))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG_WAIT)
        for x, y in zip(late, (*qkv, dout), strict=True):
            x.copy_(y)
        results = run(attention, late[:3], late[3])
    side.synchronize()
    cuda.assert_same(results, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_device_computes_the_same(cuda: Backend) -> None:
    """A device that is not current gives the bits of the one that is."""
    qkv, dout = inputs(torch.bfloat16)
    there = [x.to("cuda:1") for x in (*qkv, dout)]
    assert torch.cuda.current_device() == 0
    results = run(attention, tuple(there[:3]), there[3])
    cuda.assert_same(tuple(x.to("cuda:0") for x in results), run(attention, qkv, dout))


HEADS = 2**18 + 5
"""2^18 heads of 128 x 64 elements are 2^31 elements, in results too, and more than a grid's second dimension."""


def test_results_past_two_to_the_31st(cuda: Backend) -> None:
    """The last heads have the bits that they have alone."""
    cuda.needs_memory(48e9)
    *qkv, dout = (torch.randn(1, HEADS, 128, 64, dtype=torch.bfloat16) for _ in range(4))
    *last, last_dout = (x[:, -3:].clone() for x in (*qkv, dout))
    alone = run(attention, tuple(last), last_dout)
    together = tuple(x[:, -3:].clone() for x in run(attention, tuple(qkv), dout))
    cuda.assert_same(together, alone)


def test_extra_memory_is_linear(cuda: Backend) -> None:
    def peak(seqlen: int) -> int:
        q, k, v = torch.randn(3, 1, 1, seqlen, 64, dtype=torch.bfloat16).unbind()
        extra = peak_memory(lambda: run(cuda.attention, (q, k, v), v), "cuda")
        assert extra is not None
        return extra

    half, whole = peak(8192), peak(16384)
    assert 0 < whole <= 2.1 * half


def test_limits_are_named(cuda: Backend) -> None:
    x = torch.randn(2, 2, 7, 8)
    wide, keys = torch.randn(2, 2, 7, 257), x[:1, :1, :1].expand(1, 1, 2**31, 8)
    for message, (q, k, v) in {
        "on CUDA head_dim must be at most 256, got 257 for q": (wide, wide, x),
        "on CUDA head_dim must be at most 256, got 8 for q and k and 257": (x, x, wide),
        "on CUDA a KV head must have at most 2147483391 query rows and keys, got 1": (x[:1, :1, :1], keys, keys),
    }.items():
        with pytest.raises(NotImplementedError, match=f"^pyattn: {message}"):
            cuda.attention(q, k, v)
    for name, options in {"k": {"k": x.cpu()}, "q_offset": {"q_offset": torch.arange(2, device="cpu")}}.items():
        with pytest.raises(ValueError, match=f"^pyattn: {name} must be on q's device, got cpu and cuda:0"):
            cuda.attention(**{"q": x, "k": x, "v": x} | options)
    with pytest.raises(ValueError, match=r"^pyattn: dropout_seed must be on q's device, got cpu and cuda:0"):
        cuda.attention(x, x, x, dropout_p=0.5, dropout_seed=torch.tensor(1, device="cpu"))


def test_it_compiles(cuda: Backend) -> None:
    pytest.importorskip("triton")
    qkv, dout = inputs(torch.bfloat16)
    seed = torch.tensor(9)

    def drop(q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, dropout_p=0.5, dropout_seed=seed, return_lse=return_lse)

    cuda.assert_same(run(torch.compile(drop, fullgraph=True), qkv, dout), run(drop, qkv, dout))


def test_modules_are_those_of_the_reference(cuda: Backend) -> None:
    arguments = (64, 64, 300, 0.0, 4)
    ours, theirs = (m.MultiHeadAttention(*arguments).double() for m in (nn, reference))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 300, 64, dtype=torch.float64, requires_grad=True)
    dout = torch.randn_like(x)
    results = [(out := m(x), *torch.autograd.grad(out, (x, *m.parameters()), dout)) for m in (ours, theirs)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
