"""Calls of attention_weights: cases with every option, chosen heads and rows, and the exact lse."""

from typing import Any

import pytest
import torch
from support.cases import Case
from support.yardstick import in_double
from torch import Tensor

from pyattn import reference

CASES = [
    Case(2, 4, 2, 9, 12, 8, 8),
    Case(2, 4, 1, 12, 9, 8, 8, causal=False, softmax_scale=-0.4),
    Case(2, 4, 2, 9, 12, 8, 8, window=(3, 1), q_offset=2, causal=False),
    Case(2, 4, 2, 9, 12, 8, 8, window=(2, -1), key_ranges="random", dropout_p=0.3),
    Case(2, 4, 2, 9, 12, 8, 8, key_ranges="empty", causal=False, sinks=True),
    Case(2, 4, 2, 9, 12, 8, 8, softcap=1.5, alibi="h", relative="h 4"),
    Case(2, 4, 2, 9, 12, 8, 8, mask="random bhqk", softcap=0.5),
    Case(2, 4, 2, 9, 12, 8, 8, bias="bands hqk strided", alibi="bh", q_offset=-3, sinks=True, relative="b 4"),
    Case(2, 4, 2, 9, 12, 8, 8, bias="float bk", softcap=2.0, alibi="bh", sinks=True, window=(4, -1), dropout_p=0.2),
    Case(2, 4, 2, 9, 12, 8, 8, bias="lowest q", wide=True, sinks=True),
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)

CHOSEN = {"heads": [3, 0], "rows": [-1, 2, 2, 8]}


def inputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Any]]:
    q, k, _ = case.inputs(dtype)
    return q, k, case.given(dtype)


def lse_of(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    row = torch.promote_types(q.dtype, torch.float32)
    return reference.attention(q.double(), k.double(), k.double(), return_lse=True, **in_double(options))[1].to(row)
