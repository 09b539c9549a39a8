"""Promise: the operations that a mask leaves are counted from the reference's visible pairs, for torch too."""

import pytest
import torch
from support.cases import Case
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from pyattn import attention, ops, reference
from pyattn.ops import pair_counts, visible_pairs
from pyattn.ops.flops import flops
from pyattn.options import Options
from pyattn.options.call import Call

FAR = 2**63 - 1
OFFSETS = [None, -90, -3, 0, 2, 4, 90, FAR, -FAR, torch.tensor([0, -2]), torch.tensor([FAR, 3])]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_offset", OFFSETS, ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (5, 9), (9, 5), (4, 0)])
def test_pairs_are_those_that_the_reference_sees(seqlen_q: int, seqlen_k: int, q_offset, causal: bool) -> None:
    q, k = torch.randn(2, 4, seqlen_q, 3), torch.randn(2, 2, seqlen_k, 3)
    ranges = torch.randint(seqlen_k + 1, (2, seqlen_q, 2)).sort(-1).values
    row, column = torch.rand(2, 1, seqlen_q, 1) < 0.5, torch.randn(4, 1, seqlen_k)
    column = column.masked_fill(column < -0.5, -torch.inf)
    for window in [(-1, -1), (2, -1), (-1, 1), (0, 0), (3, 2), (FAR, FAR), (FAR, 0)]:
        hidden = [(None, None), (row, None), (None, column), (row, column)]
        for key_ranges, (pairs, bias) in [
            (ranges, hidden[0]),
            (ranges[1:], hidden[2]),
            *((None, both) for both in hidden),
        ]:
            mask = {"causal": causal, "q_offset": q_offset, "window": window, "key_ranges": key_ranges}
            seen = reference.visible(seqlen_q, seqlen_k, **mask).expand(2, 4, seqlen_q, seqlen_k)
            seen = seen if pairs is None else seen & pairs
            seen = seen if bias is None else seen & (bias != -torch.inf)
            offsets = {"q_offsets": mask.pop("q_offset")} if isinstance(q_offset, torch.Tensor) else {}
            options = Options(**mask, **offsets, mask=pairs, bias=bias)
            assert pair_counts.pairs(Call(q, k, k, options)) == seen.sum()
            rows = torch.arange(seqlen_q)
            found = visible_pairs.visible(options, rows, seqlen_q, seqlen_k, seen.shape[1])
            assert torch.equal(found.expand_as(seen), seen)


def test_pairs_are_counted_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    q, mask = torch.randn(2, 4, 9, 3), torch.rand(2, 1, 9, 9) < 0.5
    whole = pair_counts.pairs(Call(q, q, q, Options(mask=mask)))
    monkeypatch.setattr(pair_counts, "PAIRS_AT_ONCE", 150)
    assert pair_counts.pairs(Call(q, q, q, Options(mask=mask))) == whole == 4 * mask.tril().sum()


def test_masks_without_values_count_all_pairs() -> None:
    q, k, v = Case(2, 4, 2, 6, 9, 16, 24).inputs(torch.float32)
    for mask in ({"bias": torch.zeros(6, 9)}, {"key_ranges": torch.zeros(1, 6, 2, dtype=torch.int64)}):
        with FakeTensorMode():
            fake = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in mask.items()}
        assert flops(ops.attention_forward, q, k, v, **fake) == 2 * (2 * 4 * 6 * 9) * (16 + 24)
        assert flops(ops.attention_forward, q, k, v, window=(2, 0), **fake) == 2 * (2 * 4 * 6 * 9) * (16 + 24)


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 2 * 4 * (6 * 7 // 2 + 6 * 3)),
        ({"causal": False}, 2 * 4 * 6 * 9),
        ({"q_offset": 0, "dropout_p": 0.1}, 2 * 4 * 6 * 7 // 2),
        ({"q_offset": torch.tensor([0, 9])}, 4 * (6 * 7 // 2 + 6 * 9)),
    ],
)
def test_torch_counts_what_the_mask_leaves(options: dict, pairs: int) -> None:
    qkv = tuple(t.requires_grad_() for t in Case(2, 4, 2, 6, 9, 16, 24).inputs(torch.float32))
    with FlopCounterMode(display=False) as counter:
        attention(*qkv, **options).sum().backward()
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert counts["pyattn.attention_forward"] == 2 * pairs * (16 + 24)
    assert counts["pyattn.attention_backward"] == 2 * pairs * (3 * 16 + 2 * 24)
