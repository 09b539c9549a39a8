"""Attention over several ranks, which divide the sequence or the heads, by torch.distributed.

.. include:: README.md
"""

from pyattn.distributed import dtensor
from pyattn.distributed.attention import ring_attention, ring_attention_varlen, ulysses_attention, usp_attention
from pyattn.distributed.cache.attention import attention_with_cache
from pyattn.distributed.context_parallel import context_parallel
from pyattn.distributed.layout import shard, unshard
from pyattn.distributed.tensor_parallel.modules import TensorParallel, tensor_parallel
from pyattn.distributed.tensor_parallel.state_dict import whole_state_dict

__all__ = [
    "TensorParallel",
    "attention_with_cache",
    "context_parallel",
    "ring_attention",
    "ring_attention_varlen",
    "shard",
    "tensor_parallel",
    "ulysses_attention",
    "unshard",
    "usp_attention",
    "whole_state_dict",
]

dtensor.register()
