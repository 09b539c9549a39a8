"""Promise: under the switch, transforms and forward mode of torch's SDPA are computed natively, two deep."""

import functools
import random

import pytest
import torch
from support.adapters.sdpa import by_formula, by_torch, detached, random_case
from support.assertions import assert_close
from support.transforms import FEW, TRANSFORMS, flat, one_by_one
from torch import nn
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention  # bound before the switch is on, as in models
from torch.testing._internal.two_tensor import TwoTensor

from pyattn.adapters.sdpa import counts, enabled, reset_counts

pytestmark = [
    pytest.mark.usefixtures("nothing_counted"),
    # torch scripts its own forward-mode rules on first use; the category is FutureWarning since torch 2.15.
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),
]

SMALL = (1, 2, 2, 2), (1, 1, 3, 2), (1, 1, 3, 1)
ONE_HEAD = (2, 2), (3, 2), (3, 1)
CASES = {
    "plain": (SMALL, {}),
    "mask and causal": ((*SMALL, (2, 1, 3)), {"is_causal": True, "scale": 0.7}),
    "grouped": (((1, 2, 2, 2), (1, 1, 3, 2), (1, 1, 3, 1), (2, 3)), {"enable_gqa": True}),
    "no batch": (ONE_HEAD, {"is_causal": True}),
}


def formula(query, key, value, mask=None, *, is_causal=False, scale=None, enable_gqa=False):
    return by_formula(query, key, value, mask, is_causal, scale, enable_gqa)


def two_deep(outer, inner, function, slices):
    """The ``outer`` transform of the ``inner`` one; vmap as a loop if ``slices``."""
    a, b = (one_by_one if each == "vmap" and slices else TRANSFORMS[each][1] for each in (outer, inner))
    return flat(a(flat(b(flat(function)))))


@pytest.mark.parametrize(
    ("name", "outer", "inner"),
    [
        (name, outer, inner)
        for name in CASES
        for outer in (TRANSFORMS if name == "mask and causal" else FEW)
        for inner in (TRANSFORMS if name == "mask and causal" else FEW)
    ],
)
def test_two_deep(name, outer, inner):
    """Third derivatives are torch's own, and counted."""
    shapes, options = CASES[name]
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    ours, truth = (functools.partial(function, **options) for function in (scaled_dot_product_attention, formula))
    third = TRANSFORMS[outer][0] + TRANSFORMS[inner][0] > 2
    if third and options.get("is_causal") and len(inputs) == 4:
        inputs, ours, truth = inputs[:3], *(functools.partial(f, scale=0.7) for f in (ours.func, truth.func))
    with enabled():
        found = two_deep(outer, inner, ours, slices=False)(*inputs)
    assert_close(found, two_deep(outer, inner, truth, slices=True)(*inputs), 1e-10)
    taken, traced, by_torch = counts()
    assert (taken == 0) == third
    assert traced == 0
    assert [*by_torch] == ["third derivatives"] * third


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed):
    """Two transforms of a random call: any broadcasting, masks together with is_causal, grouped heads, both scales."""
    draw = random.Random(seed)
    (query, key, value, mask), options = random_case(1000 + seed)
    options["is_causal"] = draw.random() < 0.5
    if mask is not None:
        mask = torch.atleast_1d(mask)
        mask[..., :1] = mask.dtype == torch.bool  # derivatives of torch's formula are NaN in rows that see nothing
    outer, inner = draw.choice(FEW), draw.choice(FEW)
    learned = (query, key, value)
    if mask is not None and mask.dtype != torch.bool and mask.isfinite().all():
        learned = (*learned, mask)

    def call(function, query, key, value, own=mask):
        return function(query, key, value, own, **options)

    with enabled():
        found = two_deep(outer, inner, functools.partial(call, scaled_dot_product_attention), slices=False)(*learned)
    assert_close(found, two_deep(outer, inner, functools.partial(call, formula), slices=True)(*learned), 1e-10)
    assert counts().torch == {}
    assert counts().taken > 0


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_dual_tensors(mode):
    q, k, v = detached()
    mask = torch.randn(6, 6, dtype=torch.float64)

    def tangents(function):
        with forward_ad.dual_level(), mode():
            duals = [forward_ad.make_dual(x, x.sin()) for x in (q, k, v, mask)]
            return forward_ad.unpack_dual(function(*duals))

    with enabled():
        ours = tangents(scaled_dot_product_attention)
    assert counts() == (1, 0, {})
    assert_close([*ours], [*tangents(by_torch)], 1e-12)


