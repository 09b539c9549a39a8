"""Promise: dropout's mask is the documented one to the bit, forward and backward, seeded by torch's generator."""

import math
import re
from typing import Any

import pytest
import torch
from support.assertions import each_refusal, graph_of, refused
from support.backends import Backend
from support.cases import Case, assert_equal, each_dtype, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pyattn import attention, dropout_mask, reference
from pyattn.options.dropout import draw_seed, philox


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0x00000000, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_known_answers(word: int, expected: tuple[int, ...]) -> None:
    """Random123's kat_vectors: the key is the word twice, the counter the word four times."""
    seed = word << 32 | word
    results = philox(torch.tensor(seed - 2**64 if seed >= 2**63 else seed), (torch.tensor(word),) * 4)
    assert tuple(x.item() for x in results) == expected


def test_philox_known_answer_of_pi() -> None:
    counter = tuple(torch.tensor(x) for x in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))
    results = philox(0x299F31D0A4093822, counter)
    assert tuple(x.item() for x in results) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.usefixtures("threads")
@each_dtype
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
def test_native_mask_is_the_one_shown(repeatable: Backend, dtype: torch.dtype, seed: int) -> None:
    """With equal scores and values 1 at one key, out is that key's weight, and dv the query's."""
    torch.set_num_threads(3)
    b, h, g, sq, sk, p = (1, 1, 2, 20, 70, 0.4) if repeatable.family == "emulated" else (2, 2, 2, 67, 203, 0.4)
    q, k = torch.zeros(b, h * g, sq, 8, dtype=dtype), torch.zeros(b, h, sk, 8, dtype=dtype)
    v = torch.eye(sk, dtype=dtype).expand(b, h, sk, sk).clone().requires_grad_()
    out = repeatable.attention(q, k, v, causal=False, dropout_p=p, dropout_seed=seed)
    kept = dropout_mask(seed, b, h * g, sq, sk, p)
    assert torch.equal(out != 0, kept.to(out.device))
    assert out[kept].unique().numel() == 1
    torch.testing.assert_close(out[kept][0].item(), 1 / (1 - p) / sk, rtol=0.004, atol=0)
    for head in range(g):
        dout = torch.zeros_like(out)
        dout[:, head::g] = torch.eye(sq, sk, dtype=dtype)
        (dv,) = torch.autograd.grad(out, v, dout, retain_graph=True)
        assert torch.equal(dv[..., :sq] != 0, kept[:, head::g].mT.to(out.device))


