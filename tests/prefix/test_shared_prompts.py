"""Promise: answers over a prompt given once have the results and gradients of a batch that repeats the prompt."""

import functools
import math
from random import Random
from typing import Any

import pytest
import torch
from support.assertions import (
    assert_close,
    assert_threads_change_no_bit,
    check_examples,
    finite,
    graph_of,
)
from support.axes import PUBLIC, forms, of_axes, with_seed
from support.backends import Backend
from support.cases import DTYPES, Case, alternate, assert_equal, memory_needed
from support.prefixes import (
    ANSWERS,
    BATCH,
    HKV,
    HQ,
    PART,
    PROMPTS,
    SIZES,
    SK,
    SQ,
    D,
    P,
    assert_accurate,
    on_emulated,
    tensors,
)
from support.yardstick import LEARNED
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from pyattn import attention, attention_with_prefix, masks, reference
from pyattn.derivatives import autograd
from pyattn.options.dropout import draw_seed

CASES = [
    # case, answers to each prompt, keys of the prompt
    (Case(6, 4, 2, 17, 57, 24, 20), 3, 40),
    (Case(4, 3, 3, 20, 50, 21, 21, window=(15, 0), softcap=3.0, sinks=True), 4, 33),
    (Case(4, 2, 1, 9, 60, 16, 20, alibi="bh", relative="h 8", q_offset=40), 2, 50),
    (Case(4, 4, 2, 8, 41, 24, 24, dropout_p=0.3, key_ranges="random"), 2, 30),
    (Case(3, 4, 2, 8, 41, 20, 20, causal=False, mask="random bhq", bias="bands hqk"), 3, 30),
    (Case(4, 2, 2, 12, 41, 20, 20, mask="random qk", bias="float qk", relative="b 20"), 2, 30),
]


@pytest.mark.parametrize(
    ("case", "answers", "length", "dtype"), [(*case, dtype) for case, dtype in alternate(CASES, DTYPES)], ids=str
)
def test_accuracy(
    repeatable: Backend, monkeypatch: pytest.MonkeyPatch, case: Case, answers: int, length: int, dtype: torch.dtype
) -> None:
    """out, lse and every gradient, those of the prompts too."""
    if repeatable.family == "emulated":
        monkeypatch.setattr(PART, on_emulated(repeatable))
    assert_accurate(case, answers, length, dtype)


FORMS = [(name, *form) for name in PUBLIC for form in forms(name)]


def with_gradients(function: Any, given: list[Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
    """out, lse and max_score, then the gradients of all five tensors and of learned options."""
    inputs = [t.detach().requires_grad_() for t in given]
    own = {name: t.detach().requires_grad_() if name in LEARNED else t for name, t in options.items()}
    results = function(*inputs, return_lse=True, return_max_score=True, **own)
    loss = sum((t * torch.linspace(-1, 2, t.numel()).view_as(t)).sum() for t in finite(*results[:2]))
    wanted = [*inputs, *(own[name] for name in own if name in LEARNED)]
    assert isinstance(loss, Tensor)
    return *results, *torch.autograd.grad(loss, wanted)


def assert_as_repeated(given: list[Tensor], options: dict[str, Any]) -> None:
    ours, expected = (
        with_gradients(function, given, options)
        for function in (attention_with_prefix, reference.attention_with_prefix)
    )
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "broadcast", "left_out"), FORMS)
def test_every_option(name: str, broadcast: str, left_out: int) -> None:
    """In every form of its axes."""
    assert_as_repeated(tensors(), with_seed(name, of_axes(name, SIZES, broadcast, left_out)))


def random_case(draw: Random) -> tuple[list[Tensor], dict[str, Any]]:
    """Any counts of prompts, answers, heads and keys, 0 included, and up to three options."""
    heads_kv, group = draw.choice([1, 2]), draw.choice([1, 1, 2, 3])
    sizes = {"heads": heads_kv * group, "heads_kv": heads_kv, "q": draw.choice([1, 2, 5])}
    sizes |= {"k": draw.choice([0, 1, 2, 5]), "prefix": draw.choice([0, 1, 7])}
    given = tensors(draw.choice([1, 2, 3]), draw.choice([1, 2, 4]), **sizes)
    batch, keys = len(given[0]), sizes["k"] + sizes["prefix"]
    axes = SIZES | {"b": batch, "h": sizes["heads"], "g": heads_kv, "q": sizes["q"], "k": keys}
    options: dict[str, Any] = {"causal": draw.random() < 0.6, "softcap": draw.choice([0.0, 2.0])}
    options |= {"window": draw.choice([(-1, -1), (2, 1), (4, 0)]), "q_offset": draw.choice([None, -1, 3])}
    for name in draw.sample([n for n in PUBLIC if n != "dropout_seed"], draw.randint(0, 3)):
        if name != "selected" or keys:
            options[name] = of_axes(name, axes, *draw.choice([*forms(name)]))
    if draw.random() < 0.4:
        options |= {"dropout_p": 0.3, "dropout_seed": 7}
    return given, options


