"""Promise: every operator agrees with its schema, fake kernel and derivatives, by torch.library.opcheck's full set."""

from typing import Any

import pytest
import torch
from derivatives.calls import MASKS, SCORES, score_tensors
from helpers import Case
from torch import Tensor

from pyattn.options import Options


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offsets", [None, torch.tensor([1, -2])], ids=["offset", "offsets"])
@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.3, "dropout_seed": torch.tensor(5)}], ids=["", "dropout"])
def test_opcheck(dtype: torch.dtype, offsets: Tensor | None, dropout: dict[str, Any]) -> None:
    """Results match the schemas and fake tensors, whether or not lse has q's dtype."""
    case = Case(2, 4, 2, 5, 7, 8, 6)
    (q, k, v), dout, dlse = case.drawn(dtype)
    options = Options(0.5, True, 2, offsets, **dropout)
    out, lse, row_max, row_sum = torch.ops.pyattn.attention_forward(q, k, v, *options)
    torch.library.opcheck(torch.ops.pyattn.attention_forward, (q, k, v, *options))
    heads_inside = q.transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(torch.ops.pyattn.attention_forward, (heads_inside, k, v, *options))
    dlse = dlse.to(lse.dtype)
    torch.library.opcheck(torch.ops.pyattn.attention_backward, (dout, dlse, q, k, v, out, row_max, row_sum, *options))
    torch.library.opcheck(torch.ops.pyattn.attention_backward, (dout, None, q, k, v, out, row_max, row_sum, *options))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("names", [(), ("bias",), ("alibi_slopes", "sinks"), ("bias", "alibi_slopes", "sinks")])
def test_opcheck_of_masks_and_scores(dtype: torch.dtype, names: tuple[str, ...]) -> None:
    q, k, v = SCORES.inputs(dtype)
    options = MASKS | {"softcap": 1.5} | {name: x for name, x in score_tensors(dtype).items() if name in names}
    out, _, row_max, row_sum = torch.ops.pyattn.attention_forward(q, k, v, **options)
    torch.library.opcheck(torch.ops.pyattn.attention_forward, (q, k, v), options)
    for wanted in (False, True):
        options["output_mask"] = [wanted and name in names for name in ("bias", "alibi_slopes", "sinks")]
        tensors = (torch.randn_like(out), None, q, k, v, out, row_max, row_sum)
        torch.library.opcheck(torch.ops.pyattn.attention_backward, tensors, options)
