"""Promise: q, k, v and options broadcast over any leading dimensions, as if expanded, without a copy of large ones."""

import functools
import math
from random import Random
from typing import Any

import pytest
import torch
from support.assertions import assert_close, check_examples, graph_of
from support.axes import PUBLIC, forms, of_axes, with_seed
from support.backends import Backend
from support.cases import assert_equal, memory_needed
from support.prefixes import on_emulated
from torch import Tensor
from torch.autograd import forward_ad

from pyattn import attention, attention_weights, dropout_mask, masks, reference
from pyattn.leading_dimensions import by_batches
from pyattn.options import LEARNED, Options, polarity
from pyattn.options.axes import AXES, words_of

HQ, HKV, SQ, SK, D = 4, 2, 5, 7, 2
"""More keys than columns: a bias is larger than q, so it is never copied."""

SIZES = {"h": HQ, "g": HKV, "q": SQ, "k": SK, "n": 2, "r": 9, "2": 2}
FORMS = [(name, *form) for name in PUBLIC for form in forms(name)]


def qkv(*leads: tuple[int, ...]) -> list[Tensor]:
    """Tensors in float64 with these leading dimensions, the last of them also v's."""
    sizes = zip([*leads, *leads[-1:] * 2][:3], ((HQ, SQ), (HKV, SK), (HKV, SK)), strict=True)
    return [torch.randn(*lead, *rest, D, dtype=torch.float64) for lead, rest in sizes]


def own_dims(name: str, tensor: Tensor, dims: int) -> int:
    """How many of an option's dimensions are leading ones, in a call with that many of them."""
    for own in range(dims, -1, -1):
        words = words_of(AXES[name], tensor.dim() - own + 1) if own else words_of(AXES[name], tensor.dim())
        if words and (words[0][0] == "b") == (own > 0):
            return own
    return 0


def folded(name: str, tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    """An option in all its sequences, (B, ...)."""
    own = own_dims(name, tensor, len(lead))
    if not own:
        return tensor
    rest = tensor.shape[own:]
    return tensor[(None,) * (len(lead) - own)].expand(*lead, *rest).reshape(math.prod(lead), *rest)


def by_folding(function: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """The results of a function of one batch dimension, on expanded copies."""
    lead = tuple(torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3]))
    q, k, v = (t.expand(*lead, *t.shape[-3:]).reshape(-1, *t.shape[-3:]) for t in (q, k, v))
    own = {name: folded(name, t, lead) if name in AXES and isinstance(t, Tensor) else t for name, t in options.items()}
    found = function(q, k, v, **own)
    return tuple(t.unflatten(0, lead) for t in (found if isinstance(found, tuple) else (found,)))


def of_lead(name: str, lead: tuple[int, ...], shared: set[int], broadcast: str = "", left_out: int = 0) -> Tensor:
    """An option with all leading dimensions where its form has a batch; of size 1 along ``shared`` ones."""
    tensor = of_axes(name, SIZES | {"b": math.prod(lead)}, broadcast, left_out)
    words = words_of(AXES[name], tensor.dim())
    if not words or words[0][0] != "b":
        return tensor
    if tensor.shape[0] != math.prod(lead):
        return tensor[(None,) * (len(lead) - 1)]
    tensor = tensor.unflatten(0, lead)
    for dim in shared:
        tensor = tensor.narrow(dim, 0, 1)
    return tensor.clone()