def test_random_combinations(request: pytest.FixtureRequest) -> None:
    check_examples(request, 150, lambda draw: assert_as_repeated(*random_case(draw)))


def padding(kind: str) -> dict[str, Tensor]:
    """Prompts padded on the left, of 4 and 6 tokens, and answers padded on the right, as groups of a batch are."""
    begin, end = torch.tensor([2, 2, 2, 0, 0, 0]), P + torch.tensor([1, 5, 3, 2, 5, 4])
    ranges = torch.stack([begin, end], -1)[:, None]
    keys = torch.arange(P + SK)
    shown = (keys >= begin[:, None]) & (keys < end[:, None])
    return {"key_ranges": ranges} if kind == "key_ranges" else {"mask": shown[:, None, None]}


@pytest.mark.parametrize("kind", ["key_ranges", "mask"])
def test_padding_never_leaks(kind: str) -> None:
    """NaN in padded keys changes no bit."""
    given, options = tensors(), padding(kind)
    expected = attention_with_prefix(*given, **options)
    for t in given[3:]:
        t[0, :, :2] = math.nan
    for t in given[1:3]:
        t[0, :, 1:] = math.nan
    assert torch.equal(attention_with_prefix(*given, **options), expected)
    assert expected.isfinite().all()


def calls_of(monkeypatch: pytest.MonkeyPatch, given: list[Tensor], options: dict[str, Any]) -> list[tuple[int, ...]]:
    """The shape of q in each call of the operator."""
    shapes: list[tuple[int, ...]] = []

    def attend(kind: Any, q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        shapes.append(tuple(q.shape))
        return autograd.attend(kind, q, *rest)

    with monkeypatch.context() as patch:
        patch.setattr("pyattn.prefix.attention.autograd", type("Counted", (), {"attend": staticmethod(attend)}))
        attention_with_prefix(*given, **options)
    return shapes


TOGETHER: list[dict[str, Any]] = [
    {},
    padding("key_ranges"),
    padding("mask"),
    {"q_offset": torch.full((BATCH,), 3)},
    {"q_offset": P + torch.arange(BATCH)},
    {"q_offset": torch.arange(BATCH) // ANSWERS, "window": (2, 0)},
    {"alibi_slopes": torch.rand(BATCH, HQ).double(), "relative_bias": torch.randn(BATCH, HQ, 9).double()},
    {"bias": torch.randn(SQ, P + SK).double(), "mask": torch.rand(P + SK) < 0.8, "sinks": torch.randn(HQ).double()},
    {"selected": torch.randint(-1, P + SK, (1, 1, SQ, 4))},
]
APART: list[dict[str, Any]] = [
    {"dropout_p": 0.1},
    {"q_offset": torch.arange(BATCH)},
    {"q_offset": P + torch.arange(BATCH), "window": (2, 0)},
    {"q_offset": P + torch.arange(BATCH), "alibi_slopes": torch.rand(HQ).double()},
    {"key_ranges": torch.stack([torch.arange(BATCH) // 2, torch.full((BATCH,), P + SK)], -1)[:, None]},
    {"bias": torch.randn(HQ, 1, 1).double()},
    {"bias": torch.randn(BATCH, 1, 1, 1).double()},
    {"mask": torch.ones(HQ, 1, 1, dtype=torch.bool)},
    {"selected": torch.randint(-1, P + SK, (1, HKV, SQ, 4))},
]


@pytest.mark.parametrize("options", TOGETHER, ids=lambda options: " ".join(options))
def test_answers_are_heads_of_one_call(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    calls = calls_of(monkeypatch, tensors(), options)
    assert calls == [(BATCH, HQ, SQ, D), (PROMPTS, HQ * ANSWERS, SQ, D)]


@pytest.mark.parametrize("options", APART, ids=lambda options: " ".join(options))
def test_answers_that_differ_are_computed_apart(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    calls = calls_of(monkeypatch, tensors(), options)
    assert calls == [(BATCH, HQ, SQ, D), *[(PROMPTS, HQ, SQ, D)] * ANSWERS]


def test_a_bias_has_gradients_of_each_answer() -> None:
    """Equal values are not one tensor."""
    assert_as_repeated(tensors(), {"bias": torch.zeros(BATCH, 1, 1, P + SK, dtype=torch.float64)})


def test_offsets_within_and_after_the_prompt() -> None:
    """After it, all see the same keys, unless distances count."""
    for offsets in ([0, 2, 5, 6, 7, 20], [6, 7, 8, 9, 10, 11]):
        offset = torch.tensor(offsets)
        for options in ({}, {"window": (3, 0)}, {"alibi_slopes": torch.rand(HQ).double()}, {"causal": False}):
            assert_as_repeated(tensors(), {"q_offset": offset} | options)
        assert_as_repeated(tensors(), {"q_offset": offset, "relative_bias": torch.randn(HQ, 31).double()})


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.1}], ids=["together", "apart"])
def test_memory(options: dict[str, Any]) -> None:
    """Neither keys nor gradients are repeated: 8 answers would need 16 times the 96 MB of the prompt.

    On one thread: backward of few queries has four floats a key on each, which are 80 % of such a prompt.
    """
    torch.set_num_threads(1)
    given = [t.float().requires_grad_() for t in tensors(1, 8, q=1, k=1, heads=1, heads_kv=1, prefix=4_800_000)]
    size = sum(t.numel() * 4 for t in given[3:])

    def step() -> None:
        torch.autograd.grad(attention_with_prefix(*given, **options).sum(), given)

    assert memory_needed(step) < 5 * size


def test_second_order_and_forward_mode() -> None:
    given = [t.requires_grad_() for t in tensors(2, 2, q=2, k=2, heads=2, heads_kv=1, prefix=3)]
    for options in ({"sinks": torch.randn(2).double()}, {"dropout_p": 0.3, "dropout_seed": 5}):
        call = functools.partial(attention_with_prefix, softcap=2.0, **options)
        assert gradcheck(call, given, check_forward_ad=True, fast_mode=True)
        assert gradgradcheck(call, given, fast_mode=True)


@pytest.mark.parametrize("kind", ["key_ranges", "mask", "none"])
def test_vmap(kind: str) -> None:
    given, options = tensors(), padding(kind) if kind != "none" else {}
    many = [torch.stack([t, t.flip(-2)], 1) for t in given]
    for call in (
        functools.partial(attention_with_prefix, **options),
        torch.func.grad(lambda *x: attention_with_prefix(*x, **options).sin().sum(), (0, 3, 4)),
    ):
        each = [call(*(t.select(1, i) for t in many)) for i in range(2)]
        found = torch.vmap(call, 1)(*many)
        for i in range(2):
            one = found[i] if isinstance(found, Tensor) else tuple(t[i] for t in found)
            assert_close(one, each[i])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["key_ranges", "mask", "dropout"])
def test_one_graph(kind: str, dynamic: bool) -> None:
    options: dict[str, Any] = {"dropout_p": 0.2, "dropout_seed": 1} if kind == "dropout" else padding(kind)

    def call(*inputs: Tensor, **returned: bool) -> Any:
        return attention_with_prefix(*inputs, **options, **returned)

    given = tensors()
    graph = graph_of(call, dynamic=dynamic)
    torch.testing.assert_close(with_gradients(graph, given, {}), with_gradients(call, given, {}))


def test_threads_change_no_bit(threads: None) -> None:
    given = [t.float() for t in tensors(2, 4, q=30, prefix=200)]
    for options in ({}, {"dropout_p": 0.2, "dropout_seed": 3}):
        assert_threads_change_no_bit(lambda options=options: with_gradients(attention_with_prefix, given, options))


def test_one_answer_and_no_prompt() -> None:
    """One answer to each prompt, and prompts without keys, which change no bit."""
    assert_as_repeated(tensors(3, 1), {})
    given = tensors(prefix=0)
    assert_equal(
        attention_with_prefix(*given, return_lse=True),
        attention(*given[:3], return_lse=True),
    )
    for prompts, answers in ((0, 3), (2, 0)):
        assert attention_with_prefix(*tensors(prompts, answers)).shape == (0, HQ, SQ, D + 1)


def test_any_strides_and_autocast() -> None:
    given = tensors()
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in given]
    strided[3] = given[3].mT.contiguous().mT
    assert_equal(with_gradients(attention_with_prefix, strided, {}), with_gradients(attention_with_prefix, given, {}))
    single = [t.float() for t in given]
    with torch.autocast("cpu", torch.bfloat16):
        out = attention_with_prefix(*single[:3], single[3].bfloat16(), single[4])
    assert torch.equal(out, attention_with_prefix(*(t.bfloat16() for t in single)))


def test_the_seed_is_drawn_once() -> None:
    """torch.manual_seed repeats it, and both parts drop by it."""
    given = tensors()
    torch.manual_seed(3)
    out = attention_with_prefix(*given, dropout_p=0.4)
    torch.manual_seed(3)
    assert_close(out, reference.attention_with_prefix(*given, dropout_p=0.4, dropout_seed=draw_seed()))


def test_masks_of_the_package() -> None:
    """Constructors for all keys, the prompt's first."""
    ranges = masks.padding([9, 11, 7, 11, 8, 11], P + SK, seqlen_q=1)
    assert_as_repeated(tensors(), {"key_ranges": ranges})
