"""transformers: after ``register()``, models with ``attn_implementation="pyattn"`` run on the native kernels.

A model of transformers 5 calls one function for a mask and, in each layer, one for attention, both by name. The mask
becomes ``key_ranges`` if each row is at most 4 intervals of keys: see :mod:`pyattn.adapters.transformers.masks`.

>>> import pyattn.adapters.transformers
>>> pyattn.adapters.transformers.register()  # doctest: +SKIP
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="pyattn")  # doctest: +SKIP
"""

from pyattn.adapters.transformers.attention import attention_function
from pyattn.adapters.transformers.cache import kv_cache
from pyattn.adapters.transformers.masks import mask_function
from pyattn.adapters.transformers.registration import fallbacks, register

__all__ = ["attention_function", "fallbacks", "kv_cache", "mask_function", "register"]
