"""Promise: every operator agrees with its schema, fake kernel and derivatives, by torch.library.opcheck's full set."""

from typing import Any

import pytest
import torch
from support.calls import MASKS, SCORES, score_tensors
from support.cases import Case
from torch import Tensor

from pyattn.options import LEARNED, Options


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offsets", [None, torch.tensor([1, -2])], ids=["offset", "offsets"])
@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.3, "dropout_seed": torch.tensor(5)}], ids=["", "dropout"])
def test_opcheck(dtype: torch.dtype, offsets: Tensor | None, dropout: dict[str, Any]) -> None:
    """Results match the schemas and fake tensors, whether or not lse has q's dtype.

    Half of the combinations have q's heads inside its rows, and no dlse: any two of the five choices meet.
    """
    case = Case(2, 4, 2, 5, 7, 8, 6)
    (q, k, v), dout, dlse = case.drawn(dtype)
    heads_inside = (dtype == torch.float64) ^ (offsets is None) ^ bool(dropout)
    if heads_inside:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    options = Options(0.5, True, 2, offsets, **dropout)
    out, lse, row_max, row_sum = torch.ops.pyattn.attention_forward(q, k, v, *options)
    for operator in (torch.ops.pyattn.attention_forward, torch.ops.pyattn.attention):
        torch.library.opcheck(operator, (q, k, v, *options))
    rows = dout, None if heads_inside else dlse.to(lse.dtype), q, k, v, out, row_max, row_sum
    torch.library.opcheck(torch.ops.pyattn.attention_backward, (*rows, *options))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("names", [(), ("bias",), ("alibi_slopes", "sinks", "relative_bias"), LEARNED])
def test_opcheck_of_masks_and_scores(dtype: torch.dtype, names: tuple[str, ...]) -> None:
    q, k, v = SCORES.inputs(dtype)
    options = MASKS | {"softcap": 1.5} | {name: x for name, x in score_tensors(dtype).items() if name in names}
    out, _, row_max, row_sum = torch.ops.pyattn.attention_forward(q, k, v, **options)
    torch.library.opcheck(torch.ops.pyattn.attention_forward, (q, k, v), options)
    for wanted in {False, bool(names)}:
        options["output_mask"] = [wanted and name in names for name in LEARNED]
        tensors = (torch.randn_like(out), None, q, k, v, out, row_max, row_sum)
        torch.library.opcheck(torch.ops.pyattn.attention_backward, tensors, options)
