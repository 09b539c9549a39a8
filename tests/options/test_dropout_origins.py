"""Promise: with dropout_origins, an operator drops the weights that the larger call drops there, to the bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest import mock

import emulated
import pytest
import torch
from attention.test_backward_in_parts import by_parts
from support.assertions import Refusals, assert_close, each_refusal, refused
from support.backends import Backend
from support.cases import DTYPES, Case, Truth, alternate, assert_case_accurate, assert_equal, each_dtype, seeded
from torch import Tensor

from pyattn import dropout_mask, reference
from pyattn.derivatives import autograd
from pyattn.derivatives.packed_tangents import PACKED
from pyattn.derivatives.tangents import DENSE
from pyattn.options import Options, Packing
from pyattn.options.dropout import kept_weights
from pyattn.reference import formula

ops = torch.ops.pyattn
SEED, P = 0x0123456789ABCDEF, 0.4
WHOLE = 5, 7, 60, 470
"""Sequences, heads, queries and keys of the larger call."""

Rows = Sequence[tuple[int, int, int, int, int]]


def attend(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of attention with dropout_origins, which only the operators take; differentiable."""
    options |= {"dropout_seed": torch.tensor(options.get("dropout_seed", SEED)), "dropout_p": P}
    if backend.family == "emulated":
        options |= {"deterministic": backend.repeatable, "return_lse": True}
        results: tuple[Tensor, Tensor]
        results = emulated.attention(q, k, v, **options | ({} if packing is None else {"packing": packing}))
        return results
    kind = DENSE if packing is None else PACKED
    return autograd.attend(kind, q, k, v, (*(packing or ()), *Options(**options)))[:2]


@cache
def whole_mask(device: torch.device) -> Tensor:
    return dropout_mask(torch.tensor(SEED, device=device), *WHOLE, P)


def drawn_as(rows: Rows, batch: int) -> Rows:
    """The row of each sequence."""
    return rows if len(rows) > 1 else [(rows[0][0] + b, *rows[0][1:]) for b in range(batch)]


