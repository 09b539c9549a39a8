"""Promise: weights of selected keys, and sums of them, are those of the same mask, in time that follows the lists."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.assertions import assert_close, graph_of, refused
from support.cases import Case, memory_needed
from support.yardstick import learned
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from pyattn import attention, attention_weights, reference

CASES = [
    # case, lists (of 1, the KV heads or the query heads), entries, keys of an entry
    (Case(2, 4, 2, 9, 22, 8, 8), 1, 9, 1),
    (Case(1, 6, 2, 5, 33, 8, 8, q_offset=20, softcap=1.5), 2, 6, 3),
    (Case(2, 4, 2, 9, 30, 8, 8, window=(9, 3), causal=False, sinks=True), 4, 8, 1),
    (Case(2, 4, 1, 9, 30, 8, 8, key_ranges="pieces", dropout_p=0.4), 4, 3, 4),
    (Case(2, 4, 4, 9, 30, 8, 8, dropout_p=0.3, mask="random hk", alibi="bh"), 1, 12, 1),
    (Case(2, 4, 2, 9, 30, 8, 8, mask="random bq", bias="bands bhqk", alibi="h", sinks=True), 2, 20, 1),
    (Case(2, 4, 2, 9, 30, 8, 8, bias="float k", relative="h 4"), 4, 9, 1),
    (Case(2, 4, 2, 9, 30, 8, 8, bias="bands hqk strided", relative="b 5", wide=True), 1, 2, 7),
    (Case(2, 4, 2, 9, 30, 8, 8, bias="lowest q", relative="- 50", sinks=True), 2, 50, 1),
]
each_case = pytest.mark.parametrize(("case", "of", "entries", "block"), CASES, ids=str)
CHOSEN = {"heads": [3, 0], "rows": [-1, 2, 2, 1]}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyattn.weights.rows.PAIRS_AT_ONCE", 200)


def inputs(case: Case, of: int, entries: int, block: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """q, k, and options with lists in any order, with repetitions and -1."""
    q, k, _ = case.inputs(torch.float64)
    shape = (1 if case.sinks else case.batch, of, case.seqlen_q, entries)
    selected = torch.randint(-1, -(-case.seqlen_k // block), shape, dtype=torch.int32)
    return q, k, case.given(torch.float64) | {"selected": selected, "selected_block": block}


def masked(options: dict[str, Any], num_heads: int, seqlen_k: int) -> dict[str, Any]:
    """The options with a mask in place of the lists."""
    options = dict(options)
    selected, block = options.pop("selected"), options.pop("selected_block")
    mask = (selected.unsqueeze(-1) == torch.arange(seqlen_k) // block).any(-2)
    mask = mask.repeat_interleave(num_heads // selected.shape[1], 1)
    return options | {"mask": mask & options["mask"] if "mask" in options else mask}


def in_list_order(weights: Tensor, selected: Tensor, block: int) -> Tensor:
    """The weights (B, heads, rows, Sk) at the keys of the lists (B or 1, lists, rows, n), one by one."""
    batch, heads, rows, seqlen_k = weights.shape
    found = weights.new_zeros(batch, heads, rows, selected.shape[3] * block)
    for b, h, i in torch.ones(batch, heads, rows).nonzero().tolist():
        entries = selected[b % len(selected), h * selected.shape[1] // heads, i].tolist()
        keys = [entry * block + m if entry >= 0 else -1 for entry in entries for m in range(block)]
        for place, key in enumerate(keys):
            if 0 <= key < seqlen_k and key not in keys[:place]:
                found[b, h, i, place] = weights[b, h, i, key]
    return found


def expected(q: Tensor, k: Tensor, options: dict[str, Any], kind: Any) -> Tensor:
    mask = masked(options, q.shape[1], k.shape[2])
    if kind in ("queries", "entropy"):
        return attention_weights(q, k, reduce=kind, **mask)
    weights = in_list_order(attention_weights(q, k, **mask), options["selected"], options["selected_block"])
    return weights.sum(1) if kind == "heads" else weights


@each_case
@pytest.mark.parametrize("kind", [None, "queries", "heads", "entropy"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_those_of_the_mask(case: Case, of: int, entries: int, block: int, kind: Any, with_lse: bool) -> None:
    q, k, options = inputs(case, of, entries, block)
    lse = None
    if with_lse:
        lse = reference.attention(q, k, k, return_lse=True, **masked(options, q.shape[1], k.shape[2]))[1]
    if kind == "heads" and of > 1:
        with refused(ValueError, 'reduce="heads" must come with lists that all heads share, since weights are '):
            attention_weights(q, k, lse=lse, reduce=kind, **options)
        return
    found = attention_weights(q, k, lse=lse, reduce=kind, **options)
    close = 1e-6 if case.wide else 1e-12
    assert_close(found, expected(q, k, options, kind), close)
    if kind is None:
        some = attention_weights(q, k, lse=lse, **CHOSEN, **options)
        assert_close(some, found[:, CHOSEN["heads"]][:, :, CHOSEN["rows"]], close)
    elif kind == "queries":
        parts = [attention_weights(q, k, lse=lse, reduce=kind, rows=rows, **options) for rows in ([0, 3], [1, 2])]
        whole = attention_weights(q, k, lse=lse, reduce=kind, rows=range(4), **options)
        assert_close(sum(parts), whole, close)


@each_case
@pytest.mark.parametrize("kind", [None, "queries", "heads", "entropy"])
def test_gradcheck(case: Case, of: int, entries: int, block: int, kind: Any) -> None:
    if kind == "heads" and of > 1:
        return
    q, k, options = inputs(replace(case, head_dim=2), of, entries, block)
    names = learned(options)
    leaves = [t.double().detach().requires_grad_() for t in (q, k, *(options[name] for name in names))]

    def call(q: Tensor, k: Tensor, *tensors: Tensor) -> Tensor:
        return attention_weights(q, k, reduce=kind, **options | dict(zip(names, tensors, strict=True)))

    assert gradcheck(call, leaves, fast_mode=True)
    if case in (CASES[1][0], CASES[5][0]):
        assert gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("kind", [None, "queries", "heads", "entropy"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_keys_that_are_not_listed_have_no_effect(kind: Any, bad: float) -> None:
    """Non-finite keys that are listed arrive where their query sees them."""
    q, k, _ = Case(1, 4, 2, 6, 40, 4, 4).inputs(torch.float64)
    selected = torch.randint(0, 20, (1, 1, 6, 8))
    dirty = k.clone()
    dirty[:, :, 20:] = bad
    results = []
    for keys in (k, dirty):
        leaves = [q.clone().requires_grad_(), keys.clone().requires_grad_()]
        found = attention_weights(*leaves, causal=False, selected=selected, reduce=kind)
        results.append((found.detach(), *torch.autograd.grad(found.sin().sum(), leaves)))
    for clean, other in zip(*results, strict=True):
        assert torch.equal(clean, other)
    dirty[:, :, selected[0, 0, 2, 0]] = math.nan
    weights = attention_weights(q, dirty, causal=False, selected=selected)
    first = (selected[0, 0, 2] == selected[0, 0, 2].unsqueeze(-1)).tril(-1).any(-1).logical_not()
    assert torch.equal(weights[0, :, 2].isnan(), first.expand(4, 8))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "entries"), [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("heads", [0, 4])
def test_empty(seqlen_q: int, seqlen_k: int, entries: int, heads: int) -> None:
    case = Case(2, heads, heads // 2, seqlen_q, seqlen_k, 16, 16)
    q, k, _ = case.inputs(torch.bfloat16)
    selected = torch.full((1, 1, seqlen_q, entries), -1)
    options = {"bias": torch.randn(1, heads, seqlen_q, seqlen_k), "sinks": torch.zeros(heads), "selected": selected}
    for kind, shape in (
        (None, (2, heads, seqlen_q, entries)),
        ("queries", (2, heads, seqlen_k)),
        ("heads", (2, seqlen_q, entries)),
        ("entropy", (2, heads, seqlen_q)),
    ):
        found = attention_weights(q, k, reduce=kind, **options)
        assert found.shape == shape
        assert found.dtype == (torch.bfloat16 if kind is None else torch.float32)
        assert not found.any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("entry", "block", "rule"),
    [
        (9, 1, "selected must hold keys from 0 to 8, or -1 for none, got 9"),
        (-2, 1, "selected must hold keys from 0 to 8, or -1 for none, got -2"),
        (3, 4, "selected must hold blocks of keys from 0 to 2, or -1 for none, got 3"),
        (1, 100, "selected must hold blocks of keys from 0 to 0, or -1 for none, got 1"),
    ],
)
def test_entries_that_name_no_key_are_refused(dtype: torch.dtype, entry: int, block: int, rule: str) -> None:
    """As attention refuses them."""
    q, k, v = Case(2, 4, 2, 5, 9, 8, 8).inputs(torch.float32)
    selected = torch.zeros(2, 2, 5, 3, dtype=dtype)
    selected[1, 0, 4, 2] = entry
    for call in (partial(attention_weights, q, k), partial(attention, q, k, v)):
        with refused(ValueError, f"{rule} in entry 2 of query 4, sequence 1, list 0"):
            call(selected=selected, selected_block=block)


@pytest.mark.parametrize("kind", [None, "queries", "heads", "entropy"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
def test_compiled_and_transformed(kind: Any) -> None:
    q, k, options = inputs(*CASES[7])
    call = partial(attention_weights, reduce=kind, **options)
    leaf = q.clone().requires_grad_()
    wanted = torch.autograd.grad(call(leaf, k).sin().sum(), leaf)[0]
    compiled = graph_of(call)(leaf, k)
    assert_close(compiled, call(q, k))
    assert_close(torch.autograd.grad(compiled.sin().sum(), leaf)[0], wanted)
    assert_close(torch.func.grad(lambda q: call(q, k).sin().sum())(q), wanted)
    assert_close(torch.vmap(call, (0, None))(torch.stack([q, q.sin()]), k)[1], call(q.sin(), k))
    many = torch.stack([options["selected"], options["selected"].flip(-2)])
    each = torch.vmap(lambda selected: call(q, k, selected=selected))(many)
    assert_close(each[1], call(q, k, selected=many[1]))
    traced = torch.jit.trace(lambda q: call(q, k), q)
    assert_close(traced(q.sin()), call(q.sin(), k))


def test_memory_follows_the_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads' weights of the listed keys would take 128 MB, those of all keys 4 GB."""
    monkeypatch.undo()
    q, k = torch.randn(1, 16, 8192, 16), torch.randn(1, 1, 8192, 16)
    selected = torch.randint(0, 8192, (1, 1, 8192, 256), dtype=torch.int32)

    def summed() -> Tensor:
        return attention_weights(q, k, selected=selected, reduce="heads")

    summed()
    assert memory_needed(summed) < 96 * 2**20
