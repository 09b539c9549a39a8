"""Promise: graphs, streams and caches work on a GPU without waiting for the host.

Without a GPU, a CPU rehearses them: ``rehearsed.py`` reruns a capture's operations.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from support.backends import Backend
from support.cases import Case, run
from support.yardstick import assert_accurate
from torch import Tensor

from pyattn import KVCache, attention, attention_varlen, attention_with_cache, reference
from pyattn.options.dropout import draw_seed

CASE = Case(2, 4, 2, 300, 300, 64, 64)
LONG_WAIT = 100_000_000
"""GPU clock cycles: some 50 ms."""

T = TypeVar("T")

each_kind = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)


def inputs(dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    return CASE.inputs(dtype), CASE.gradients(dtype)[0]


def both(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seed: Tensor | None = None) -> tuple[Tensor, ...]:
    """out, dq, dk and dv of a forward and a backward with dropout."""
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    out = attention(*leaves, dropout_p=0.5, dropout_seed=seed)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def capture(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of the call, and the tensors that its replays write; first called on a side stream, as torch requires."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, call()


@each_kind
def test_a_stream_is_kept(graphs: Backend, dtype: torch.dtype) -> None:
    """Forward and backward run on the current stream: on a side stream they wait for late inputs."""
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
    graphs.assert_same(results, expected)


@each_kind
def test_a_graph_replays(graphs: Backend, dtype: torch.dtype) -> None:
    """Each replay draws a new seed, and computes what an eager call with that seed does."""
    (q, k, v), dout = inputs(dtype)

    def call() -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        seed = draw_seed(q.device)
        return seed, both(q, k, v, dout, seed), both(q, k, v, dout)

    graph, (seed, seeded, drawn) = capture(call)
    replays: list[tuple[Tensor, ...]] = []
    for _ in range(3):
        q.normal_()
        graph.replay()
        out, dq, dk, dv = both(q, k, v, dout, seed.clone())
        graphs.assert_same((seeded[0], seeded[0], *seeded[1:]), (out, out, dq, dk, dv))
        replays.append((seed.clone(), q.clone(), *(x.clone() for x in drawn)))
    assert len({int(x[0]) for x in replays}) == 3
    q.copy_(replays[-1][1])
    graph.replay()
    for x, y in zip(drawn, replays[-1][2:], strict=True):
        assert not torch.equal(x, y), "two replays on the same inputs dropped the same"


def test_a_graph_reads_masks_and_scores_anew(graphs: Backend) -> None:
    """A replay reads ranges, a bias's holes, slopes and sinks from the device."""
    case = Case(2, 4, 2, 200, 230, 64, 64, key_ranges="random", causal=False, bias="bands hqk", alibi="h", sinks=True)
    tensors = case.inputs(torch.bfloat16), *case.gradients(torch.bfloat16)
    options = case.options | case.tensors(torch.bfloat16)
    graph, captured = capture(lambda: run(graphs.attention, *tensors, **options))
    for seed in (1, 2):
        torch.manual_seed(seed)
        for name, x in case.tensors(torch.bfloat16).items():
            options[name].copy_(x)
        options["key_ranges"].copy_(options["key_ranges"].flip(1))
        graph.replay()
        graphs.assert_same(captured, run(graphs.attention, *tensors, **options))


def test_a_graph_reads_lengths_anew(graphs: Backend) -> None:
    """A graph of packed sequences fixes the numbers of tokens and sequences, and the maximum length."""
    q, k, v, dout = torch.randn(4, 900, 4, 64, dtype=torch.bfloat16).unbind()
    lengths = torch.tensor([0, 300, 300, 600, 890], dtype=torch.int32)
    used = torch.tensor([300, 0, 9, 290])

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return graphs.attention_varlen(q, k, v, lengths, lengths, 500, 500, seqused_k=used, **options)

    graph, captured = capture(lambda: run(call, (q, k, v), dout))
    for other in ([0, 1, 400, 890, 900], [0, 0, 0, 480, 500]):
        lengths.copy_(torch.tensor(other))
        used.copy_(lengths.diff() // 2)
        graph.replay()
        graphs.assert_same(captured, run(call, (q, k, v), dout))


@pytest.mark.parametrize(("window", "page_size"), [(None, None), ((39, 0), None), (None, 16)])
@each_kind
def test_a_graph_decodes(
    graphs: Backend, dtype: torch.dtype, window: tuple[int, int] | None, page_size: int | None
) -> None:
    """A captured step appends a token to sequences of any lengths and attends over all so far, some keys split."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, heads, 1500, 64, dtype=dtype) for heads in (8, 2, 2))
    made = partial(KVCache, 3, 2, 90 if window else 1600, 64, dtype=dtype, window=window, page_size=page_size)
    cached, expected = made(), made()
    token = tuple(t[:, :, :1].clone() for t in (q, k, v))
    count = torch.ones(3, dtype=torch.int64)

    def step(cache: KVCache) -> Tensor:
        cache.append(*token[1:], count)
        return attention_with_cache(token[0], cache)

    graph, captured = capture(lambda: step(cached))
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
        mask = {} if window is None else {"window": window}
        alone = tuple(t[b : b + 1, :, part] for t, part in ((q, now), (k, seen), (v, seen)))
        exact = reference.attention(*(t.double() for t in alone), **mask)
        assert_accurate("out", captured[b : b + 1], reference.attention(*alone, **mask), exact)


def test_a_cache_that_is_full_stays_as_it_is(graphs: Backend) -> None:
    """Positions that do not fit are left out: the host does not read the lengths to refuse them."""
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


def test_a_graph_reads_pages_anew(graphs: Backend) -> None:
    """A replay finds the keys of packed sequences where the table says at that time."""
    q, k, v = torch.randn(3, 6, 32, 2, 64, dtype=torch.bfloat16).unbind()
    q, table = q.flatten(0, 1)[:70], torch.tensor([[0, 1], [2, 3]])
    q_starts, k_starts = torch.tensor([0, 40, 70]), torch.tensor([0, 60, 100])
    graph, out = capture(lambda: attention_varlen(q, k, v, q_starts, k_starts, 64, 64, block_table=table))
    for pages, lengths in (([[0, 1], [2, 3]], [60, 40]), ([[5, 0], [3, 5]], [33, 64])):
        table.copy_(torch.tensor(pages))
        k_starts.copy_(torch.tensor([0, lengths[0], sum(lengths)]))
        graph.replay()
        listed = [(b, pages[b], n) for b, n in enumerate(lengths)]
        flat = (torch.cat([t[page].flatten(0, 1)[:n] for _, page, n in listed]) for t in (k, v))
        assert torch.equal(out, graphs.attention_varlen(q, *flat, q_starts, k_starts, 64, 64))