def kept_by(rows: Rows, batch: int, num_heads_q: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The mask of a call, cut from that of the larger one."""
    mask, all_heads = whole_mask(torch.get_default_device()), WHOLE[1]
    cuts = []
    for sequence, heads, h, i, j in drawn_as(rows, batch):
        assert heads == all_heads
        cuts.append(mask[sequence, h : h + num_heads_q, i : i + seqlen_q, j : j + seqlen_k])
        assert cuts[-1].shape == (num_heads_q, seqlen_q, seqlen_k)
    return torch.stack(cuts)


PLACES: dict[str, Rows] = {
    "first": [(0, 7, 0, 0, 0)],
    "key 3": [(1, 7, 2, 5, 3)],
    "key 8": [(3, 7, 3, 40, 8)],
    "key 13": [(0, 7, 1, 9, 13)],
    "own": [(3, 7, 0, 4, 15), (1, 7, 3, 0, 8)],
}
OWN = torch.tensor(PLACES["own"])
DROPOUT = {"dropout_p": P, "dropout_seed": torch.tensor(SEED)}
each_place = pytest.mark.parametrize("place", PLACES)


def assert_kept(backend: Backend, dtype: torch.dtype, rows: Rows, sizes: tuple[int, ...], kept: Tensor) -> None:
    """With equal scores and values 1 at one key, out shows each row's weights, and dv each key's."""
    b, h, group, sq, sk = sizes
    q, k = torch.zeros(b, h * group, sq, 8, dtype=dtype), torch.zeros(b, h, sk, 8, dtype=dtype)
    v = torch.eye(sk, dtype=dtype).expand(b, h, sk, sk).clone().requires_grad_()
    out, _ = attend(backend, q, k, v, causal=False, dropout_origins=torch.tensor(rows))
    assert torch.equal(out != 0, kept)
    for head in range(group):
        dout = torch.zeros_like(out)
        dout[:, head::group] = torch.eye(sq, sk, dtype=dtype)
        (dv,) = torch.autograd.grad(out, v, dout, retain_graph=True)
        assert torch.equal(dv[..., :sq] != 0, kept[:, head::group].mT)


def sizes_for(backend: Backend) -> tuple[int, int, int, int, int]:
    """Sequences, KV heads, query heads of each, queries and keys."""
    return (2, 1, 2, 11, 70) if backend.family == "emulated" else (2, 2, 2, 19, 203)


@each_place
@each_dtype
def test_mask_is_cut_from_the_larger_one(repeatable: Backend, dtype: torch.dtype, place: str) -> None:
    b, h, group, sq, sk = sizes = sizes_for(repeatable)
    assert_kept(repeatable, dtype, PLACES[place], sizes, kept_by(PLACES[place], b, h * group, sq, sk))


@each_dtype
def test_origins_far_away(repeatable: Backend, dtype: torch.dtype) -> None:
    """The counter of heads takes 64 bits, those of queries and groups of keys 32 each."""
    _, h, group, sq, sk = sizes = sizes_for(repeatable)
    rows = [(2**31 - 1, 5, 1, 2**31, 2**34 + 5), (2**40, 2**20, 3, 7, 2)]
    sequence, heads, head, query, key = torch.tensor(rows)[:, None, None].unbind(-1)
    index = sequence * heads + head + torch.arange(h * group)[:, None]
    assert index.min() >= 2**32
    kept = kept_weights(SEED, index, query + torch.arange(sq), key, sk, P)
    assert_kept(repeatable, dtype, rows, sizes, kept)


@each_place
def test_kept_weights_are_cut_from_the_larger_mask(place: str) -> None:
    origins = Options(dropout_origins=torch.tensor(PLACES[place])).origins_for(2, 3, torch.device("cpu"))
    assert origins.tolist() == [list(row) for row in drawn_as(PLACES[place], 2)]
    sequence, heads, head, query, key = origins[:, None, None].unbind(-1)
    index = sequence * heads + head + torch.arange(3)[:, None]
    kept = kept_weights(SEED, index, query + torch.arange(9), key, 22, P)
    assert torch.equal(kept, kept_by(PLACES[place], 2, 3, 9, 22))


CASES = [
    Case(2, 4, 2, 33, 90, 24, 20, dropout_p=P),
    Case(2, 4, 2, 1, 230, 16, 16, dropout_p=P),
    Case(1, 3, 1, 3, 450, 64, 24, causal=False, dropout_p=P),
    Case(1, 1, 1, 40, 440, 8, 8, dropout_p=P),
    Case(2, 2, 2, 20, 60, 21, 40, window=(30, 2), sinks=True, alibi="bh", dropout_p=P),
    Case(2, 4, 2, 33, 45, 16, 16, softcap=3.0, mask="random bhqk", bias="float hk", dropout_p=P),
]


@pytest.mark.parametrize(("case", "own", "dtype"), alternate(CASES, [False, True], DTYPES), ids=str)
def test_accuracy(repeatable: Backend, case: Case, dtype: torch.dtype, own: bool) -> None:
    """Every result, forward and backward, against the reference with the larger call's mask."""
    rows = [(3 - 2 * b, 7, b, 4 * b, 15 - 7 * b) for b in range(case.batch if own else 1)]
    kept = kept_by(rows, case.batch, case.num_heads_q, case.seqlen_q, case.seqlen_k)
    seeded(0)
    with mock.patch.object(formula, "dropout_mask", return_value=kept):
        truth = Truth(case.drawn(dtype), case.given(dtype))
        truth.assert_allows(without_flag(partial(attend, repeatable, dropout_origins=torch.tensor(rows))))


def without_flag(call: Any) -> Any:
    """``call``, which always returns lse."""
    return lambda *tensors, return_lse, **options: call(*tensors, **options)


@dataclass(frozen=True)
class Ranks:
    """A backend for ranks that each hold a part of the keys, from ``q_offset`` of the whole minus their own on."""

    backend: Backend
    q_offset: int

    def _options(self, q: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        begin = self.q_offset - options["q_offset"]
        return options | {"dropout_origins": torch.tensor([[0, q.shape[1], 0, 0, begin]], device=q.device)}

    def attention(self, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, **options: Any) -> Any:
        return attend(self.backend, q, k, v, **self._options(q, options))

    def attention_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rows: Any, dlse: Tensor | None, **options: Any
    ) -> Any:
        seed = torch.tensor(options["dropout_seed"], device=q.device)
        options = self._options(q, options) | {"dropout_seed": seed}
        if self.backend.family == "emulated":
            options |= {"deterministic": self.backend.repeatable, "dlse": dlse}
            return emulated.attention_backward(dout, q, k, v, out, rows, **options)
        wanted = [False] * 4
        return ops.attention_backward(dout, dlse, q, k, v, out, *rows, *Options(**options), True, wanted, True)


@each_dtype
@pytest.mark.parametrize("case", [CASES[0], Case(1, 2, 1, 20, 60, 16, 16, causal=False, dropout_p=P)], ids=str)
def test_parts_of_the_keys_add_up_to_the_whole(repeatable: Backend, case: Case, dtype: torch.dtype) -> None:
    ranks: Any = Ranks(repeatable, case.seqlen_k - case.seqlen_q)
    assert_case_accurate(case, dtype, by_parts(ranks, 4))


LENGTHS = [10, 0, 17], [40, 5, 33]
PACKING = Packing(*(torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()]) for n in LENGTHS), 17, 40)