def test_weights_are_kept_with_their_probability() -> None:
    """The rate holds overall and at each position, and neighbours, which share a counter, are independent."""
    p, draws = 0.3, 4000
    kept = torch.cat([dropout_mask(seed, 40, 2, 6, 24, p) for seed in range(draws // 40)]).double()
    rate, deviation = 1 - round(65536 * p) / 65536, math.sqrt(p * (1 - p))
    assert abs(kept.mean() - rate) < 4.9 * deviation / math.sqrt(kept.numel()), "by chance: 1e-6"
    at_each = (kept.mean(0) - rate).abs().max()
    assert at_each < 6 * deviation / math.sqrt(draws), "by chance: 2e-9 at each of 288 positions"
    together = (kept[..., :-1] * kept[..., 1:]).mean() - rate**2
    assert abs(together) < 4.9 / math.sqrt(kept.numel()), "neighbours are independent"


@pytest.mark.parametrize("p", [1e-6, 0.5 / 65536, 1.5 / 65536, 0.99999, 1 - 1e-9])
def test_probabilities_at_the_ends(p: float) -> None:
    """Probabilities are rounded to 1/65536, half to even; at most 65535 of 65536 weights are dropped."""
    case = Case(1, 1, 1, 40, 300, 4, 4, causal=False, dropout_p=p)
    qkv, dout, _ = case.drawn(torch.float64)
    for x, y in zip(
        run(attention, qkv, dout, **case.options), run(reference.attention, qkv, dout, **case.options), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


def test_torch_generator_gives_the_seed(native: Backend) -> None:
    q, k, v = Case(1, 2, 2, 40, 40, 8, 8).inputs(torch.float32)
    torch.manual_seed(1)
    first, second = (native.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(1)
    again, seed = native.attention(q, k, v, dropout_p=0.5), draw_seed(q.device)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    for same in (seed, int(seed)):
        assert torch.equal(second, native.attention(q, k, v, dropout_p=0.5, dropout_seed=same))


def test_without_dropout_no_seed_is_drawn(native: Backend) -> None:
    q, k, v = Case(1, 2, 2, 40, 40, 8, 8).inputs(torch.float32)
    torch.manual_seed(1)
    expected = torch.randn(3)
    torch.manual_seed(1)
    plain = native.attention(q, k, v)
    assert torch.equal(plain, native.attention(q, k, v, dropout_p=0.0))
    assert torch.equal(plain, native.attention(q, k, v, dropout_p=0.0, dropout_seed=3))
    assert torch.equal(torch.randn(3), expected)


@pytest.mark.usefixtures("device")
def test_checkpoint_drops_the_same() -> None:
    q, k, v = (x.requires_grad_() for x in Case(1, 2, 2, 40, 40, 8, 8).inputs(torch.float32))

    def gradients(function: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(2)
        return torch.autograd.grad(function(q, k, v).sin().sum(), (q, k, v))

    def drop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, dropout_p=0.5)

    assert_equal(gradients(drop), gradients(lambda *qkv: checkpoint(drop, *qkv, use_reentrant=False)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compile() -> None:
    q, k, v = Case(2, 4, 2, 8, 10, 8, 6).inputs(torch.float32)
    seeded = graph_of(lambda *qkv: attention(*qkv, dropout_p=0.5, dropout_seed=9))
    assert torch.equal(seeded(q, k, v), attention(q, k, v, dropout_p=0.5, dropout_seed=9))
    drawn = graph_of(lambda *qkv: attention(*qkv, dropout_p=0.5))
    first = drawn(q, k, v)
    assert not torch.equal(first, drawn(q, k, v))
    assert not torch.equal(first, attention(q, k, v))


def test_vmap_is_one_call_after_the_other() -> None:
    q = torch.randn(3, 1, 2, 5, 4)
    seeds = torch.tensor([4, 5, 6])

    def drop(q: Tensor, seed: Tensor) -> Tensor:
        return attention(q, q, q, dropout_p=0.5, dropout_seed=seed)

    assert torch.equal(
        torch.vmap(drop)(q, seeds), torch.stack([drop(x, seed) for x, seed in zip(q, seeds, strict=True)])
    )
    same = torch.vmap(drop, (0, None))(q, seeds[0])
    assert torch.equal(same, torch.stack([drop(x, seeds[0]) for x in q]))
    with pytest.raises(RuntimeError, match="vmap: called random operation"):
        torch.vmap(lambda q: attention(q, q, q, dropout_p=0.5))(q)


@each_refusal(
    [
        ({"dropout_p": 1.0}, ValueError, "dropout_p must be at least 0 and below 1, got 1"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p must be at least 0 and below 1, got -0.1"),
        ({"dropout_p": math.nan}, ValueError, "dropout_p must be at least 0 and below 1, got nan"),
        ({"dropout_p": "0.1"}, TypeError, "dropout_p must be int or float, got '0.1'"),
        (
            {"dropout_p": 0.1, "dropout_seed": 2**63},
            ValueError,
            "dropout_seed must fit in 64 bits, got 9223372036854775808",
        ),
        ({"dropout_p": 0.1, "dropout_seed": 0.5}, TypeError, "dropout_seed must be int or Tensor, got 0.5"),
        (
            {"dropout_p": 0.1, "dropout_seed": torch.tensor(0.5)},
            TypeError,
            "dropout_seed must have dtype int64, got float32",
        ),
        ({"dropout_p": 0.1, "dropout_seed": torch.tensor([1])}, ValueError, "dropout_seed must have shape [], got [1]"),
    ]
)
def test_bad_input(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    x = torch.randn(1, 1, 2, 2)
    with refused(kind, message):
        attention(x, x, x, **changes)


@pytest.mark.parametrize(
    ("seed", "dropout_p", "kind", "message"),
    [
        (3, 1.5, ValueError, "dropout_p must be at least 0 and below 1, got 1.5"),
        (3, math.nan, ValueError, "dropout_p must be at least 0 and below 1, got nan"),
        (3, None, TypeError, "dropout_p must be int or float, got None"),
        (2**63, 0.5, ValueError, "seed must fit in 64 bits, got 9223372036854775808"),
        (0.5, 0.5, TypeError, "seed must be int or Tensor, got 0.5"),
        (torch.tensor(0.5), 0.5, TypeError, "seed must be int64, got torch.float32"),
        (torch.tensor(3, dtype=torch.int32), 0.5, TypeError, "seed must be int64, got torch.int32"),
        (torch.tensor([3]), 0.5, ValueError, "seed must be a scalar, got shape (1,)"),
    ],
)
def test_bad_input_to_the_mask(seed: Any, dropout_p: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^pyattn: {re.escape(message)}$"):
        dropout_mask(seed, 1, 1, 2, 2, dropout_p)


def test_bad_input_to_the_operators() -> None:
    x = torch.randn(1, 1, 2, 2)
    rows = x[..., 0]
    for p, message in (
        (0.5, "dropout_p 0.5 needs a dropout_seed, got None"),
        (1.0, "below 1, got 1"),
        (math.nan, "got nan"),
    ):
        with refused(ValueError, message, inside=True):
            torch.ops.pyattn.attention_forward(x, x, x, dropout_p=p)
        with refused(ValueError, message, inside=True):
            torch.ops.pyattn.attention_backward(x, None, x, x, x, x, rows, rows, dropout_p=p)
