"""flash-attn's functions on a CPU, forward and backward, in its layout (batch, seqlen, num_heads, head_dim).

The functions here have the signatures and results of flash-attn 2; :mod:`.hopper` has those of FlashAttention 3 and
:mod:`.cute` those of FlashAttention 4. Code that imports flash_attn, flash_attn_interface or flash_attn_3 itself runs
unchanged after :func:`enable`, or within :func:`alias`. These functions also work where flash-attn's kernels don't:
CPUs, float32, head dimensions above 256, softcap with dropout, page sizes that are not multiples of 256, empty batches.
Wrong arguments raise as they do there. Two results follow flash-attn's documentation rather than its code: softmax_lse
with both causal and alibi_slopes, where flash-attn leaves out a term of each row, and a window at least as long as the
keys, which flash-attn drops.
"""

from pyattn.adapters.flash_attn.alias import alias, disable, enable, enabled
from pyattn.adapters.flash_attn.alias.distributions import VERSION
from pyattn.adapters.flash_attn.dense import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from pyattn.adapters.flash_attn.kv_cache import flash_attn_with_kvcache
from pyattn.adapters.flash_attn.varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "VERSION",
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
