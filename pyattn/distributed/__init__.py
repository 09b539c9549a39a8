"""Attention over sequences whose parts lie on several ranks, by torch.distributed.

.. include:: README.md
"""

from pyattn.distributed.attention import ring_attention, ring_attention_varlen, ulysses_attention, usp_attention
from pyattn.distributed.cached import attention_with_cache
from pyattn.distributed.context import context_parallel
from pyattn.distributed.layout import shard, unshard

__all__ = [
    "attention_with_cache",
    "context_parallel",
    "ring_attention",
    "ring_attention_varlen",
    "shard",
    "ulysses_attention",
    "unshard",
    "usp_attention",
]
