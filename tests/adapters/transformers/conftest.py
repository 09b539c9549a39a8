from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture
def softmax_in_its_own_dtype(monkeypatch):
    """Keeps float64 scores in float64: eager attention otherwise casts them to float32 before the softmax."""
    softmax = torch.nn.functional.softmax
    own: Callable[..., Tensor] = lambda x, dim=None, **named: softmax(x, dim=dim)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "softmax", own)
