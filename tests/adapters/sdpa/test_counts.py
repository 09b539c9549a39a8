"""Promise: calls that the switch leaves to torch have torch's bits and torch's messages, and are counted."""

from contextlib import contextmanager

import pytest
import torch
from support.adapters.sdpa import detached, tensors
from support.cases import assert_equal
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention  # bound before the switch is on, as in models
from torch.testing._internal.two_tensor import TwoTensor

from pyattn.adapters.sdpa import counts, enabled
from pyattn.cli import info

pytestmark = pytest.mark.usefixtures("nothing_counted")


def by_math(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda q, k, v: scaled_dot_product_attention(q[:, :, :0], k, v), "query or key without elements"),
        (by_math, "torch.nn.attention.sdpa_kernel without FLASH_ATTENTION"),
    ],
    ids=["empty", "math"],
)
def test_what_torch_computes_is_counted(call, reason):
    def result():
        try:
            return call(q, k, v).tolist()
        except RuntimeError as error:  # of torch 2.15 for a mask beside is_causal
            return str(error)

    q, k, v = detached()
    plain = result()
    with enabled():
        assert result() == plain
    assert counts() == (0, 0, {reason: 1})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda q, k, v: (q.long(), k.long(), v.long()), "dtype must be float64, float32, bfloat16 or float16"),
        (lambda q, k, v: (q[0, 0, 0], k, v), "query, key and value must have at least 2 dimensions"),
        (lambda q, k, v: (q, k[:, :3], v), "the dimensions of query, key and value before the last two must broadcast"),
        (lambda q, k, v: (q, k, v, torch.ones(6, 6, dtype=torch.int64)), "attn_mask must be bool, query's dtype or"),
    ],
    ids=["int64", "rank", "heads", "mask"],
)
def test_errors_stay_torchs(change, reason):
    arguments = change(*tensors())
    with pytest.raises(RuntimeError) as plain:
        scaled_dot_product_attention(*arguments)
    with enabled(), pytest.raises(RuntimeError) as under:
        scaled_dot_product_attention(*arguments)
    assert str(under.value) == str(plain.value)
    ((counted, number),) = counts().torch.items()
    assert counted.startswith(reason)
    assert number == 1


@contextmanager
def fast_path_off():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def layer():
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()


NESTED = {
    "attention": (
        nn.MultiheadAttention(8, 2, batch_first=True).eval(),
        lambda module, x: module(x, x, x, need_weights=False)[0],
        1,
    ),
    "layer": (layer(), lambda module, x: module(src=x), 1),
    "encoder": (nn.TransformerEncoder(layer(), 2).eval(), lambda module, x: module(x), 2),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_are_counted():
    nested = torch.nested.nested_tensor([torch.randn(4, 3, 8), torch.randn(4, 2, 8)])
    plain = scaled_dot_product_attention(nested, nested, nested)
    with enabled():
        out = scaled_dot_product_attention(nested, nested, nested)
    assert_equal(out.unbind(), plain.unbind())
    assert counts() == (0, 0, {"nested tensors": 1})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", [*NESTED])
def test_nested_tensors_in_modules_take_the_fast_path(kind):
    """torch takes them on no other path; beside them, dense tensors are native in evaluation too."""
    module, call, layers = NESTED[kind]
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.strided)
    dense = torch.randn(2, 4, 8)
    with torch.no_grad():
        plain = call(module, nested)
        with enabled():
            assert_equal(call(module, nested).unbind(), plain.unbind())
            assert counts() == (0, 0, {"nested tensors": layers})
            call(module, dense)
            assert counts().taken == layers
        assert_equal(call(module, nested).unbind(), plain.unbind())
        with fast_path_off(), enabled(), pytest.raises((AssertionError, RuntimeError)):
            call(module, nested)
    with enabled(), pytest.raises((AssertionError, RuntimeError)):
        call(module.train(), nested)
    module.eval()
    assert "__call__" not in vars(nn.MultiheadAttention) | vars(nn.TransformerEncoderLayer)


def test_tensors_that_hold_others_are_torchs():
    """DTensor is one; a plain subclass is taken, and the result has its type."""

    class Plain(torch.Tensor):
        pass

    q, k, v = detached()
    with enabled():
        both = scaled_dot_product_attention(TwoTensor(q, q), TwoTensor(k, k), TwoTensor(v, v))
        assert counts() == (0, 0, {"tensors of type TwoTensor": 1})
        assert type(both) is TwoTensor
        assert type(scaled_dot_product_attention(q.as_subclass(Plain), k, v)) is Plain
        assert counts().taken == 1


def test_info_shows_the_switch(capsys):
    assert info.facts("cpu")["SDPA switch"] == "off"
    q, k, v = detached()
    with enabled():
        scaled_dot_product_attention(q, k, v)
        scaled_dot_product_attention(q[:, :, :0], k, v)
        shown = "on: 1 calls taken, 0 traced, 1 to torch (query or key without elements)"
        assert info.facts("cpu")["SDPA switch"] == shown
    assert info.facts("cpu")["SDPA switch"] == shown.replace("on", "off", 1)