def test_torchs_own_helpers():
    """Jacobians that are batches of gradients or of tangents, and a Hessian of recorded operations."""
    q, k, v = (x[:1, :1, :2] for x in detached())
    helpers = torch.autograd.functional

    def results(attend):
        def function(x):
            return attend(x, k, v)

        x = q.clone().requires_grad_()
        many = torch.eye(16, dtype=torch.float64).view(16, 1, 1, 2, 8)
        return [
            helpers.jacobian(function, q, strategy="forward-mode", vectorize=True),
            helpers.jacobian(function, q, vectorize=True),
            helpers.hessian(lambda x: function(x).sin().sum(), q),
            torch.autograd.grad(function(x), x, many, is_grads_batched=True)[0],
        ]

    with enabled():
        ours = results(scaled_dot_product_attention)
    assert counts() == (4, 0, {})
    assert_close(ours, results(by_torch), 1e-12)


def test_gradients_of_each_sample():
    """A model's parameters, functionally: what Opacus and influence functions do."""
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    x = torch.randn(3, 5, 8, dtype=torch.float64)

    def loss(weights, sample):
        return torch.func.functional_call(model, weights, (sample[None],)).sin().sum()

    with enabled():
        ours = torch.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    assert counts() == (1, 0, {})
    plain = [torch.func.grad(loss)(weights, sample) for sample in x]
    assert_close(ours, {name: torch.stack([one[name] for one in plain]) for name in weights}, 1e-11)


def test_dropout_is_as_random_as_vmap_says():
    q, k, v = detached(torch.float32)

    def call(randomness):
        return torch.vmap(lambda x: scaled_dot_product_attention(x, k, v, dropout_p=0.5), randomness=randomness)(
            torch.stack([q, q])
        )

    with enabled():
        first, second = call("same")
        assert torch.equal(first, second)
        first, second = call("different")
        assert not torch.equal(first, second)
        with pytest.raises(RuntimeError, match="called random operation while in randomness error mode"):
            call("error")


def test_autocast():
    q, k, v = detached(torch.float32)
    with enabled(), torch.autocast("cpu", torch.bfloat16):
        out = torch.vmap(scaled_dot_product_attention)(q, k, v)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, scaled_dot_product_attention(q, k, v))
    assert counts() == (2, 0, {})


def traced(q, k, v):
    """E and Ev differ, so torch composes its result of operations that can be differentiated."""
    return torch.func.linearize(lambda x: scaled_dot_product_attention(x, k, v), q)[1](q)


def compiled(q, k, v):
    function = torch.vmap(lambda x: scaled_dot_product_attention(x, k, v))
    return torch.compile(function, backend="aot_eager")(q[None])


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # by torch.func.linearize
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (traced, "forward mode or second derivatives under a tracer, such as torch.func.linearize"),
        (compiled, "transforms of torch.func in compiled code"),
        (
            lambda q, k, v: torch.func.functionalize(lambda x: scaled_dot_product_attention(x, k, v))(q),
            "torch.func.functionalize",
        ),
        (
            lambda q, k, v: torch.vmap(lambda x: by_torch(x, k, v))(q[None]),
            "torch.nn.attention.sdpa_kernel without FLASH_ATTENTION",
        ),
        (
            lambda q, k, v: torch.vmap(lambda x: scaled_dot_product_attention(x, k, v))(q[None, :, :, :0]),
            "query or key without elements",
        ),
    ],
    ids=["linearize", "compile", "functionalize", "math", "empty"],
)
def test_what_torch_computes(call, reason):
    q, k, v = detached()
    v = v[..., :5]
    plain = call(q, k, v)
    torch.compiler.reset()
    reset_counts()
    with enabled():
        under = call(q, k, v)
    assert_close(under, plain, 1e-14)
    assert [*counts().torch] == [reason]


def test_tensors_that_hold_others_are_torchs():
    """Inside the wrappers of a transform too."""
    q, k, v = detached()

    def loss(*tensors):
        return scaled_dot_product_attention(*tensors).sum()

    with enabled():
        torch.func.grad(loss, (0, 1, 2))(TwoTensor(q, q), TwoTensor(k, k), TwoTensor(v, v))
    assert counts().taken == 0
    assert {*counts().torch} == {"tensors of type TwoTensor"}


def test_other_devices_are_not_touched():
    q, k, v = (x.to("meta") for x in detached())
    with enabled():
        assert torch.vmap(scaled_dot_product_attention)(q, k, v).is_meta
    assert counts() == (0, 0, {})