def with_gradients(function: Any, tensors: list[Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Results, then the gradients of q, k, v and learned options."""
    inputs = [t.detach().requires_grad_() for t in tensors]
    own = {name: t.detach().requires_grad_() if name in LEARNED else t for name, t in options.items()}
    results = function(*inputs, **own)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum(
        (t.masked_fill(t == -math.inf, 0.0) * torch.linspace(-1, 2, t.numel()).view_as(t)).sum() for t in results
    )
    wanted = [*inputs, *(own[name] for name in own if name in LEARNED)]
    assert isinstance(loss, Tensor)
    found = torch.autograd.grad(loss, wanted)
    for one, given in zip(found, wanted, strict=True):
        assert one.shape == given.shape
    return *results, *found


def random_case(draw: Random) -> tuple[list[Tensor], dict[str, Any]]:
    """Two to four leading dimensions, missing or of size 1 in some tensors, and up to three options."""
    lead = tuple(draw.choice([1, 2, 3]) for _ in range(draw.randint(2, 4)))

    def some(least: int = 0) -> tuple[int, ...]:
        sizes = tuple(size if draw.random() < 0.7 else 1 for size in lead)
        return sizes[draw.choice([0, 0, draw.randint(0, len(lead) - least)]) :]

    leads = [tuple(size if draw.random() < 0.7 else 1 for size in lead), some(1), some(1)]
    lead = tuple(torch.broadcast_shapes(*leads))
    options: dict[str, Any] = {"causal": draw.random() < 0.5}
    for name in draw.sample([n for n in PUBLIC if n != "dropout_seed"], draw.randint(0, 3)):
        shared = {dim for dim in range(len(lead)) if draw.random() < 0.4}
        options[name] = of_lead(name, lead, shared, *draw.choice([*forms(name)]))
        own = own_dims(name, options[name], len(lead))
        while own > 1 and name != "key_ranges" and options[name].shape[0] == 1 and draw.random() < 0.5:
            options[name], own = options[name][0], own - 1
    if draw.random() < 0.4:
        options |= {"dropout_p": 0.3, "dropout_seed": 7}
    return qkv(*leads), options


def test_as_expanded(request: pytest.FixtureRequest) -> None:
    """Results and gradients are the formula's, of tensors that are copied to all leading dimensions."""

    def check(draw: Random) -> None:
        tensors, options = random_case(draw)
        ours, expected = (
            with_gradients(functools.partial(call, return_lse=True), tensors, options)
            for call in (attention, functools.partial(by_folding, reference.attention))
        )
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)

    check_examples(request, 150, check)


@pytest.mark.parametrize("shared", [set(), {0}, {1}, {0, 1}], ids=str)
@pytest.mark.parametrize(("name", "broadcast", "left_out"), FORMS)
def test_every_option(name: str, broadcast: str, left_out: int, shared: set[int]) -> None:
    """Its axes are enough; beside a bias that makes the call loop, too."""
    lead = (2, 3)
    option = with_seed(name, of_lead(name, lead, shared, broadcast, left_out))
    bias = {"bias": torch.randn(2, 1, 1, SQ, SK, dtype=torch.float64)}
    for options in (option, bias | option):
        tensors = qkv(lead, (1, 3))
        ours, expected = (
            with_gradients(functools.partial(call, return_lse=True), tensors, options)
            for call in (attention, functools.partial(by_folding, reference.attention))
        )
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def test_pair_bias_as_plain_torch() -> None:
    """Triangle attention: a bias that sequences share, and a mask of keys."""
    (q, k, v), bias = qkv((2, 3), (2, 3)), torch.randn(2, 1, HQ, SQ, SK, dtype=torch.float64)
    k, v, mask = k.repeat(1, 1, 2, 1, 1), v.repeat(1, 1, 2, 1, 1), torch.rand(2, 3, 1, 1, SK) < 0.8
    mask[..., 0] = True

    def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, **_: Any) -> Tensor:
        return (q @ k.mT * D**-0.5 + bias).masked_fill(~mask, -math.inf).softmax(-1) @ v

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return attention(q, k, v, bias=bias, mask=mask, causal=False)

    tensors, options = [q, k, v], {"bias": bias}
    torch.testing.assert_close(with_gradients(ours, tensors, options), with_gradients(plain, tensors, options))
    inputs = [t.requires_grad_() for t in (*tensors, bias)]
    assert torch.autograd.gradcheck(ours, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(ours, inputs, fast_mode=True)
    hessians = (torch.func.hessian(lambda b, f=f: f(*tensors, b).sin().sum())(bias) for f in (ours, plain))
    torch.testing.assert_close(*hessians)


@pytest.mark.parametrize("bias", [(2, 1, 1, SQ, SK), (1, 3, 1, SQ, SK), (1, 1, HQ, SQ, SK)], ids=str)
def test_dropout_counts_sequences_in_the_order_of_all_leading_dimensions(bias: tuple[int, ...]) -> None:
    q, k, _ = qkv((2, 3), (2, 3))
    v = torch.eye(SK, dtype=torch.float64).expand(2, 3, HKV, SK, SK)  # out is the weights
    options = {"bias": torch.randn(bias, dtype=torch.float64), "causal": False}
    weights = attention(q, k, v, dropout_p=0.4, dropout_seed=5, **options)
    kept = dropout_mask(5, 6, HQ, SQ, SK, 0.4).unflatten(0, (2, 3))
    assert torch.equal(weights != 0, kept)
    assert_close(weights, attention_weights(q, k, dropout_p=0.4, dropout_seed=5, **options))
    torch.manual_seed(3)
    drawn = attention(q, k, v, dropout_p=0.4, **options)
    torch.manual_seed(3)
    folded_bits = by_folding(attention, q, k, v, dropout_p=0.4, **options)
    assert torch.equal(drawn, *folded_bits)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("lead", [(2, 3), (1, 3), (3, 1, 2)], ids=str)
def test_lse_and_max_score(lead: tuple[int, ...], sinks: bool) -> None:
    tensors = qkv(lead, lead)
    options: dict[str, Any] = {"bias": torch.randn(lead[0], *(1,) * len(lead), SQ, SK, dtype=torch.float64)}
    if sinks:
        options["sinks"] = torch.randn(HQ, dtype=torch.float64)
    call = functools.partial(attention, return_lse=True, return_max_score=True)
    ours, expected = call(*tensors, **options), by_folding(call, *tensors, **options)
    assert [t.shape for t in ours] == [(*lead, HQ, SQ, D), (*lead, HQ, SQ), (*lead, HQ)]
    assert_equal(ours, expected)
    assert_equal(attention(*tensors, return_max_score=True, **options), (expected[0], expected[2]))
    assert_equal(attention(*tensors, return_lse=True, **options), attention(*tensors, return_lse=True, **options))


@pytest.mark.parametrize("reduce", [None, "queries", "heads", "entropy"])
@pytest.mark.parametrize("bias", [(2, 1, HQ, SQ, SK), (3, 1, 1, SK)], ids=str)
def test_weights(bias: tuple[int, ...], reduce: Any) -> None:
    q, k, v = qkv((2, 3), (1, 3))
    options = {"bias": torch.randn(bias, dtype=torch.float64, requires_grad=True), "window": (3, -1)}
    lse = attention(q, k, v, return_lse=True, **options)[1]

    def weights(q: Tensor, k: Tensor, _: Tensor, lse: Tensor | None = None, **options: Any) -> Tensor:
        return attention_weights(q, k, lse=lse, heads=[3, 1], rows=[0, -2], reduce=reduce, **options)

    (expected,) = by_folding(weights, q, k, v, **options)
    for given in (None, lse):
        found = weights(q, k, v, given, **options)
        assert_close(found, expected)
        for one, other in zip(
            *(torch.autograd.grad(t.sin().sum(), options["bias"], retain_graph=True) for t in (found, expected)),
            strict=True,
        ):
            assert_close(one, other)
    with torch.no_grad():
        assert_close(weights(q, k, v, **options), expected)


@pytest.mark.parametrize(("bias", "dynamic"), [((2, 1, HQ, SQ, SK), True), ((2, 1, HQ, SQ, SK), False), ((1,), False)])
def test_one_graph(bias: tuple[int, ...], dynamic: bool) -> None:
    tensors, options = qkv((2, 3), (2, 3)), {"bias": torch.randn(bias, dtype=torch.float64)}

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        mask = q.new_ones(3, 1, 1, SK, dtype=torch.bool)
        out = attention(q, k, v, bias=bias, mask=mask, dropout_p=0.2, dropout_seed=1)
        return out, attention_weights(q, k, bias=bias, reduce="queries")

    graph = graph_of(call, dynamic=dynamic)
    torch.testing.assert_close(with_gradients(graph, tensors, options), with_gradients(call, tensors, options))


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "mask", "key_ranges"])
def test_changes_in_place_before_backward_raise(name: str) -> None:
    """As in a call of one batch dimension, whether the call loops over slices or folds: these are read in place."""
    given = dict(zip("qkv", qkv((2, 3), (2, 3)), strict=True)) | {"bias": torch.randn(2, 1, HQ, SQ, SK).double()}
    inputs = {n: t.requires_grad_().clone() for n, t in given.items()}
    inputs |= {"mask": torch.rand(2, 3, 1, 1, SK) < 0.8, "key_ranges": torch.tensor([1, SK]).repeat(2, 3, SQ, 1)}
    for left_out in ("", "bias"):
        loss = attention(**{n: t for n, t in inputs.items() if n == name or n != left_out}).sin().sum()
        with torch.no_grad():
            inputs[name].zero_()
        with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
            torch.autograd.grad(loss, [t for n, t in given.items() if n == name or n != left_out])


