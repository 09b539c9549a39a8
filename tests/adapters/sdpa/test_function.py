"""Promise: each argument of scaled_dot_product_attention means what it means in torch, forward and backward."""

import functools
import math
import random
from contextlib import nullcontext

import pytest
import torch
from support import yardstick
from support.adapters.gradients import assert_accurate, with_gradients
from support.adapters.sdpa import by_formula, by_torch, random_case
from support.assertions import refused
from support.cases import memory_needed
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from pyattn import masks
from pyattn.adapters import sdpa
from pyattn.adapters.sdpa import SdpaError, scaled_dot_product_attention


def native_and_torchs(**options):
    return (functools.partial(function, **options) for function in (scaled_dot_product_attention, by_torch))


@pytest.mark.parametrize("seed", range(150))
def test_any_shapes_as_torch(seed):
    tensors, options = random_case(seed)
    ours, theirs = (with_gradients(function, *tensors) for function in native_and_torchs(**options))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(150, 250))
def test_masks_with_is_causal_and_learned_scales(seed):
    """Both hide; the gradient of a scale reaches it."""
    tensors, options = random_case(seed)
    draw = random.Random(-seed)
    scale = draw.choice([None, torch.tensor(draw.uniform(-2, 2), dtype=draw.choice([torch.float32, torch.float64]))])
    is_causal = draw.random() < 0.8
    gqa = options["enable_gqa"]

    def call(function, query, key, value, mask, scale):
        return function(query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=gqa)

    ours, truth = (
        with_gradients(functools.partial(call, function), *tensors, scale)
        for function in (scaled_dot_product_attention, by_formula)
    )
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
    if scale is not None:
        number = scaled_dot_product_attention(*tensors, is_causal=is_causal, scale=scale.item(), enable_gqa=gqa)
        torch.testing.assert_close(ours[0], number, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_dropout_with_a_mask_and_is_causal(kind):
    """No kernel of torch takes all three. Hidden keys have no weight, others are kept with 1 - p, scaled."""
    q, k = torch.randn(2, 1, 2, 40, 8, dtype=torch.float64)
    v = torch.eye(40, dtype=torch.float64).expand(1, 2, 40, 40)
    mask = torch.rand(40, 40) < 0.5 if kind == "bool" else torch.randn(40, 40, dtype=torch.float64)
    exact = scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    weights = scaled_dot_product_attention(q, k, v, mask, dropout_p=0.25, is_causal=True)
    kept = weights != 0
    torch.testing.assert_close(weights[kept], exact[kept] / 0.75)
    visible = (exact != 0).sum().item()
    assert abs(kept.sum().item() / visible - 0.75) < 5 * math.sqrt(0.25 * 0.75 / visible)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_learned_scale_is_accurate(dtype):
    q, k, v = (torch.randn(2, 3, 70, 33).to(dtype) for _ in range(3))
    scale = torch.tensor(0.27, dtype=dtype)

    def call(function, *tensors):
        *qkv, factor = tensors
        return function(*qkv, scale=factor)

    def plain(query, key, value, scale):
        return by_torch(query * scale, key, value, scale=1.0)

    assert_accurate(
        functools.partial(call, scaled_dot_product_attention), functools.partial(call, plain), q, k, v, scale
    )


def test_the_gradient_of_a_wide_scale_exceeds_float16():
    q, k, v = (torch.randn(2, 3, 70, 33).half() for _ in range(3))

    def gradient(*qkv):
        scale = torch.tensor(0.3, requires_grad=True, dtype=torch.promote_types(qkv[0].dtype, torch.float32))
        out = scaled_dot_product_attention(*qkv, scale=scale)
        return torch.autograd.grad(out, scale, 50 * out.detach())[0]

    found, exact = gradient(q, k, v), gradient(q.double(), k.double(), v.double())
    assert exact.abs() > torch.finfo(torch.float16).max
    torch.testing.assert_close(found.double(), exact, rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["causal", "bool", "float", "wide"])
def test_accuracy(dtype, kind):
    """By yardstick.py's rule, with torch's math backend as plain PyTorch; the mask may be float32 beside 16 bits."""
    q, k, v = torch.randn(2, 6, 70, 33), torch.randn(2, 2, 90, 33), torch.randn(2, 2, 90, 20)
    mask = {"causal": None, "bool": torch.rand(70, 90) < 0.8}.get(kind, torch.randn(2, 1, 70, 90))
    q, k, v = (t.to(dtype) for t in (q, k, v))
    mask = mask.to(dtype) if kind == "float" else mask
    assert_accurate(*native_and_torchs(is_causal=kind == "causal", enable_gqa=True), q, k, v, mask)


@pytest.mark.parametrize(
    "mask", [torch.tensor([True, False, True])[:, None], torch.tensor([0.0, -math.inf, 0.0])[:, None]]
)
def test_rows_that_see_nothing_are_zero(mask):
    tensors = (*torch.randn(3, 2, 2, 3, 8), mask.expand(3, 3))
    ours, theirs = (with_gradients(function, *tensors) for function in native_and_torchs())
    assert not ours[0][:, :, 1].any()
    assert not ours[1][:, :, 1].any()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4), (3, 5, 0)], ids=["queries", "keys", "columns"])
