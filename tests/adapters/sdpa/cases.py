"""Inputs for the tests of the switch."""

import torch


def tensors(dtype=torch.float64):
    return [torch.randn(2, 4, 6, 8, dtype=dtype, requires_grad=True) for _ in range(3)]


def detached(dtype=torch.float64):
    return [t.detach() for t in tensors(dtype)]
