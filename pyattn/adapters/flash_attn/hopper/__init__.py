"""FlashAttention 3's functions on a CPU, with its signatures and results: see :mod:`pyattn.adapters.flash_attn`."""

from pyattn.adapters.flash_attn.hopper.combine import flash_attn_combine, get_scheduler_metadata
from pyattn.adapters.flash_attn.hopper.dense import flash_attn_func, flash_attn_qkvpacked_func
from pyattn.adapters.flash_attn.hopper.kv_cache import flash_attn_with_kvcache
from pyattn.adapters.flash_attn.hopper.varlen import flash_attn_varlen_func

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]