def test_empty(sizes):
    seqlen_q, seqlen_k, head_dim = sizes
    q, k = torch.randn(2, seqlen_q, head_dim), torch.randn(2, seqlen_k, head_dim)
    v = torch.randn(2, seqlen_k, 6)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v), by_torch(q, k, v))
    assert scaled_dot_product_attention(q[:0], k[:0], v[:0]).shape == (0, seqlen_q, 6)


@pytest.mark.parametrize("lengths", [(4, 6), (5, 5), (3, 1)])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_causal_biases(make, lengths):
    q, (k, v) = torch.randn(2, 3, lengths[0], 8), torch.randn(2, 2, 3, lengths[1], 8)
    out, other = (f(q, k, v, make(*lengths)) for f in (scaled_dot_product_attention, by_torch))
    torch.testing.assert_close(out, other)
    with refused(SdpaError, "a CausalBias must have the lengths of query and key, got (7, 9) for"):
        scaled_dot_product_attention(q, k, v, make(7, 9))
    with refused(SdpaError, "attn_mask must not be set together with is_causal, got a CausalBias"):
        scaled_dot_product_attention(q, k, v, make(*lengths), is_causal=True)


@pytest.mark.parametrize("batches", [(2,), (1,), (3, 2)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_ranges_are_known_by_their_type(is_causal, batches):
    query, key, value = torch.randn(3, *batches, 4, 6, 8)
    ranges = masks.padding([5, 3, 6, 2, 4, 1][: math.prod(batches)], 6)
    keys = torch.arange(6)
    seen = (ranges[..., :1] <= keys) & (keys < ranges[..., 1:])
    if is_causal:
        seen = seen.tril()
    truth = scaled_dot_product_attention(query, key, value, seen.reshape(*batches, 1, 6, 6))
    out = scaled_dot_product_attention(query, key, value, ranges, is_causal=is_causal)
    torch.testing.assert_close(out, truth)
    if is_causal:
        with pytest.raises(ValueError, match="need causal=False"):
            scaled_dot_product_attention(query, key, value, masks.prefix_lm(2, 6), is_causal=True)
    with refused(TypeError, "attn_mask must be bool"):  # other integer tensors are not ranges
        scaled_dot_product_attention(query, key, value, torch.zeros(6, 6, dtype=torch.int64))


def test_batches_of_ranges_that_do_not_fit():
    with refused(SdpaError, "KeyRanges must have 6 batches or 1, those of query, key and value, got shape (4, 5, 2)"):
        scaled_dot_product_attention(*torch.randn(3, 2, 3, 4, 5, 8), masks.padding([5, 3, 1, 2], 5))


@pytest.mark.parametrize("switched", [False, True])
def test_a_mask_that_broadcasts_over_batches_is_read_in_place(switched):
    """128 rows of a batch share its bias, as in triangle attention, and the gradient has the size of the bias."""
    q, k, v = (torch.randn(2, 128, 2, 256, 16, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 1, 2, 256, 256, requires_grad=True)
    function = torch.nn.functional.scaled_dot_product_attention if switched else scaled_dot_product_attention

    def step():
        with sdpa.enabled() if switched else nullcontext():
            torch.autograd.grad(function(q, k, v, bias).sum(), (q, k, v, bias))

    step()
    scores = 4 * 2 * 128 * 2 * 256 * 256
    assert memory_needed(step) < 0.9 * scores


def test_odd_strides():
    q, k, v = torch.randn(3, 2, 20, 4, 24)[..., ::3].transpose(2, 3).unbind()
    k = k.flip(2)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v), by_torch(q, k, v))
    one = torch.randn(20, 8).expand(2, 4, 20, 8)
    torch.testing.assert_close(scaled_dot_product_attention(q, one, one), by_torch(q, one, one))


def test_dropout_draws_from_torchs_generator():
    q, k = torch.randn(2, 1, 2, 40, 8)
    v = torch.eye(40).expand(1, 2, 40, 40)  # the result is the weights after dropout
    exact = by_torch(q, k, v)
    torch.manual_seed(1)
    first, second = (scaled_dot_product_attention(q, k, v, dropout_p=0.25) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.25), first)
    assert not torch.equal(first, second)
    kept = first != 0
    torch.testing.assert_close(first[kept], exact[kept] / 0.75)
    deviation = math.sqrt(0.25 * 0.75 / kept.numel())
    assert abs(kept.double().mean().item() - 0.75) < 5 * deviation


