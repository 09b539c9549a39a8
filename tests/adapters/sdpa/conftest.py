import pytest
import torch
from torch import nn
from torch.nested._internal import ops as jagged

from pyattn.adapters.sdpa import is_enabled, reset_counts

OPERATOR = "aten::scaled_dot_product_attention"


def state():
    """The settings of torch that the switch changes."""
    settings = torch.backends.mha.get_fastpath_enabled(), torch.compiler.config.cache_key_tag
    return (
        torch._C._dispatch_dump_table(OPERATOR),
        nn.functional.multi_head_attention_forward,
        jagged.jagged_scaled_dot_product_attention,
        *settings,
    )


@pytest.fixture
def nothing_counted():
    """Each test starts with the switch off and all counts 0, and leaves torch as it was."""
    before = state()
    assert not is_enabled()
    reset_counts()
    yield
    assert before == state()
    reset_counts()
