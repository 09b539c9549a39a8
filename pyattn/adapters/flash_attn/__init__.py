"""flash-attn 2's functions on a CPU, forward and backward, in its layout (batch, seqlen, num_heads, head_dim).

The functions have flash-attn's signatures and results. Code that imports flash_attn itself runs unchanged after
:func:`enable`, or within :func:`alias`. Where flash-attn refuses what its kernels lack (CPUs, float32, head dimensions
above 256, softcap with dropout, pages of other sizes than multiples of 256, empty batches), these functions work; wrong
arguments are refused as there. Two things differ where flash-attn's code differs from what it documents: with both
causal and alibi_slopes its softmax_lse leaves out a term of each row, and a window at least as long as the keys becomes
no window.
"""

from pyattn.adapters.flash_attn.alias import alias, disable, enable, enabled
from pyattn.adapters.flash_attn.cached import flash_attn_with_kvcache
from pyattn.adapters.flash_attn.dense import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from pyattn.adapters.flash_attn.varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "alias",
    "disable",
    "enable",
    "enabled",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