@each_dtype
@pytest.mark.parametrize("place", ["key 3", "own"])
def test_packed_sequences(repeatable: Backend, dtype: torch.dtype, place: str) -> None:
    rows = PLACES["key 3"] if place == "key 3" else [*PLACES["own"], (2, 7, 1, 3, 13)]
    packing = Packing(*(t.to(torch.get_default_device()) for t in PACKING[:2]), *PACKING[2:4])
    q, k = torch.zeros(27, 4, 8, dtype=dtype), torch.zeros(78, 2, 8, dtype=dtype)
    one_hot_q, one_hot_k = (torch.cat([torch.eye(40, dtype=dtype)[:n] for n in lengths]) for lengths in LENGTHS)
    v = one_hot_k[:, None].repeat(1, 2, 1).requires_grad_()
    origins = torch.tensor(rows)
    out, _ = attend(repeatable, q, k, v, packing, causal=False, dropout_origins=origins)
    found = out.split(LENGTHS[0])
    kept = [kept_by([row], 1, 4, sq, sk)[0] for row, sq, sk in zip(drawn_as(rows, 3), *LENGTHS, strict=True)]
    for x, mask in zip(found, kept, strict=True):
        assert torch.equal(x.transpose(0, 1)[..., : mask.shape[2]] != 0, mask)
    for head in range(2):
        dout = torch.zeros_like(out)
        dout[:, head::2] = one_hot_q[:, None]
        (dv,) = torch.autograd.grad(out, v, dout, retain_graph=True)
        for x, mask in zip(dv.split(LENGTHS[1]), kept, strict=True):
            assert torch.equal(x.transpose(0, 1)[..., : mask.shape[1]] != 0, mask[head::2].mT)


@each_dtype
def test_the_whole_has_origin_zero(repeatable: Backend, dtype: torch.dtype) -> None:
    """The same bits as without origins, forward and backward."""
    case = Case(2, 4, 2, 17, 40, 24, 20)
    (q, k, v), dout, dlse = case.drawn(dtype)
    results = []
    for origins in (None, torch.tensor([[0, 4, 0, 0, 0]]), torch.tensor([[b, 4, 0, 0, 0] for b in range(2)])):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = attend(repeatable, *leaves, dropout_origins=origins)
        results.append((out, lse, *torch.autograd.grad([out, lse], leaves, [dout, dlse.to(lse.dtype)])))
    for found in results[1:]:
        assert_equal(found, results[0])


@pytest.mark.usefixtures("isa")
def test_without_dropout_origins_change_nothing() -> None:
    q, k, v = Case(2, 4, 2, 7, 9, 8, 6).inputs(torch.float32)
    origins = torch.tensor([[1, 7, 2, 3, 4]])
    assert_equal(ops.attention_forward(q, k, v, dropout_origins=origins), ops.attention_forward(q, k, v))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("place", ["key 13", "own"])
def test_keys_in_pages(place: str) -> None:
    q, k, v = Case(2, 4, 2, 5, 32, 8, 6).inputs(torch.float32)
    pages = (x.transpose(1, 2).unflatten(1, (2, 16)).flatten(0, 1) for x in (k, v))
    options = DROPOUT | {"dropout_origins": torch.tensor(PLACES[place])}
    found = ops.attention_paged_forward(q, *pages, torch.arange(4).view(2, 2), 32, **options)
    assert_equal(found, ops.attention_forward(q, k, v, **options))


