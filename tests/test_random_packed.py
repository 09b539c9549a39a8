"""Random packed sequences, dtypes and instruction sets against float64, by the rule of yardstick.py; and in pages.

``pytest tests/test_random_packed.py --examples 20000`` draws so many anew; without it 200, the same each time.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import DTYPES, Truth, assert_accurate_by, assert_equal
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from packed_cases import Unpadded
from test_random import cases
from test_varlen_pages import Paged

from pyattn import _C, attention_varlen


@pytest.mark.usefixtures("threads")
def test_accuracy(request: pytest.FixtureRequest) -> None:
    """Each sequence gets what it gets in a padded batch, and of keys in pages the same bits."""
    torch.set_num_threads(1)
    examples = request.config.getoption("examples")

    @settings(
        max_examples=examples or 200,
        derandomize=not examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        case = replace(data.draw(cases()), bias="", batch=data.draw(st.integers(1, 5)))
        queries, keys = (
            data.draw(st.lists(st.integers(0, n), min_size=case.batch, max_size=case.batch))
            for n in (case.seqlen_q, case.seqlen_k)
        )
        dtype = data.draw(st.sampled_from(DTYPES))
        _C.set_isa(data.draw(st.sampled_from(_C.available_isas())))
        torch.manual_seed(data.draw(st.integers(0, 2**32)))
        page_size = data.draw(st.integers(16, 100))
        unpadded = Unpadded(case, queries, keys)
        dout, dlse = case.gradients(dtype)
        dlse = dlse.masked_fill(~unpadded.is_query[:, None], 0.0)
        q_offset = unpadded.offset if case.q_offset is None else case.q_offset
        options = case.options | case.tensors(dtype) | {"q_offset": q_offset, "key_ranges": unpadded.ranges}
        assert_accurate_by(
            Truth((case.inputs(dtype), (dout, dlse)), options), partial(unpadded.attend, attention_varlen)
        )

        paged = Paged(unpadded.packed, page_size)
        qkv = unpadded.packed.inputs(dtype, case.head_dim, case.head_dim_v)
        options |= {"q_offset": case.q_offset, "key_ranges": unpadded.ranges[unpadded.is_query], "return_lse": True}
        packing = unpadded.packed.packing
        whole = attention_varlen(*qkv, *packing, **options)
        parts = attention_varlen(
            qkv[0], paged.of(qkv[1]), paged.of(qkv[2]), *packing, **options, block_table=paged.table
        )
        assert_equal(parts, whole)

    before = _C.active_isa()
    try:
        check()
    finally:
        _C.set_isa(before)
