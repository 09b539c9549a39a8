"""Misspelt options of every public function. If mypy does not flag one, it reports the ignore beside it as unused."""

import torch

import pyattn
from pyattn.parts import attention_backward

q = torch.zeros(1, 1, 1, 1)
cu_seqlens = torch.tensor([0, 1])
cache = pyattn.KVCache(1, 1, 1, 1)

pyattn.attention(q, q, q, casual=True)  # type: ignore[call-overload]
pyattn.attention_varlen(q[0], q[0], q[0], cu_seqlens, cu_seqlens, 1, 1, casual=True)  # type: ignore[call-overload]
pyattn.attention_weights(q, q, casual=True)  # type: ignore[call-arg]
pyattn.attention_with_cache(q, cache, casual=True)  # type: ignore[call-overload]
attention_backward(q, q, q, q, q, q[0], casual=True)  # type: ignore[call-arg]
