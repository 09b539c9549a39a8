"""The modules of the alias and their contents: flash_attn, flash_attn.cute, flash_attn_interface and flash_attn_3."""

from typing import Any

from pyattn.adapters.flash_attn import cute, padding, rotary
from pyattn.adapters.flash_attn.alias.distributions import VERSION, VERSION_3, VERSION_4
from pyattn.adapters.flash_attn.dense import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from pyattn.adapters.flash_attn.forward import PRIVATE
from pyattn.adapters.flash_attn.hopper import combine, dense, forward, kv_cache, varlen
from pyattn.adapters.flash_attn.hopper.results import with_lse
from pyattn.adapters.flash_attn.kv_cache import flash_attn_with_kvcache
from pyattn.adapters.flash_attn.rotary_embedding import RotaryEmbedding
from pyattn.adapters.flash_attn.varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

ROOTS = ("flash_attn", "flash_attn_interface", "flash_attn_3")
"""The packages whose names the alias takes."""

INTERFACE: dict[str, Any] = {
    function.__name__: function
    for function in (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
    )
}
"""The functions of version 2."""

INTERFACE_3: dict[str, Any] = {
    function.__name__: function
    for function in (
        dense.flash_attn_func,
        dense.flash_attn_qkvpacked_func,
        varlen.flash_attn_varlen_func,
        kv_cache.flash_attn_with_kvcache,
        combine.flash_attn_combine,
        combine.get_scheduler_metadata,
        forward._flash_attn_forward,
        forward._flash_attn_backward,
    )
}
"""The functions of version 3, as it is since July 2025."""

RETURNED_LSE = ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func")
"""The functions of version 3 that returned (out, softmax_lse) in any case before."""

_INTERFACE_4 = {name: getattr(cute, name) for name in ("flash_attn_func", "flash_attn_varlen_func")}


def modules(fa3_returns_lse: bool) -> dict[str, dict[str, Any]]:
    """The modules by name; any other module of these packages raises ImportError."""
    older = {name: with_lse(INTERFACE_3[name]) for name in RETURNED_LSE} if fa3_returns_lse else {}
    interface_3 = INTERFACE_3 | older
    return {
        "flash_attn": {**INTERFACE, "__version__": VERSION},
        "flash_attn.flash_attn_interface": INTERFACE | PRIVATE,
        "flash_attn.bert_padding": {name: getattr(padding, name) for name in padding.__all__},
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": {
            **{name: getattr(rotary, name) for name in rotary.__all__},
            "RotaryEmbedding": RotaryEmbedding,
        },
        "flash_attn.ops": {},
        "flash_attn.ops.triton": {},
        "flash_attn.ops.triton.rotary": {"apply_rotary": rotary.apply_rotary},
        "flash_attn.cute": {**_INTERFACE_4, "__version__": VERSION_4},
        "flash_attn.cute.interface": _INTERFACE_4,
        "flash_attn_interface": interface_3,
        "flash_attn_3": {"__version__": VERSION_3},
        "flash_attn_3.flash_attn_interface": interface_3,
    }