@pytest.mark.parametrize("bias", [(2, 1, HQ, SQ, SK), (1, 3, HQ, SQ, SK), (SQ, SK)], ids=str)
def test_emulated_kernels(emulator: Backend, bias: tuple[int, ...]) -> None:
    """Calls of a loop over them, and one call over all sequences."""
    tensors = qkv((2, 3), (2, 3))
    options: dict[str, Any] = {"bias": torch.randn(bias).double(), "alibi_slopes": torch.rand(1, 3, HQ).double()}
    options |= {"key_ranges": torch.tensor([[1, SK], [0, 3], [2, 6]])[:, None], "sinks": torch.randn(HQ).double()}

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
        return by_batches(on_emulated(emulator), {"q": q, "k": k, "v": v}, Options(**options))

    ours, expected = (
        with_gradients(function, tensors, options)
        for function in (call, functools.partial(by_folding, reference.attention, return_lse=True))
    )
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def test_vmap_and_forward_mode() -> None:
    """The mapped dimension is none of the leading ones; tangents pass through the calls of a loop."""
    tensors, bias = qkv((2, 3), (2, 3)), torch.randn(2, 1, 1, SQ, SK, dtype=torch.float64)
    call = functools.partial(attention, bias=bias)
    many = [torch.stack([t, t.flip(0)], 2) for t in tensors]
    each = torch.stack([call(*(t.select(2, i) for t in many)) for i in range(2)])
    assert_close(torch.vmap(call, 2)(*many), each)
    gradients = torch.vmap(torch.func.grad(lambda b: attention(*tensors, bias=b).sin().sum()))(
        torch.stack([bias, 2 * bias])
    )
    assert gradients.shape == (2, *bias.shape)
    tangent = torch.randn_like(tensors[0])
    with forward_ad.dual_level():
        moved = forward_ad.unpack_dual(call(forward_ad.make_dual(tensors[0], tangent), *tensors[1:])).tangent
    assert_close(moved, torch.func.jvp(lambda q: call(q, *tensors[1:]), (tensors[0],), (tangent,))[1])


