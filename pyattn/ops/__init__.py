"""The native operators, ``torch.ops.pyattn.*``, each named here and nowhere else; importing :mod:`pyattn` loads them.

:mod:`pyattn.ops.vmap` and :mod:`pyattn.ops.flops` add what only Python can register.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

_ops = torch.ops.pyattn

attention_forward = _ops.attention_forward.default
attention_backward = _ops.attention_backward.default
attention_varlen_forward = _ops.attention_varlen_forward.default
attention_varlen_backward = _ops.attention_varlen_backward.default
attention_paged_forward = _ops.attention_paged_forward.default
attention_varlen_paged_forward = _ops.attention_varlen_paged_forward.default
pages_in_use = _ops.pages_in_use.default

cache_append = _ops.cache_append.default
cache_append_pages = _ops.cache_append_pages.default
cache_clear = _ops.cache_clear.default
cache_newest = _ops.cache_newest.default
cache_reorder = _ops.cache_reorder.default
cache_reorder_pages = _ops.cache_reorder_pages.default
cache_slots = _ops.cache_slots.default
cache_truncate = _ops.cache_truncate.default


def arguments_of(op: OpOverload[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, defaults filled in."""
    arguments = op._schema.arguments
    values = {argument.name: argument.default_value for argument in arguments}
    return values | dict(zip(values, args, strict=False)) | dict(named)
