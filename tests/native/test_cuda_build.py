"""Promise: without a GPU the module still reports its CUDA kernels, registers operators, and says what is missing."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import pyattn
from pyattn import _C, attention, attention_varlen

CUDA, META = map(torch._C.DispatchKeySet, (torch._C.DispatchKey.CUDA, torch._C.DispatchKey.Meta))
OPS = tuple(f"pyattn::attention_{kind}{way}" for kind in ("", "varlen_") for way in ("forward", "backward"))


def test_architectures() -> None:
    assert all(re.fullmatch(r"\d+[af]?", name) and int(name.rstrip("af")) >= 80 for name in _C.cuda_archs)


@pytest.mark.parametrize("op", OPS)
def test_cuda_tensors_reach_the_operator(op: str) -> None:
    """A build without kernels takes CUDA tensors too, so they reach its checks and its message."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op, "CUDA")


def test_one_function_serves_cuda_too() -> None:
    """A CPU tensor, dispatched as a CUDA one, runs on the CPU. (Without a GPU no CUDA tensor can be made.)"""
    q = torch.randn(1, 2, 5, 8)
    out = torch.ops.pyattn.attention_forward.default.redispatch(CUDA, q, q, q)[0]
    assert torch.equal(out, attention(q, q, q))


def test_fake_cuda_tensors() -> None:
    """Shapes, strides and checks of CUDA tensors, without a GPU: torch.compile and export need them."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(2, 5, 4, 16, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        k = torch.empty(2, 2, 7, 16, device="cuda", dtype=torch.bfloat16)
        out, lse, row_max, row_sum = torch.ops.pyattn.attention_forward(q, k, k)
        assert (out.device.type, out.shape, out.stride()) == ("cuda", q.shape, q.stride())
        assert (lse.device.type, lse.dtype, lse.shape) == ("cuda", torch.float32, q.shape[:3])
        dq, dk, *_ = torch.ops.pyattn.attention_backward(out, None, q, k, k, out, row_max, row_sum)
        assert (dq.device, dq.stride(), dk.stride()) == (q.device, q.stride(), k.stride())


def test_packed_sequences() -> None:
    """The function for packed sequences also serves CUDA and its fake tensors."""
    forward, backward = torch.ops.pyattn.attention_varlen_forward, torch.ops.pyattn.attention_varlen_backward
    q, cu_seqlens = torch.randn(5, 2, 8), torch.tensor([0, 2, 5])
    packing = cu_seqlens, cu_seqlens, 3, 3
    assert torch.equal(forward.default.redispatch(CUDA, q, q, q, *packing)[0], attention_varlen(q, q, q, *packing))
    with FakeTensorMode():
        q, k = (torch.empty(n, 4, 16, device="cuda", dtype=torch.float16) for n in (5, 7))
        lengths = torch.empty(3, device="cuda", dtype=torch.int32)
        out, lse, row_max, row_sum = forward(q, k, k, lengths, lengths, 3, 4)
        assert (out.device.type, out.shape, lse.dtype, lse.shape) == ("cuda", q.shape, torch.float32, (4, 5))
        dq, dk, *_ = backward(out, None, q, k, k, out, row_max, row_sum, lengths, lengths, 3, 4)
        assert (dq.device, dq.stride(), dk.stride()) == (q.device, q.stride(), k.stride())


def test_mixed_devices() -> None:
    q, k = torch.empty(1, 1, 2, 8, device="meta"), torch.empty(1, 1, 2, 8)
    with pytest.raises(ValueError, match="pyattn: k must be on q's device, got cpu and meta"):
        torch.ops.pyattn.attention_forward.default.redispatch(META, q, k, k)


def test_set_deterministic() -> None:
    """The setting is a bool, and no result on the CPU depends on it."""
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    grads = []
    try:
        for deterministic in (True, False):
            pyattn.set_deterministic(deterministic)
            leaf = q.clone().requires_grad_()
            grads += torch.autograd.grad(attention(leaf, k, v).sum(), leaf)
    finally:
        pyattn.set_deterministic(True)
    assert torch.equal(*grads)
    with pytest.raises(TypeError, match="pyattn: deterministic must be a bool, got int"):
        pyattn.set_deterministic(1)  # type: ignore[arg-type]
