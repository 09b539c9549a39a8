"""What PyTorch does with a GPU's operators: graphs, streams, autocast, compilation, checkpoints, several devices."""

import importlib.util
from functools import partial

import torch
from gpu_steps.child import Check, LeftOutError
from gpu_steps.common import assert_same, determinism, tensors
from helpers import Case, assert_equal, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pyattn import attention, reference
from pyattn.dropout import draw_seed

CASE = Case(2, 4, 2, 300, 300, 64, 64)
LONG_WAIT = 100_000_000
"""Cycles of a GPU's clock: some 50 ms."""

Results = tuple[Tensor, ...]


def both(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seed: Tensor | None = None) -> Results:
    """Forward and backward, with dropout."""
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    out = attention(*leaves, dropout_p=0.5, dropout_seed=seed)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def a_graph_replays(dtype: torch.dtype, device: str) -> None:
    """Each replay draws a seed, and computes what an eager call with that seed does."""
    (q, k, v), dout, _ = tensors(CASE, dtype, device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both(q, k, v, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seed = draw_seed(q.device)
        seeded, drawn = both(q, k, v, dout, seed), both(q, k, v, dout)
    replays: list[Results] = []
    for _ in range(3):
        q.normal_()
        graph.replay()
        assert_equal(seeded, both(q, k, v, dout, seed.clone()))
        replays.append((seed.clone(), q.clone(), *(x.clone() for x in drawn)))
    assert len({int(x[0]) for x in replays}) == 3
    q.copy_(replays[-1][1])
    graph.replay()
    for x, y in zip(drawn, replays[-1][2:], strict=True):
        assert not torch.equal(x, y), "two replays on the same inputs dropped the same"


def a_stream_is_kept(dtype: torch.dtype, device: str) -> None:
    """On another stream than the default one, where the inputs come late, forward and backward wait for them."""
    qkv, dout, _ = tensors(CASE, dtype, device)
    late = tuple(torch.zeros_like(x) for x in (*qkv, dout))
    for deterministic in (True, False):
        with determinism(deterministic):
            expected = run(attention, qkv, dout)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(LONG_WAIT)
                for x, y in zip(late, (*qkv, dout), strict=True):
                    x.copy_(y)
                results = run(attention, late[:3], late[3])
            side.synchronize()
        assert_same(results, expected, deterministic)
        for x in late:
            x.zero_()


def autocast_casts(device: str) -> None:
    qkv, _, _ = tensors(CASE, torch.float32, device)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype=dtype):
            out = attention(*qkv)
        assert torch.equal(out, attention(*(x.to(dtype) for x in qkv)))
        with torch.autocast(device, dtype=dtype):
            assert attention(*(x.double() for x in qkv)).dtype == torch.float64


def it_compiles(device: str, backend: str) -> None:
    if backend == "inductor" and importlib.util.find_spec("triton") is None:
        raise LeftOutError("no triton")
    qkv, dout, _ = tensors(CASE, torch.bfloat16, device)
    seed = torch.tensor(9, device=device)

    def drop(q: Tensor, k: Tensor, v: Tensor, seed: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, dropout_p=0.5, dropout_seed=seed, return_lse=return_lse)

    compiled = torch.compile(drop, fullgraph=True, backend=backend)
    ours, expected = (run(partial(f, seed=seed), qkv, dout) for f in (compiled, drop))
    assert_equal(ours, expected)


def checkpoints_drop_the_same(device: str) -> None:
    qkv, dout, _ = tensors(CASE, torch.bfloat16, device)
    leaves = tuple(x.requires_grad_() for x in qkv)

    def drop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, dropout_p=0.5)

    torch.manual_seed(2)
    kept = torch.autograd.grad(drop(*leaves), leaves, dout)
    torch.manual_seed(2)
    assert_equal(torch.autograd.grad(checkpoint(drop, *leaves, use_reentrant=False), leaves, dout), kept)


def modules_are_those_of_the_reference(device: str) -> None:
    from pyattn import nn as native

    arguments = (64, 64, 300, 0.0, 4)
    ours, theirs = (m.MultiHeadAttention(*arguments).to(device).double() for m in (native, reference))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 300, 64, dtype=torch.float64, device=device, requires_grad=True)
    dout = torch.randn_like(x)
    results = [(out := m(x), *torch.autograd.grad(out, (x, *m.parameters()), dout)) for m in (ours, theirs)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def another_device_computes_the_same(device: str) -> None:
    """One that is not current."""
    if torch.cuda.device_count() < 2:
        raise LeftOutError("one GPU")
    qkv, dout, _ = tensors(CASE, torch.bfloat16, device)
    there = [x.to("cuda:1") for x in (*qkv, dout)]
    assert torch.cuda.current_device() == 0
    results = run(attention, tuple(there[:3]), there[3])
    assert_equal(tuple(x.to(device) for x in results), run(attention, qkv, dout))


def checks(device: str) -> dict[str, Check]:
    backend = "aot_eager" if device == "cpu" else "inductor"
    everywhere = (autocast_casts, checkpoints_drop_the_same, modules_are_those_of_the_reference)
    named: dict[str, Check] = {check.__name__: partial(check, device) for check in everywhere}
    named["it_compiles"] = partial(it_compiles, device, backend)
    if device == "cpu":
        return named
    on_gpus = {
        f"{check.__name__} {dtype}": partial(check, dtype, device)
        for check in (a_graph_replays, a_stream_is_kept)
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    }
    return on_gpus | named | {"another_device_computes_the_same": partial(another_device_computes_the_same, device)}
