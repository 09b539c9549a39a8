"""The native operators, ``torch.ops.pyattn.*``, each named here and nowhere else; importing :mod:`pyattn` loads them.

:mod:`pyattn.ops.vmap` and :mod:`pyattn.ops.flops` add what only Python can register.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

Operator = OpOverload[..., Any]
Results = OpOverload[..., tuple[Tensor, ...]]
Gradients = OpOverload[..., tuple[Any, ...]]
"""The types of the operators, by their results; a gradient that is not wanted may be None."""

_ops = torch.ops.pyattn

attention: Operator = _ops.attention.default
attention_of_few_options: OpOverload[..., Tensor] = _ops.attention_of_few_options.default
attention_forward: Results = _ops.attention_forward.default
attention_backward: Gradients = _ops.attention_backward.default
attention_recorded_backward: Operator = _ops.attention_recorded_backward.default
attention_varlen: Operator = _ops.attention_varlen.default
attention_varlen_forward: Results = _ops.attention_varlen_forward.default
attention_varlen_backward: Gradients = _ops.attention_varlen_backward.default
attention_varlen_recorded_backward: Operator = _ops.attention_varlen_recorded_backward.default
attention_paged_forward: Results = _ops.attention_paged_forward.default
attention_varlen_paged_forward: Results = _ops.attention_varlen_paged_forward.default
attention_bytes_forward: Results = _ops.attention_bytes_forward.default
pages_in_use: Operator = _ops.pages_in_use.default
set_deterministic: Operator = _ops.set_deterministic.default
set_row_invariant: Operator = _ops.set_row_invariant.default
sdpa_by_rules: Operator = _ops.sdpa_by_rules.default
sdpa_switch: Operator = _ops.sdpa_switch.default
sdpa_forbid: Operator = _ops.sdpa_forbid.default
sdpa_calls: OpOverload[..., int] = _ops.sdpa_calls.default

cache_append: Operator = _ops.cache_append.default
cache_append_pages: Operator = _ops.cache_append_pages.default
cache_clear: Operator = _ops.cache_clear.default
cache_copy: OpOverload[..., Tensor] = _ops.cache_copy.default
cache_keep: Operator = _ops.cache_keep.default
cache_keep_pages: Operator = _ops.cache_keep_pages.default
cache_newest: Operator = _ops.cache_newest.default
cache_reorder: Operator = _ops.cache_reorder.default
cache_reorder_pages: Operator = _ops.cache_reorder_pages.default
cache_quantize: OpOverload[..., tuple[Tensor, Tensor]] = _ops.cache_quantize.default
cache_rotate: OpOverload[..., Tensor] = _ops.cache_rotate.default
cache_slots: OpOverload[..., Tensor] = _ops.cache_slots.default
cache_truncate: Operator = _ops.cache_truncate.default


def arguments_of(op: Operator, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, defaults filled in."""
    arguments = op._schema.arguments
    values = {argument.name: argument.default_value for argument in arguments}
    return values | dict(zip(values, args, strict=False)) | dict(named)
