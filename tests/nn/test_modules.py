"""Promise: a native module equals the plain one in its printed values, its outputs and its gradients."""

import copy
from collections import defaultdict

import pytest
import torch
from support.modules import (
    CONTEXT_LENGTH,
    D_IN,
    D_OUT,
    assert_same,
    doubles,
    error,
    every_module,
    output,
    pair,
    sequences,
)
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyattn import nn

TOKENS = torch.tensor(
    [
        [0.43, 0.15, 0.89],
        [0.55, 0.87, 0.66],
        [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33],
        [0.77, 0.25, 0.10],
        [0.05, 0.80, 0.55],
    ]
)
BATCH = torch.stack([TOKENS, TOKENS])


WEIGHTS = {"bias_q": "W_query", "bias_k": "W_key", "bias_v": "W_value"}
"""MHAEinsum's biases, and their weights (d_in, d_out)."""


def results(module: torch.nn.Module, x: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """The output and every gradient. A bias counts as one more column, or row, of its weight.

    In exact arithmetic the gradient of a key bias is 0, because softmax ignores a term that all keys of a query share:
    alone it has no scale to be judged by.
    """
    module.zero_grad()
    x = x.detach().requires_grad_()
    out = output(module, x)
    out.backward(dout)
    found = {"out": out.detach(), "x": x.grad}
    for name, parameter in module.named_parameters():
        if name.endswith(".bias"):
            weight = name.removesuffix("bias") + "weight"
            found[weight] = torch.cat([found[weight], parameter.grad[:, None]], dim=1)
        elif name in WEIGHTS:
            found[WEIGHTS[name]] = torch.cat([found[WEIGHTS[name]], parameter.grad[None]])
        else:
            found[name] = parameter.grad.clone()
    return found


class RecordSoftmax(TorchFunctionMode):
    """Records the results of torch.softmax: the weights of a plain module."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.softmax:
            self.weights.append(result)
        return result


def printed(rows: Tensor) -> list[list[float]]:
    return [[round(value, 4) for value in row] for row in rows.tolist()]


def test_printed_simplified():
    out, weights = nn.SimplifiedSelfAttention()(TOKENS, need_weights=True)
    assert printed(weights[1:2]) == [[0.1385, 0.2379, 0.2333, 0.1240, 0.1082, 0.1581]]
    assert printed(out[1:2]) == [[0.4419, 0.6515, 0.5683]]
    assert printed(nn.SimplifiedSelfAttention()(TOKENS)[1:2]) == [[0.4419, 0.6515, 0.5683]]


@pytest.mark.parametrize(
    ("name", "arguments", "rows"),
    [
        ("CausalAttention", (3, 2, 6, 0.0), {0: [-0.4519, 0.2216], -1: [-0.5299, -0.1081]}),
        ("MultiHeadAttentionWrapper", (3, 2, 6, 0.0, 2), {-1: [-0.5299, -0.1081, 0.5077, 0.3493]}),
        (
            "MultiHeadAttention",
            (3, 2, 6, 0.0, 2),
            dict(
                enumerate(
                    [
                        [0.3190, 0.4858],
                        [0.2943, 0.3897],
                        [0.2856, 0.3593],
                        [0.2693, 0.3873],
                        [0.2639, 0.3928],
                        [0.2575, 0.4028],
                    ]
                )
            ),
        ),
    ],
)
def test_printed_under_seed_123(name, arguments, rows):
    for module in pair(name, *arguments):
        out = module(BATCH)
        assert torch.equal(out[0], out[1])
        for row, values in rows.items():
            assert printed(out[0, row : row + 1 or None]) == [values]


@every_module
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "seqlen"), [(2, 7), (3, 1), (1, CONTEXT_LENGTH)])
def test_equals_plain(name, dtype, batch, seqlen):
    """Against float64: at most twice the plain module's error in this dtype, plus 4 roundings of the largest value.

    Both sides are summed over draws: in a single draw the plain module can be so lucky that it fails this test against
    itself with its sums reordered. 8 draws decide if their sum is at most half of the limit; otherwise 64 do.
    """
    native, plain = (module.to(dtype) for module in pair(name))
    exact = copy.deepcopy(plain).double()
    spent, allowed = defaultdict[str, float](float), defaultdict[str, float](float)
    for draw in range(64):
        if draw == 8 and all(2 * spent[what] <= allowed[what] for what in spent):
            break
        x = torch.randn(batch, seqlen, D_IN).to(dtype)
        dout = torch.randn_like(output(plain, x))
        ours, theirs = results(native, x, dout), results(plain, x, dout)
        target = results(exact, x.double(), dout.double())
        assert ours.keys() == target.keys()
        for what, value in ours.items():
            assert value.dtype == dtype
            assert value.shape == target[what].shape
            largest = target[what].abs().max().item()
            spent[what] += (value - target[what]).abs().max().item()
            allowed[what] += 2 * (theirs[what] - target[what]).abs().max().item()
            allowed[what] += 4 * torch.finfo(dtype).eps * largest
    for what in spent:
        assert spent[what] <= allowed[what], what


@every_module
def test_gradcheck(name):
    """The plain module's gradients are equal: see the next test."""
    module, _ = pair(name)
    state = {key: value.detach().double().requires_grad_() for key, value in module.named_parameters()}
    x = sequences(2, 4).requires_grad_()

    def call(x, *values):
        return torch.func.functional_call(module, dict(zip(state, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *state.values()), fast_mode=True)


@every_module
def test_equals_plain_in_float64(name):
    native, plain = doubles(name)
    x = sequences(2, 9)
    dout = torch.randn_like(output(plain, x))
    ours, exact = results(native, x, dout), results(plain, x, dout)
    for what in exact:
        assert_same(ours[what], exact[what])


@pytest.mark.parametrize("name", ["SimplifiedSelfAttention", "SelfAttention_v1", "SelfAttention_v2"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_two_dimensional_input(name, need_weights):
    native, _ = pair(name)
    x = torch.randn(7, D_IN)
    alone, batched = native(x, need_weights=need_weights), native(x[None], need_weights=need_weights)
    for one, many in zip(alone, batched, strict=True) if need_weights else [(alone, batched)]:
        assert one.dim() == 2
        assert torch.equal(one, many[0])


@every_module
def test_need_weights(name):
    native, plain = doubles(name)
    x = sequences(2, 7)
    out, weights = native(x, need_weights=True)
    assert torch.equal(native(x, need_weights=False), out), "out alone"
    with RecordSoftmax() as record:
        assert_same(out, output(plain, x))
    expected = torch.stack(record.weights, dim=1) if name.endswith("Wrapper") else record.weights[0]
    assert_same(weights, expected)


@pytest.mark.parametrize("num_heads_kv", [1, 2, 4])
def test_shared_kv_heads_equal_repeated_heads(num_heads_kv):
    shared = nn.MultiHeadAttention(D_IN, D_OUT, CONTEXT_LENGTH, 0.0, 4, num_heads_kv=num_heads_kv).double()
    grouped = nn.GroupedQueryAttention(D_IN, D_OUT, 0.0, 4, num_heads_kv).double()
    grouped.load_state_dict({key: shared.state_dict()[key] for key in grouped.state_dict()})
    state = shared.state_dict()
    for name in ("W_key.weight", "W_value.weight"):
        assert state[name].shape == (num_heads_kv * 2, D_IN)
        state[name] = state[name].unflatten(0, (num_heads_kv, 2)).repeat_interleave(4 // num_heads_kv, 0).flatten(0, 1)
    _, repeated = pair("MultiHeadAttention", D_IN, D_OUT, CONTEXT_LENGTH, 0.0, 4)
    repeated.double().load_state_dict(state)
    x = sequences(2, 7)
    assert_same(shared(x), repeated(x))
    assert_same(grouped(x) + shared.out_proj.bias, repeated(x))


@every_module
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(name, dtype):
    native, plain = pair(name)
    x = torch.randn(16, 7, D_IN).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = output(native, x), output(plain, x)
    exact = output(plain.double(), x.double())
    assert ours.dtype == torch.bfloat16
    assert error(ours, exact) <= 2 * error(theirs, exact) + 4 * torch.finfo(torch.bfloat16).eps
