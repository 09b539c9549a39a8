"""Promise: random packed sequences, dtypes and instruction sets, also in pages, meet the rule of yardstick.py.

``pytest tests/varlen/test_random.py --examples 20000`` draws that many new cases; without it, the same 200 each time.
"""

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from attention.test_random import drawn_case
from support import case_options
from support.assertions import check_examples
from support.cases import DTYPES, assert_equal, seeded
from support.packed import Unpadded
from varlen.test_pages import Paged

import pyattn
from pyattn import attention_varlen


def laid_out_anew(draw: Random, x: Any) -> Any:
    """An integer tensor unchanged, in int32, or with other strides; anything else unchanged."""
    if not isinstance(x, torch.Tensor):
        return x
    x = x.int() if x.dim() > 1 and draw.random() < 0.5 else x  # offsets and cumulative lengths may need all 64 bits
    transposed = x.mT.contiguous().mT if x.dim() > 1 else x.repeat(2)[: len(x)]
    return draw.choice([x, case_options.strided(x), transposed])


@pytest.mark.usefixtures("threads")
def test_accuracy(request: pytest.FixtureRequest) -> None:
    """Each sequence equals the same in a padded batch, and has the same bits with keys in pages."""
    torch.set_num_threads(1)

    def check(draw: Random) -> None:
        case = replace(drawn_case(draw), bias="", batch=draw.randint(1, 5))
        queries, keys = ([draw.randint(0, n) for _ in range(case.batch)] for n in (case.seqlen_q, case.seqlen_k))
        dtype = draw.choice(DTYPES)
        pyattn.set_isa(draw.choice(pyattn.isas()))
        seeded(draw.getrandbits(32))
        page_size = draw.randint(16, 100)
        unpadded = Unpadded(case, queries, keys)
        truth = unpadded.truth(dtype)
        truth.assert_allows(partial(unpadded.attend, attention_varlen))

        paged = Paged(unpadded.packed, page_size)
        q, k, v = unpadded.packed.inputs(dtype, case.head_dim, case.head_dim_v)
        options = truth.options | {
            "q_offset": case.q_offset,
            "key_ranges": unpadded.ranges[unpadded.is_query],
            "return_lse": True,
        }
        if draw.random() < 0.5:
            options["q_offset"] = torch.tensor([case.q_offset or n for n in unpadded.offset.tolist()])
        used = torch.tensor([draw.randint(0, n) for n in keys]) if draw.random() < 0.5 else None
        options["key_ranges"] = options["key_ranges"].clamp(max=min(keys if used is None else used.tolist()))
        packing = unpadded.packed.packing
        whole = attention_varlen(q, k, v, *packing, seqused_k=used, **options)
        learned = q.clone().requires_grad_(draw.random() < 0.5)  # pages are copied if a gradient is needed
        changed = [laid_out_anew(draw, x) for x in (*packing[:2], paged.table, used)]
        options |= {name: laid_out_anew(draw, options[name]) for name in ("q_offset", "key_ranges")}
        parts = attention_varlen(
            learned,
            paged.of(k),
            paged.of(v),
            *changed[:2],
            *packing[2:],
            block_table=changed[2],
            seqused_k=changed[3],
            **options,
        )
        assert_equal(parts, whole)

    check_examples(request, 200, check)