def test_meta_tensors_and_empty_ones() -> None:
    q, k, v = (t.to("meta") for t in qkv((2, 3), (2, 3)))
    for bias in ((2, 1, HQ, SQ, SK), (SK,)):
        out, lse = attention(q, k, v, bias=torch.empty(bias, dtype=q.dtype, device="meta"), return_lse=True)
        assert (out.device.type, out.shape, lse.shape) == ("meta", (2, 3, HQ, SQ, D), (2, 3, HQ, SQ))
    for lead in ((0, 3), (2, 0)):
        bias = torch.randn(lead[0], 1, HQ, SQ, SK, dtype=torch.float64)
        out, lse = attention(*qkv(lead, lead), bias=bias, dropout_p=0.1, return_lse=True)
        assert (out.shape, lse.shape) == ((*lead, HQ, SQ, D), (*lead, HQ, SQ))


@pytest.mark.parametrize("leads", [((3,), (2, 3)), ((1,), (2, 3)), ((3,), (2, 1), (3,)), ((3,), (3,), (2, 3))], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_keys_or_values_alone_have_more_dimensions(leads: tuple[tuple[int, ...], ...], biased: bool) -> None:
    tensors = [t.requires_grad_() for t in qkv(*leads)]
    whole = [t.expand(2, 3, *t.shape[-3:]) for t in tensors]
    options = {"bias": torch.randn(2, 1, HQ, SQ, SK, dtype=torch.float64)} if biased else {}
    ours, exact = (attention(*given, return_lse=True, return_max_score=True, **options) for given in (tensors, whole))
    assert_close(ours, exact)
    assert_close(attention(*tensors, **options), exact[0])
    found, expected = (torch.autograd.grad(results[0].sin().sum(), tensors) for results in (ours, exact))
    assert_close(found, expected)
    if tensors[1].dim() > 4:
        assert_close(*(attention_weights(*given[:2], **options) for given in (tensors, whole)))


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_results_are_dense_in_the_order_of_the_inputs(batch: int, gradient: bool) -> None:
    q, k, v = torch.randn(3, batch, 3, SQ, HQ, D).transpose(3, 4).unbind()
    bias = torch.randn(batch, 1, HQ, SQ, SQ, requires_grad=gradient)
    assert attention(q, k, v, bias=bias).transpose(2, 3).is_contiguous()


@pytest.mark.parametrize("gradient", [False, True])
def test_memory_is_not_that_of_all_scores(gradient: bool) -> None:
    """128 sequences of a batch share a bias; its gradient takes the kernels 32 MB of sums at most."""
    q, k, v = (torch.randn(2, 128, 2, 256, 16, requires_grad=gradient) for _ in range(3))
    bias = torch.randn(2, 1, 2, 256, 256, requires_grad=gradient)
    mask = torch.rand(2, 128, 1, 1, 256) < 0.9

    def call() -> None:
        out = attention(q, k, v, bias=bias, mask=mask, causal=False)
        if gradient:
            torch.autograd.grad(out.sum(), (q, k, v, bias))

    call()
    rows = 4 * q.numel()
    assert memory_needed(call) < (8 * rows + 2**25 + 4e6 if gradient else 3 * rows) < 4 * 2 * 128 * 2 * 256 * 256


def test_masks_of_the_library() -> None:
    tensors = qkv((2, 3), (2, 3))
    for ranges in (masks.padding([4, 7], SK, seqlen_q=1)[:, None], masks.padding([2, 7, 5], SK, seqlen_q=1)):
        found = attention(*tensors, causal=False, key_ranges=ranges)
        keys = torch.arange(SK)
        seen = (ranges[..., :1] <= keys) & (keys < ranges[..., 1:])
        assert_close(found, attention(*tensors, causal=False, mask=seen.unsqueeze(-3)))


def test_a_mask_of_the_other_polarity_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polarity, "_warned", False)
    with pytest.warns(UserWarning, match="no query sees a key"):
        attention(*qkv((2, 3), (2, 3)), mask=torch.zeros(2, 1, 1, SQ, SK, dtype=torch.bool))
