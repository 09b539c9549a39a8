"""Promise: latent attention over a cache of latent vectors equals the expanded heads, up to rounding."""

import copy
import re
from typing import Any

import pytest
import torch
from support.modules import (
    ARGUMENTS,
    CONTEXT_LENGTH,
    D_IN,
    ROWS,
    assert_same,
    cache_for,
    doubles,
    error,
    gradients,
    pair,
    sequences,
)

from pyattn import KVCache, nn, reference

NAME = "MultiHeadLatentAttention"
SIZES = ARGUMENTS[NAME]

VARIANTS: dict[str, dict[str, Any]] = {
    "one query projection": {"q_lora_rank": None},
    "halves": {"rope_interleave": False, "rope_theta": 100.0},
    "no positions": {"rope_theta": None, "qk_rope_head_dim": 3},
    "a scale": {"softmax_scale": 0.7},
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def made(**changes: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The native and the plain module in float64."""
    names = ("hidden_size", "num_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    arguments = dict(zip((*names, "v_head_dim"), SIZES, strict=False)) | changes
    twins = []
    for home in (nn, reference):
        torch.manual_seed(0)
        twins.append(home.MultiHeadLatentAttention(**arguments).double())
    return twins[0], twins[1]


def in_steps(module: torch.nn.Module, x: torch.Tensor, cached: KVCache, *steps: int) -> torch.Tensor:
    return torch.cat([module(part, kv_cache=cached) for part in x.split(steps, 1)], 1)


@each_variant
@pytest.mark.parametrize("page_size", [None, 16])
def test_variants_equal_plain(variant, page_size):
    """Expanded with gradients, and absorbed."""
    native, plain = made(**VARIANTS[variant])
    x = sequences(2, ROWS).requires_grad_()
    out, exact = native(x), plain(x)
    assert_same(out, exact)
    found, expected = gradients(out, [x, *native.parameters()]), gradients(exact, [x, *plain.parameters()])
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)
    assert_same(in_steps(native, x, cache_for(native, page_size=page_size), 5, 1, 3), exact)
    assert native.state_dict().keys() == plain.state_dict().keys()


def test_gradients_over_a_cache():
    """The newest tokens' own gradients: those of the queries; what is cached takes part as a constant."""
    native, _ = doubles(NAME)
    x, cached = sequences(2, ROWS), cache_for(native)
    native(x[:, :-1], kv_cache=cached)
    last = x[:, -1:].clone().requires_grad_()

    def call(last: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        cached.truncate(ROWS - 1)
        return torch.func.functional_call(native, {"q_b_proj.weight": weight}, (last,), {"kv_cache": cached})

    weight = native.q_b_proj.weight.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(call(last, weight).sum(), weight)
    step = 1e-6 * torch.randn_like(weight)
    with torch.no_grad():
        change = call(last, weight + step).sum() - call(last, weight - step).sum()
    torch.testing.assert_close((2 * found * step).sum(), change, rtol=1e-6, atol=0)


def test_which_form_takes_fewer_operations(monkeypatch):
    """A prompt expands; one token absorbs, and so do a few after many, and all tokens of a ring buffer."""
    native, _ = doubles(NAME)
    absorbed, absorb = [], type(native)._absorbed
    monkeypatch.setattr(
        type(native), "_absorbed", lambda self, q, *rest: (absorbed.append(q.shape[1]), absorb(self, q, *rest))[1]
    )
    for options, expected in (({}, [1, 3]), ({"page_size": 16}, [1, 3]), ({"window": (4, 0)}, [5, 1, 3])):
        in_steps(native, sequences(2, ROWS), cache_for(native, **options), 5, 1, 3)
        assert absorbed == expected
        absorbed.clear()


@pytest.mark.parametrize("page_size", [None, 16])
def test_beams(page_size):
    native, _ = doubles(NAME)
    x, cached = sequences(3, 7), cache_for(native, 3, page_size=page_size)
    native(x[:, :6], kv_cache=cached)
    cached.reorder([2, 0, 0])
    chosen = torch.cat([x[[2, 0, 0], :6], x[:, 6:]], 1)
    assert_same(native(x[:, 6:], kv_cache=cached), native(chosen)[:, 6:])


def test_a_ring_is_a_window():
    native, _ = doubles(NAME)
    x = sequences(2, 60)
    seen = torch.ones(60, 60, dtype=torch.bool).triu(-4)
    steps = in_steps(native, x, cache_for(native, window=(4, 0)), *[7] * 8, 4)
    assert_same(steps, native(x, mask=seen))


def test_angles_from_elsewhere():
    """The tables of all positions equal the module's own; a cache continues with a part of them."""
    native, _ = doubles(NAME)
    x, half = sequences(2, ROWS), native.qk_rope_head_dim // 2
    angle = torch.outer(torch.arange(ROWS).double(), 10000.0 ** (-torch.arange(half).double() / half))[None]
    tables = angle.cos(), angle.sin()
    assert_same(native(x, position_embeddings=tables), native(x))
    cached = cache_for(native)
    for part in (slice(0, 5), slice(5, ROWS)):
        step = native(x[:, part], position_embeddings=tuple(t[:, part] for t in tables), kv_cache=cached)
        assert_same(step, native(x)[:, part])
    stretched = tuple(t * 1.5 for t in tables)
    assert error(native(x, position_embeddings=stretched), native(x)) > 1e-3
    expected = "pyattn: position_embeddings must be (cos, sin), each (2 or 1, 9, 2), got "
    for wrong, got in ((tables[:1], "(1, 9, 2)"), ((tables[0], 3), "(1, 9, 2), 3"), ((x, x), "(2, 9, 12), (2, 9, 12)")):
        with pytest.raises(ValueError, match=f"^{re.escape(expected + got)}$"):
            native(x, position_embeddings=wrong)
    with pytest.raises(TypeError, match=r"^pyattn: position_embeddings must be tuple, got torch.Tensor of shape "):
        native(x, position_embeddings=x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accuracy_over_a_cache(dtype):
    """At most twice the plain module's error in this dtype, plus 4 roundings, summed over draws."""
    native, plain = (module.to(dtype) for module in pair(NAME))
    exact, spent, allowed = copy.deepcopy(plain).double(), 0.0, 0.0
    for _ in range(32):
        x = torch.randn(2, ROWS, D_IN).to(dtype)
        cached = KVCache(2, 1, CONTEXT_LENGTH, 11, head_dim_v=7, shared_values=True, dtype=dtype)
        with torch.no_grad():
            out, theirs, target = in_steps(native, x, cached, 5, 1, 3), plain(x), exact(x.double())
        assert out.dtype == dtype
        spent += error(out, target)
        allowed += 2 * error(theirs, target) + 4 * torch.finfo(dtype).eps
    assert spent <= allowed


def test_autocast_over_a_cache():
    native, _ = pair(NAME)
    x = torch.randn(2, ROWS, D_IN)
    cached = KVCache(2, 1, CONTEXT_LENGTH, 11, head_dim_v=7, shared_values=True, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        steps, whole = in_steps(native, x, cached, 5, 1, 3), native(x)
    assert steps.dtype == whole.dtype == torch.bfloat16
    assert error(steps, native(x).double()) < 0.05


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_once_for_all_lengths():
    native, _ = doubles(NAME)
    compiled = torch.compile(native, backend="aot_eager", fullgraph=True)
    x, cached = sequences(2, ROWS), cache_for(native)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        steps = [compiled(x[:, t : t + 1], kv_cache=cached) for t in range(ROWS)]
    assert_same(torch.cat(steps, 1), native(x))


def test_a_cache_of_another_kind():
    native, _ = doubles(NAME)
    apart = KVCache(2, 1, CONTEXT_LENGTH, 11, head_dim_v=7, dtype=torch.float64)
    shared = KVCache(2, 2, CONTEXT_LENGTH, 4, shared_values=True, dtype=torch.float64)
    for module, cached, got in ((native, apart, "False and True"), (doubles("MHAEinsum")[0], shared, "True and False")):
        message = f"pyattn: the cache's shared_values must be that of the module's keys, got {got}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            module(sequences(2, 3), kv_cache=cached)
        assert cached.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("bias", [False, True])
def test_a_projection_that_cannot_be_absorbed(bias):
    """It works where it is called."""
    native, plain = doubles(NAME)
    for module in (native, plain):
        linear = torch.nn.Linear(7, 18, bias=bias, dtype=torch.float64)
        torch.nn.init.ones_(linear.weight)
        module.kv_b_proj = linear if bias else torch.nn.Sequential(linear, torch.nn.Tanh())
        if bias:
            torch.nn.init.ones_(linear.bias)
    x, cached = sequences(2, 3), cache_for(native)
    assert_same(native(x), plain(x))
    message = "pyattn: kv_b_proj must be nn.Linear without bias over a kv_cache, which absorbs its weight, got "
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}(Linear|Sequential)"):
        native(x, kv_cache=cached)
    assert cached.lengths.tolist() == [0, 0]


def test_the_dtype_of_weights():
    module = nn.MultiHeadLatentAttention(*SIZES, dtype=torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module(torch.randn(1, 3, D_IN).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"rope_theta": 0},
            ValueError,
            "rope_theta must be a base above 0, with an even qk_rope_head_dim, got 0 and 4",
        ),
        ({"rope_theta": "10"}, TypeError, "rope_theta must be int or float, got '10'"),
        ({"rope_interleave": 1}, TypeError, "rope_interleave must be bool, got 1"),
        ({"attention_bias": "no"}, TypeError, "attention_bias must be bool, got 'no'"),
        ({"softmax_scale": float("inf")}, ValueError, "softmax_scale must be finite and at least 0, got inf"),
    ],
)
def test_constructor_errors(changes, kind, message):
    with pytest.raises(kind, match=f"^{re.escape('pyattn: ' + message)}$"):
        nn.MultiHeadLatentAttention(*SIZES[:7], **changes)