def second_derivatives(call: Any, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Second derivatives of a loss of out and lse, along the gradients themselves."""
    out, lse = call(*leaves)
    gradients = torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves)


@pytest.mark.parametrize("place", ["key 3", "own"])
def test_second_derivatives(place: str) -> None:
    case, rows = Case(2, 4, 2, 5, 22, 8, 6, dropout_p=P), PLACES[place]
    leaves = [x.requires_grad_() for x in case.inputs(torch.float64)]
    options = Options(**DROPOUT, dropout_origins=torch.tensor(rows))
    found = second_derivatives(lambda *x: autograd.attend(DENSE, *x, options)[:2], leaves)
    with mock.patch.object(formula, "dropout_mask", return_value=kept_by(rows, 2, 4, 5, 22)):
        expected = second_derivatives(lambda *x: reference.attention(*x, **case.options, return_lse=True), leaves)
    assert_close(found, expected)


@pytest.mark.parametrize("shared", [True, False])
def test_second_derivatives_of_packed_sequences(shared: bool) -> None:
    """They equal those in a batch of sequences of the same length."""
    case = Case(2, 4, 2, 5, 22, 8, 6)
    leaves = [x.requires_grad_() for x in case.inputs(torch.float64)]
    options = Options(**DROPOUT, dropout_origins=OWN[:1] if shared else OWN)
    packing = Packing(torch.tensor([0, 5, 10]), torch.tensor([0, 22, 44]), 5, 22)

    def packed(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        rows = (x.transpose(1, 2).flatten(0, 1) for x in qkv)
        out, lse, *_ = autograd.attend(PACKED, *rows, (*packing, *options))
        return out.unflatten(0, (2, 5)).transpose(1, 2), lse.unflatten(1, (2, 5)).transpose(0, 1)

    assert_close(
        second_derivatives(packed, leaves),
        second_derivatives(lambda *x: autograd.attend(DENSE, *x, options)[:2], leaves),
    )


@pytest.mark.parametrize("dropout", [DROPOUT, {}], ids=["dropout", ""])
@pytest.mark.parametrize("origins", [OWN, OWN[:1], torch.stack([OWN, OWN.flip(0)]), OWN[:, None]], ids=str)
def test_vmap(origins: Tensor, dropout: dict[str, Any]) -> None:
    """Slices share origins or have their own, and so do sequences."""
    q, k, v = (torch.stack([x, 2 * x]) for x in Case(2, 4, 2, 5, 22, 8, 6).inputs(torch.float32))

    def call(q: Tensor, k: Tensor, v: Tensor, origins: Tensor) -> Tensor:
        return ops.attention_forward(q, k, v, **dropout, dropout_origins=origins)[0]

    mapped = origins.dim() == 3
    found = torch.vmap(call, (0, 0, 0, 0 if mapped else None))(q, k, v, origins)
    for i in range(2):
        assert torch.equal(found[i], call(q[i], k[i], v[i], origins[i] if mapped else origins))


@pytest.mark.parametrize("origins", [OWN, OWN[:1]], ids=["own", "shared"])
def test_opcheck(origins: Tensor) -> None:
    (q, k, v), dout, dlse = Case(2, 4, 2, 5, 7, 8, 6).drawn(torch.float32)
    options = Options(**DROPOUT, dropout_origins=origins)
    out, _, row_max, row_sum = ops.attention_forward(q, k, v, *options)
    torch.library.opcheck(ops.attention_forward, (q, k, v, *options))
    torch.library.opcheck(ops.attention_backward, (dout, dlse, q, k, v, out, row_max, row_sum, *options))


BAD: Refusals = [
    (OWN[0], ValueError, "dropout_origins must have shape (2 or 1, 5), got [5]"),
    (OWN[:, :4], ValueError, "dropout_origins must have shape (2 or 1, 5), got [2, 4]"),
    (OWN.repeat(2, 1), ValueError, "dropout_origins must have shape (2 or 1, 5), got [4, 5]"),
    (OWN.int(), TypeError, "dropout_origins must have dtype int64, got int32"),
    (OWN.to("meta"), ValueError, "dropout_origins must be on q's device, got meta and cpu"),
    (OWN - 1, ValueError, "dropout_origins must be at least 0, got -1 in row 0"),
]


@each_refusal(BAD)
def test_wrong_origins_are_refused(changes: Tensor, kind: type[Exception], message: str) -> None:
    """Operators over batches and over packed sequences give the same errors."""
    q, k, v = Case(2, 4, 2, 5, 7, 8, 6).inputs(torch.float32)
    packed = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    packing = Packing(torch.tensor([0, 5, 10]), torch.tensor([0, 7, 14]), 5, 7)
    with refused(kind, message):
        ops.attention_forward(q, k, v, **DROPOUT, dropout_origins=changes)
    with refused(kind, message):
        ops.attention_varlen_forward(*packed, *packing, **DROPOUT, dropout_origins=changes)