@pytest.mark.parametrize("p", [1, 1.0])
def test_dropout_of_everything(p):
    q, k, v = torch.randn(3, 2, 3, 8).requires_grad_().unbind()
    out = scaled_dot_product_attention(q, k, v, dropout_p=p)
    assert not out.any()
    assert not torch.autograd.grad(out.sum(), v)[0].any()


def test_autocast():
    q, k, v = torch.randn(3, 2, 2, 20, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out, other = (f(q, k, v, torch.randn(20, 20) * 0) for f in (scaled_dot_product_attention, by_torch))
    assert out.dtype == other.dtype == torch.bfloat16
    yardstick.assert_accurate("out", out, other, by_torch(q.double(), k.double(), v.double()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": (8,)}, "query, key and value must have at least 2 dimensions, got shapes (8,), (2, 4, 5, 8) and "),
        ({"query": (2, 4, 5, 7)}, "query and key must have the same last dimension, got shapes (2, 4, 5, 7) and (2, "),
        ({"value": (2, 4, 6, 8)}, "key and value must have the same length, got shapes (2, 4, 5, 8) and (2, 4, 6, 8)"),
        ({"query": (2, 8, 5, 8)}, "the dimensions of query, key and value before the last two must broadcast (for "),
        ({"query": (5, 8), "enable_gqa": True}, "with enable_gqa, query, key and value must have heads, at least 3 "),
        ({"query": (6, 5, 8), "enable_gqa": True}, "with enable_gqa, the heads of query must be a multiple of those "),
        ({"value": (2, 2, 5, 8), "enable_gqa": True}, "with enable_gqa, key and value must have the same number of "),
        ({"attn_mask": (4, 5)}, "attn_mask must broadcast to the scores' shape (2, 4, 5, 5), got shape (4, 5)"),
        ({"attn_mask": (1, 2, 4, 5, 5)}, "attn_mask must broadcast to the scores' shape (2, 4, 5, 5), got shape (1, 2"),
        ({"dropout_p": -0.1}, "dropout_p must be between 0 and 1, got -0.1"),
        ({"dropout_p": 1.5}, "dropout_p must be between 0 and 1, got 1.5"),
        ({"dropout_p": math.nan}, "dropout_p must be between 0 and 1, got nan"),
        ({"scale": math.inf}, "scale must be finite, got inf"),
        ({"scale": (1,)}, "scale must be a number or a tensor of 0 dimensions, got shape (1,)"),
    ],
)
def test_value_errors(change, message):
    tensors = dict.fromkeys(("query", "key", "value"), (2, 4, 5, 8)) | change
    arguments = {name: torch.ones(x) if isinstance(x, tuple) else x for name, x in tensors.items()}
    with refused(SdpaError, message):
        scaled_dot_product_attention(**arguments)
    assert issubclass(SdpaError, ValueError)
    assert issubclass(SdpaError, RuntimeError), "what torch raises"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": None}, "query must be Tensor, got None"),
        ({"attn_mask": [1]}, "attn_mask must be Tensor, got [1]"),
        ({"attn_mask": torch.ones(5, 5, dtype=torch.int64)}, "attn_mask must be bool, query's dtype or float32, got "),
        (
            {"attn_mask": torch.ones(5, 5, dtype=torch.float16)},
            "attn_mask must be bool, query's dtype or float32, got ",
        ),
        ({"is_causal": 1}, "is_causal must be bool, got 1"),
        ({"enable_gqa": 1}, "enable_gqa must be bool, got 1"),
        ({"dropout_p": "0"}, "dropout_p must be int or float, got '0'"),
        ({"scale": "1"}, "scale must be int or float, got '1'"),
        ({"scale": torch.tensor(1)}, "scale must have a floating-point dtype, got torch.int64"),
    ],
)
def test_type_errors(change, message):
    arguments = dict.fromkeys(("query", "key", "value"), torch.ones(2, 4, 5, 8)) | change
    with refused(TypeError, message):
        scaled_dot_product_attention(**arguments)


def test_dtypes_that_no_kernel_takes():
    ints = torch.ones(2, 4, 5, 8, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"^pyattn: dtype must be float64, .*, got int64$"):
        scaled_dot_product_attention(ints, ints, ints)
    with refused(TypeError, " dtype", inside=True):
        scaled_dot_product_attention(ints.float(), ints.double(), ints.double())
    nested = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(2, 8)], layout=torch.jagged)
    with pytest.raises(NotImplementedError, match=r"^pyattn: query must be a dense tensor, got a nested one$"):
        scaled_dot_product_attention(nested, nested, nested)
