"""Exact multi-head causal attention for PyTorch, forward and backward, in native code.

README.md in this package's folder has every task and recipes; nn, selection, adapters and cli have their own pages
there.

.. include:: README.md
"""

from pyattn import _load, jagged, masks, nn, parts, relative_bias, selection  # noqa: F401  (_load first: it checks torch)
from pyattn.attention import attention, dropout_mask
from pyattn.cache import KVCache
from pyattn.cache import weights as _weights_over_caches  # noqa: F401  (attention_weights takes caches)
from pyattn.cache.attention import attention_with_cache
from pyattn.derivatives.autograd import set_deterministic
from pyattn.instruction_sets import isa, isas, set_isa
from pyattn.ops import flops, onnx, torchscript, vmap  # noqa: F401  (registers what the operators need)
from pyattn.options import AttentionOptions
from pyattn.prefix import attention_with_prefix
from pyattn.varlen import attention_varlen
from pyattn.weights import attention_weights

__version__ = "0.1.0"
__docformat__ = "google"  # how pdoc reads the docstrings

torchscript.refuse(attention, attention_varlen, attention_weights, attention_with_cache, attention_with_prefix)
torchscript.refuse(parts.attention_backward, parts.merge, *nn.MODULES)

__all__ = [
    "AttentionOptions",
    "KVCache",
    "__version__",
    "attention",
    "attention_varlen",
    "attention_weights",
    "attention_with_cache",
    "attention_with_prefix",
    "dropout_mask",
    "isa",
    "isas",
    "masks",
    "nn",
    "parts",
    "relative_bias",
    "selection",
    "set_deterministic",
    "set_isa",
]


def __dir__() -> list[str]:
    return __all__
