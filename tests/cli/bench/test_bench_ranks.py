"""Promise: ranks are timed beside one process at equal computations, and send the bytes of the formula, no more."""

import json
import math
import os
import random
import signal

import pytest
import torch
import torch.distributed as dist
from support import traffic
from support.assertions import assert_close

import pyattn
from pyattn.cli.bench import command, comparisons, processes
from pyattn.cli.bench.sides import ring as rings
from pyattn.distributed import shard
from pyattn.distributed.agreement.ranks import Ranks
from pyattn.distributed.layout import tokens_of

RANKS = 2
TINY = {
    "causal": traffic.Case(46),
    "window": traffic.Case(64, window=5),
    "GQA": traffic.Case(40, heads_kv=1),
    "packed": traffic.Case(48, lengths=(20, 3, 25)),
    "packed, each cut": traffic.Case(48, lengths=(20, 3, 25), layout="zigzag_varlen"),
}


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(comparisons, "SEQLENS", (48, 96))
    monkeypatch.setattr(rings, "LONGEST_GATHERED", 48)
    monkeypatch.setattr(command, "QUICK_SECONDS", math.inf)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("quick", [True, False])
def test_run(quick, shown, tmp_path):
    options = f"bench --only distributed --dtype float32 --threads {RANKS} --out {tmp_path}"
    printed = shown(f"{options} --quick" if quick else options).out
    assert f"speed-ups over {rings.BASE}" in printed
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    ring, gathered = rings.FUNCTIONS
    lengths = {48: [rings.BASE, ring, gathered]} | ({} if quick else {96: [rings.BASE, ring]})
    timed = [(f"distributed, {n} positions, float32", side) for n, sides in lengths.items() for side in sides]
    assert [(row["what"], row["side"]) for row in results if "forward" in row] == timed
    assert len(results) == len(timed)
    for row in results:
        assert row["forward_backward"]["seconds"] > row["forward"]["seconds"] / 10
        assert row["peak_bytes"] >= 0
        assert row["side"] in printed


@pytest.mark.parametrize("case", TINY.values(), ids=TINY)
def test_counted_bytes_are_those_of_the_formula(case):
    assert processes.team_of(RANKS).run(traffic.sent, case) == case.formula(RANKS)


def test_ctrl_c_is_left_to_the_command():
    """As in test_against.py."""
    team = processes.team_of(RANKS)
    ranks = team.run(os.getpid)
    for rank in ranks:
        os.kill(rank, signal.SIGINT)
    assert team.run(os.getpid) == ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_formula_of_a_causal_zigzag(ranks):
    """The early chunks go to all others, the late chunk of rank r to the r ranks before it, by the shorter way."""
    case = traffic.Case(2 * ranks * 10)
    chunk = 2 * 10 * case.heads_kv * traffic.HEAD_DIM * 4
    early = ranks * (ranks - 1)
    late = sum(range(ranks))
    forward, backward = map(sum, zip(*case.formula(ranks), strict=True))
    assert (forward, backward) == ((early + late) * chunk, 2 * (early + late) * chunk)


@pytest.mark.parametrize("case", TINY.values(), ids=TINY)
def test_pairs_are_those_that_some_query_sees(case):
    lengths = case.lengths or (case.seqlen,)
    seen = torch.block_diag(*(torch.ones(n, n).tril() for n in lengths))
    seen = seen.triu(1 - case.window) if case.window else seen
    begins = torch.tensor([0, *lengths]).cumsum(0) if case.layout == "zigzag_varlen" else None
    held = tokens_of(case.seqlen, Ranks(None, 3, 0), case.layout, begins)
    assert case.pairs(3) == [sum(int(seen[c.start : c.stop].sum()) for c in rows) for rows in held]


def test_zigzag_shares_a_causal_mask_within_three_percent():
    pairs = traffic.CASES["causal"].pairs(8)
    assert max(pairs) <= 1.03 * sum(pairs) / len(pairs)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zigzag_varlen_shares_packed_sequences_within_three_percent(ranks):
    """The bench's documents and twenty random packings, of short documents too: pairs, and tokens but for one."""
    draw = random.Random(ranks)
    drawn = [[draw.randint(1, 40) for _ in range(200)] + [draw.randint(200, 1500) for _ in range(8)] for _ in range(20)]
    for lengths in (traffic.DOCUMENTS, [8] * 100, *drawn):
        case = traffic.Case(sum(lengths), lengths=tuple(lengths), layout="zigzag_varlen")
        pairs = case.pairs(ranks)
        assert max(pairs) <= 1.03 * sum(pairs) / ranks
        held = [sum(map(len, chunks)) for chunks in case.cut(ranks)[0]]
        assert max(held) <= min(held) + 1


def gathered() -> list[torch.Tensor]:
    """out and gradients of the all-gather on this rank, and those of one process."""
    torch.manual_seed(0)
    *qkv, dout = torch.randn(4, 1, 2, 24, 8, dtype=torch.float64).unbind()

    def found(function, *tensors):
        leaves = [t.detach().requires_grad_() for t in tensors[:3]]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]

    whole = [shard(t, 2, layout="contiguous") for t in found(pyattn.attention, *qkv, dout)]
    return [found(rings.gathered, *(shard(t, 2, layout="contiguous") for t in (*qkv, dout))), whole]


def test_the_all_gather_computes_the_same():
    for found, expected in processes.team_of(RANKS).run(gathered):
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours, theirs)


def failing() -> None:
    """Rank 1 raises while the others wait for it."""
    if dist.get_rank() == 1:
        raise ArithmeticError("one rank's own")
    dist.barrier()


def test_an_error_of_one_rank_is_raised():
    with pytest.raises(RuntimeError, match="rank 1: ArithmeticError: one rank's own"):
        processes.team_of(RANKS).run(failing)
    assert processes.team_of(RANKS).run(dist.get_rank) == [0, 1]


# Bad input


def test_what_ranks_need(refusal, monkeypatch, small_gpu):
    message = "--threads, the number of ranks, must be at least 2 with --only distributed, got 1"
    assert refusal("bench --only distributed --threads 1") == message
    assert refusal("bench --only distributed --device cuda") == "--device must be cpu with --only distributed, got cuda"
    monkeypatch.setattr(dist, "is_available", lambda: False)
    message = f"--only distributed needs torch.distributed, got torch {torch.__version__} without it"
    assert refusal("bench --only distributed --threads 2") == message
