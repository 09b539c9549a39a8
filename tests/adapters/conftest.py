from collections.abc import Iterator

import pytest
from torch.nn.attention import current_flash_attention_impl

from pyattn.adapters import torch_varlen


@pytest.fixture
def torchs_varlen() -> Iterator[None]:
    """torch's varlen_attn works on the CPU."""
    torch_varlen.activate()
    yield
    torch_varlen.remove()
    assert current_flash_attention_impl() is None
