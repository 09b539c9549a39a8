"""Promise: large cases, other devices and 2^31 elements work on a GPU; collected only with ``--backend cuda``."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from attention.test_layouts import AROUND_2_16
from support.backends import Backend
from support.cases import Case, assert_case_accurate, each_dtype, run
from torch import Tensor

from pyattn import attention, nn, reference
from pyattn.cli.timing import peak_memory

CASE = Case(2, 4, 2, 300, 300, 64, 64)

each_kind = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)

DIMS = (
    *((d, d) for d in (32, 64, 96, 128, 192, 256)),
    *((20, 20), (72, 72), (80, 80), (1, 1), (21, 77), (64, 128), (128, 33), (100, 256), (256, 64)),
)
"""Head dimensions that have kernels, some that are padded to those, and values of another width."""

LARGER = [
    case
    for dims in DIMS
    for case in (
        Case(2, 4, 2, 130, 197, *dims),
        Case(1, 3, 3, 257, 257, *dims, causal=False, softmax_scale=-0.3),
        Case(2, 4, 1, 200, 129, *dims, q_offset=-30, dropout_p=0.2),
        Case(1, 6, 2, 100, 333, *dims, causal=False, dropout_p=0.5),
        Case(1, 8, 2, 1, 515, *dims),
        Case(2, 4, 2, 200, 333, *dims, window=(90, 5), causal=False, mask="random hqk", sinks=True),
        Case(2, 4, 2, 257, 300, *dims, key_ranges="documents", softcap=3.0, alibi="bh", bias="bands bhqk"),
        Case(2, 4, 2, 130, 150, *dims, bias="float k", dropout_p=0.2),
    )
] + [
    Case(1, 4, 2, 1500, 1500, 64, 64),
    Case(2, 8, 2, 1, 20000, 64, 64, sinks=True),
    Case(1, 8, 1, 5, 40000, 128, 128, window=(30000, 0), alibi="h", wide=True),
    Case(1, 4, 4, 3, 9000, 256, 256, causal=False, dropout_p=0.2, mask="random k"),
    Case(1, 2, 2, 1100, 2300, 128, 128, q_offset=900, dropout_p=0.1),
    Case(1, 4, 2, 1500, 1500, 64, 64, key_ranges="documents", bias="bands qk", alibi="h", sinks=True),
]
"""Masks, scores, groups, dropout, and lengths that fill no tile; each would take minutes in emulation."""


@each_dtype
@pytest.mark.parametrize("case", LARGER, ids=str)
def test_forward_and_backward(cuda: Backend, case: Case, dtype: torch.dtype) -> None:
    assert_case_accurate(case, dtype, cuda.attention)


@pytest.mark.parametrize("case", AROUND_2_16, ids=str)
def test_sizes_around_two_to_the_16th(cuda: Backend, case: Case) -> None:
    """Tiled kernels count right too; attention/test_layouts.py covers float64."""
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
    """A process's first call sets kernels up and looks up torch's stream; neither aborts the capture."""
    command = [sys.executable, "-c", FIRST_CALL, str(dtype).removeprefix("torch."), str(cuda.repeatable)]
    result = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_device_computes_the_same(cuda: Backend) -> None:
    """A device that is not current gives the same bits as the current one."""
    qkv, dout = inputs(torch.bfloat16)
    there = [x.to("cuda:1") for x in (*qkv, dout)]
    assert torch.cuda.current_device() == 0
    results = run(attention, tuple(there[:3]), there[3])
    cuda.assert_same(tuple(x.to("cuda:0") for x in results), run(attention, qkv, dout))


HEADS = 2**18 + 5
"""2^18 heads of 128 x 64 elements are 2^31 elements, in results too, and more than a grid's second dimension."""


def test_results_past_two_to_the_31st(cuda: Backend) -> None:
    """The last heads have the same bits as when computed alone."""
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

    half, whole = peak(2**15), peak(2**16)
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


def test_selected_keys_are_refused(cuda: Backend) -> None:
    x = torch.randn(2, 2, 7, 8)
    lists = torch.zeros(2, 1, 7, 3, dtype=torch.int64)
    with pytest.raises(
        NotImplementedError, match=r"^pyattn: selected keys are computed on the CPU, got q on cuda:0; on"
    ):
        cuda.attention(x, x, x, selected=lists)


def test_the_reference_draws_where_its_queries_are(cuda: Backend) -> None:
    x = torch.randn(1, 2, 7, 8, dtype=torch.float64)
    with torch.device("cpu"):  # as in a program, and in the threads of backward
        ours, exact = (call(x, x, x, dropout_p=0.5, dropout_seed=3) for call in (cuda.attention, reference.attention))
    torch.testing.assert_close(ours, exact)


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
