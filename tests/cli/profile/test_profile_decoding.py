"""Promise: a profile of decoding shows its phases, and how fast it reads the keys and values that its queries see."""

import re
from types import SimpleNamespace

import pytest
import torch
from support.cases import Case

from pyattn import reference
from pyattn.cli.profile import command, report


@pytest.mark.parametrize("mask", [{}, {"window": (70, 0)}, {"mask": True}, {"key_ranges": True, "causal": False}])
@pytest.mark.parametrize("seqlen_q", [1, 3, 300])
def test_bytes_are_those_of_keys_that_any_query_of_their_group_sees(monkeypatch, mask, seqlen_q):
    monkeypatch.setattr(report, "ROWS", 7)
    case = Case(2, 6, 2, seqlen_q, 300, 16, 24)
    q, k, v = case.inputs(torch.bfloat16)
    tensors = {"mask": torch.rand(6, 1, 300) < 0.3, "key_ranges": torch.randint(301, (2, seqlen_q, 2)).sort(-1).values}
    mask = {name: tensors[name] if value is True else value for name, value in mask.items()}
    pairs = mask.get("mask", torch.ones(1, dtype=torch.bool))
    seen = reference.visible(seqlen_q, 300, **{n: t for n, t in mask.items() if n != "mask"}) & pairs
    keys = seen.expand(2, 6, seqlen_q, 300).unflatten(1, (2, 3)).any(3).any(2).sum()
    assert report.bytes_seen(q, k, v, **mask) == keys * (16 + 24) * 2


def test_run_of_decoding(shown, monkeypatch):
    """The phases of few queries, and the read rate of keys and values in a call and in torch.sum."""
    monkeypatch.setattr(command, "SECONDS", 0.1)  # short phases are shown where they are a thousandth of the time
    times = {"attention": SimpleNamespace(seconds=1e-3, speedup=2.0), "torch.sum": SimpleNamespace(seconds=2e-3)}
    monkeypatch.setattr(report, "in_turn", lambda calls, base, *rest: [call() for call in calls.values()] and times)
    options = "--shapes 1x8x3000x16 --num-heads-kv 2 --queries 1 --window 1999 0 --mask --documents 1000 --threads 1"
    printed = shown(f"profile {options} --full").out
    for phase in ("pack", "S = Q K^T", "softmax", "O = P V"):
        assert f"  {phase} " in printed
    assert "backward" not in printed
    whole = 2 * 2 * 3000 * 16 * 4
    line = next(line for line in printed.splitlines() if line.startswith("K and V"))
    found = re.fullmatch(r"K and V: (.*) MB a call, (.*) GB/s, (.*)% of the (.*) GB/s of torch.sum", line)
    seen, rate, share, theirs = map(float, found.groups())
    assert 0 < seen < whole / 3 / 1e6  # one document without the keys that the bias hides
    assert rate == pytest.approx(seen, abs=0.1)
    assert share == pytest.approx(200 * seen * 1e6 / whole, abs=10)
    assert theirs == pytest.approx(whole / 2e-3 / 1e9, abs=0.1)


def test_a_whole_cache_is_read_by_one_query(shown):
    printed = shown("profile --shapes 1x2x5000x64 --queries 1 --threads 1").out
    assert "K and V: 5.1 MB a call, " in printed
    assert report.EXPLAINED["merge_out"] in printed
