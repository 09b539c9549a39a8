"""Promise: window, softcap, alibi, sinks and rotary of a module do what their names say; only sinks are state."""

import copy

import pytest
import torch
from support.assertions import assert_close
from support.modules import (
    ARGUMENTS,
    D_IN,
    EXTRAS,
    WITH_EXTRAS,
    assert_same,
    class_of,
    made,
    output,
    plain,
    sequences,
    slopes_of_the_paper,
    turned,
)

from pyattn import nn
from pyattn.nn.rotary import alibi_slopes, rotate

each_module = pytest.mark.parametrize("name", WITH_EXTRAS)
each_extra = pytest.mark.parametrize("extra", EXTRAS)


@each_module
@each_extra
def test_equals_plain(name, extra):
    module = made(name, extra)
    x = sequences(2, 9).requires_grad_()
    leaves = [x, *module.parameters()]
    ours, (exact, weights) = module(x), plain(module, x)
    assert_same(ours, exact)
    grads = [torch.autograd.grad(out.sin().sum(), leaves) for out in (ours, exact)]
    assert_close(*grads)
    out, shown = module(x, need_weights=True)
    assert_same(out, exact)
    assert_same(shown, weights)


@each_extra
def test_extras_on_top_of_a_mask(extra):
    module = made("Attention", extra)
    x, mask = sequences(2, 9), torch.rand(2, 1, 9, 9) < 0.3
    exact, weights = plain(module, x, mask)
    assert_same(module(x, mask), exact)
    assert_same(module(x, mask, need_weights=True)[1], weights)


def test_shared_kv_heads_of_the_callers_module():
    shared = nn.Attention(12, 6, num_heads_kv=2).double()
    assert shared.W_k.weight.shape == shared.W_v.weight.shape == (4, 12)
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    assert_same(shared(x), plain(shared, x)[0])


@each_module
def test_only_sinks_are_in_the_state_dict(name):
    usual = list(class_of(name)(*ARGUMENTS[name]).state_dict())
    for extra in EXTRAS:
        module = made(name, extra)
        new = ["sinks"] if module.sinks is not None else []
        assert sorted(module.state_dict()) == sorted([*usual, *new])
        assert list(module.buffers()) == []
        twin = copy.deepcopy(module)
        twin.load_state_dict(module.state_dict(), strict=True)
        x = sequences(1, 5)
        assert torch.equal(twin(x), module(x))


@each_module
def test_meta_modules_take_real_weights(name):
    real = made(name, "all")
    with torch.device("meta"):
        module = class_of(name)(*ARGUMENTS[name], **EXTRAS["all"])
    module.load_state_dict(real.state_dict(), assign=True)
    x = sequences(2, 7)
    assert torch.equal(module(x), real(x))


@each_module
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_and_autocast(name, dtype):
    exact, x = made(name, "all"), torch.randn(2, 7, D_IN)
    narrow = copy.deepcopy(exact).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        of_autocast, of_narrow = copy.deepcopy(exact).float()(x), narrow(x)
    for out in (narrow(x.to(dtype)), of_autocast, of_narrow):
        assert (out.double() - exact(x.double())).abs().max() < 0.1


def test_the_seed_gives_the_same_weights_with_extras():
    for name in WITH_EXTRAS:
        torch.manual_seed(5)
        usual = class_of(name)(*ARGUMENTS[name]).state_dict()
        torch.manual_seed(5)
        state = class_of(name)(*ARGUMENTS[name], **EXTRAS["all"]).state_dict()
        assert all(torch.equal(state[key], value) for key, value in usual.items())


@pytest.mark.parametrize("num_heads", [1, 2, 3, 8, 12, 25])
def test_slopes_are_those_of_the_paper(num_heads):
    expected = torch.tensor(slopes_of_the_paper(num_heads), dtype=torch.float64)
    torch.testing.assert_close(alibi_slopes(num_heads, dtype=torch.float64), expected, rtol=1e-14, atol=0)
    assert alibi_slopes(num_heads).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rotation(dtype):
    x = torch.randn(2, 50, 3, 8).to(dtype)
    found = rotate(x.transpose(1, 2).contiguous().transpose(1, 2), 10000.0)
    assert found.dtype == dtype
    assert found.is_contiguous(), "position before heads, as projections lay them out"
    # An angle of 50 has an error of 50 eps in float32; a 16-bit result is rounded once.
    compute = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    bound = torch.finfo(dtype).eps / 2 * turned(x, 10000.0).abs() + 50 * compute * x.double().abs().max()
    assert ((found.double() - turned(x, 10000.0)).abs() <= bound).all()


def test_rotated_products_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64).expand(2, 1, 20, 1, 16)
    products = rotate(q, 100.0)[0, :, 0] @ rotate(k, 100.0)[0, :, 0].T
    for distance in range(20):
        diagonal = products.diagonal(-distance)
        assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_output_is_causal_with_a_window():
    module = made("MultiHeadAttention", "window")
    x = sequences(1, 9)
    changed = x.clone()
    changed[:, 4] += 1
    same = (output(module, x) == output(module, changed)).all(-1)[0]
    assert same.tolist() == [True] * 4 + [False] * 3 + [True] * 2
