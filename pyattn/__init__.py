"""Exact multi-head causal attention for PyTorch, forward and backward, in native code."""

from pyattn import masks, nn, onnx, torchscript  # noqa: F401
from pyattn.autograd import set_deterministic
from pyattn.cache import KVCache
from pyattn.cached_attention import attention_with_cache
from pyattn.functional import attention, dropout_mask
from pyattn.ops import flops, vmap  # noqa: F401  (registers them)
from pyattn.options import AttentionOptions
from pyattn.parts import attention_backward, merge
from pyattn.varlen import attention_varlen
from pyattn.weights import attention_weights

__version__ = "0.1.0"

__all__ = [
    "AttentionOptions",
    "KVCache",
    "__version__",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_weights",
    "attention_with_cache",
    "dropout_mask",
    "masks",
    "merge",
    "nn",
    "set_deterministic",
]
