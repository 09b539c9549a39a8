"""Promise: attention takes jagged nested tensors: each sequence gets the result and gradients of a separate call."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from assertions import assert_close, graph_of, refused
from helpers import each_dtype
from torch import Tensor, nn
from varlen.cases import starts
from yardstick import in_double

from pyattn import attention, attention_varlen, reference
from pyattn.masks import KeyRanges, documents

LENGTHS = 3, 17, 0, 5
"""Lengths of the sequences; one is empty."""

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # torch's compiler, of a jagged view
]


def jagged(values: Tensor, offsets: Tensor) -> Any:
    """(tokens, heads, D) -> (B, heads, j, D)."""
    return torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)


def drawn(
    lengths: Sequence[int] = LENGTHS, keys: Sequence[int] | None = None, dtype: torch.dtype = torch.float64
) -> tuple[Any, Any, Any]:
    """q with 4 heads, k and v with 2, values that require gradients."""
    offsets = starts(lengths)
    others = offsets if keys is None else starts(keys)
    sizes = ((sum(lengths), 4, 8, offsets), *((sum(keys or lengths), 2, dim, others) for dim in (8, 6)))
    q, k, v = (jagged(torch.randn(*size, dtype=dtype).requires_grad_(), at) for *size, at in sizes)
    return q, k, v


def ranges(lengths: Sequence[int], keys: Sequence[int], count: int = 1) -> Tensor:
    """Random ranges (tokens, 2), or (tokens, count, 2), counted within each sequence."""
    rows = [torch.randint(n + 1, (m, 2 * count)).sort(-1).values for m, n in zip(lengths, keys, strict=True)]
    return torch.cat(rows) if count == 1 else torch.cat(rows).unflatten(-1, (count, 2))


def one_by_one(q: Any, k: Any, v: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """out (tokens, Hq, Dv), lse (Hq, tokens) and max_score (B, Hq) of the formula, sequence by sequence."""
    begins, found = q.offsets().tolist(), []
    for b, qkv in enumerate(zip(*(t.unbind() for t in (q, k, v)), strict=True)):
        own = dict(options)
        for name in ("alibi_slopes", "q_offset"):
            if isinstance(own.get(name), Tensor) and own[name].dim() == (2 if name == "alibi_slopes" else 1):
                own[name] = own[name][b, None]
        if "key_ranges" in own:
            own["key_ranges"] = own["key_ranges"][None, begins[b] : begins[b + 1]]
        found.append(reference.attention(*(t[None] for t in qkv), return_lse=True, return_max_score=True, **own))
    out, lse, most = zip(*found, strict=True)
    return torch.cat([t[0].transpose(0, 1) for t in out]), torch.cat([t[0] for t in lse], 1), torch.cat(most)


KEYS = 4, 9, 2, 5
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"causal": False, "window": (3, 1), "softmax_scale": 0.2},
    "scores": {"softcap": 1.5, "alibi_slopes": torch.rand(4, 4), "sinks": torch.randn(4)},
    "offset": {"q_offset": torch.tensor([0, 2, 0, -1]), "alibi_slopes": torch.rand(4)},
    "ranges": {"causal": False, "key_ranges": ranges(LENGTHS, KEYS)},
    "intervals": {"key_ranges": ranges(LENGTHS, KEYS, 3)},
}


@pytest.mark.parametrize("keys", [None, KEYS], ids=["self", "cross"])
@pytest.mark.parametrize("name", OPTIONS)
def test_forward_and_gradients(name: str, keys: Sequence[int] | None) -> None:
    q, k, v = drawn(LENGTHS, keys)
    options = in_double(OPTIONS[name])
    if "key_ranges" in options and keys is None:
        options["key_ranges"] = ranges(LENGTHS, LENGTHS, options["key_ranges"].dim())
    given = dict(options)
    learned = [options[t].requires_grad_() for t in ("alibi_slopes", "sinks") if t in options]
    if "key_ranges" in given:
        given["key_ranges"] = torch.nested.nested_tensor_from_jagged(options["key_ranges"], q.offsets())
    out, lse, most = attention(q, k, v, return_lse=True, return_max_score=True, **given)
    assert (out.shape, lse.shape) == ((*q.shape[:3], 6), q.shape[:3])
    assert out.offsets() is lse.offsets() is q.offsets()
    exact_out, exact_lse, exact_most = one_by_one(q, k, v, **options)
    results = out.values().transpose(0, 1), lse.values()
    assert_close(results, (exact_out, exact_lse))
    assert_close(most, exact_most)
    leaves = [q, k, v, *learned]
    grads = [
        torch.autograd.grad((x.sin().sum() + y[y.isfinite()].cos().sum()), leaves)
        for x, y in (results, (exact_out, exact_lse))
    ]
    assert_close(*([g.values() if g.is_nested else g for g in some] for some in grads))
    for t in learned:
        t.requires_grad_(False)


def test_results_asked_for() -> None:
    q, k, v = drawn()
    out, lse, most = attention(q, k, v, return_lse=True, return_max_score=True)
    assert_close(attention(q, k, v).values(), out.values())
    assert_close([t.values() for t in attention(q, k, v, return_lse=True)], [out.values(), lse.values()])
    assert_close(attention(q, k, v, return_max_score=True)[1], most)


@each_dtype
def test_equals_packed_sequences(dtype: torch.dtype) -> None:
    """To the bit, with dropout, ranges of masks and autocast."""
    q, k, v = drawn(dtype=dtype)
    packed = [t.values().transpose(0, 1) for t in (q, k, v)]
    packing = q.offsets(), k.offsets(), max(LENGTHS), max(LENGTHS)
    shared = KeyRanges(torch.tensor([0, 2]).expand(25, 2))
    for options in ({"dropout_p": 0.4, "dropout_seed": 5}, {"key_ranges": shared}, {"window": (2, 0)}):
        expected = attention_varlen(*packed, *packing, **options)
        assert torch.equal(attention(q, k, v, **options).values().transpose(0, 1), expected)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v)
    assert out.dtype == (torch.bfloat16 if dtype != torch.float64 else dtype)


def test_nothing_is_copied_and_sizes_are_known() -> None:
    """The values of a (B, j, heads, D) projection are read in place, and the lengths that q knows are out's too."""
    x = torch.nested.nested_tensor([torch.randn(n, 4, 8) for n in (3, 5)], layout=torch.jagged).transpose(1, 2)
    out = attention(x, x, x)
    assert (out._maybe_min_seqlen, out._maybe_max_seqlen) == (3, 5)
    assert out.transpose(1, 2).flatten(2).is_contiguous()
    assert torch.nested.to_padded_tensor(out.transpose(1, 2), 0.0).shape == (2, 5, 4, 8)


class Model(nn.Module):
    """A layer over (B, j, width), as models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + self.out(attention(q, k, v, window=(4, 0)).transpose(1, 2).flatten(2))


def test_a_model_trains() -> None:
    """The same losses as with a loop over sequences, eager and compiled, with lengths that change."""
    parts = [torch.randn(n, 16) for n in (3, 11, 1)]
    losses: list[list[float]] = []
    for run in ("loop", "eager", "compiled"):
        torch.manual_seed(0)
        model, found = Model(), []
        call = graph_of(model) if run == "compiled" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for step in range(4):
            some = parts[step % 2 :]
            if run == "loop":
                values = torch.cat([_dense(model, x) for x in some])
            else:
                values = call(torch.nested.nested_tensor(some, layout=torch.jagged)).values()
            loss = values.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    assert losses[0][2] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


def _dense(model: Model, x: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (4, 4)).transpose(0, 1)[None] for t in model.qkv(x).chunk(3, -1))
    out: Tensor = x + model.out(reference.attention(q, k, v, window=(4, 0))[0].transpose(0, 1).flatten(1))
    return out


def test_derivatives() -> None:
    """First ones; torch's views of jagged tensors have no second ones."""
    values = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 2, 6])

    def call(values: Tensor) -> Tensor:
        x = jagged(values, offsets)
        out: Tensor = attention(x, x, x).values()
        return out

    assert torch.autograd.gradcheck(call, values, fast_mode=True)
    with pytest.raises(NotImplementedError):
        torch.autograd.gradgradcheck(call, values, fast_mode=True)


def test_holes_after_contiguous_and_no_tokens() -> None:
    holes = torch.nested.nested_tensor_from_jagged(torch.randn(9, 4, 8), torch.tensor([0, 4, 9]), torch.tensor([2, 5]))
    x = holes.contiguous().transpose(1, 2)
    first = holes.unbind()[0].transpose(0, 1)[None]
    assert_close(attention(x, x, x).unbind()[0], attention(first, first, first)[0], 1e-6)
    empty = jagged(torch.randn(0, 4, 8), torch.tensor([0, 0]))
    out, most = attention(empty, empty, empty, return_max_score=True)
    assert out.values().shape == (4, 0, 8)
    assert most.tolist() == [[-math.inf] * 4]


Q, K, V = drawn(dtype=torch.float32)
OTHER = drawn(dtype=torch.float32)[1]
STRIDED = [torch.randn(2, n, 8) for n in LENGTHS]
HOLES = torch.nested.nested_tensor_from_jagged(torch.randn(25, 2, 8), starts(LENGTHS), torch.tensor([1, 2, 0, 3]))


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"k": torch.randn(4, 2, 17, 8)},
            TypeError,
            "k must be a nested tensor of layout torch.jagged like q, got a ",
        ),
        ({"q": torch.randn(4, 2, 17, 8)}, NotImplementedError, "k must be a dense tensor, got a nested one"),
        ({"v": None}, TypeError, "v must be Tensor, got None"),
        ({"v": OTHER}, ValueError, "v must have the offsets of k, the same tensor, got jagged sizes j"),
        ({"q": HOLES.transpose(1, 2)}, NotImplementedError, "q must have no holes, so call contiguous(), got lengths"),
        (
            {"k": K.transpose(1, 2)},
            ValueError,
            "k must be (batch, heads, j, head_dim), j its jagged dimension, got",
        ),
        ({"k": drawn((3, 4))[1]}, ValueError, "q and k must have the same batch, got 4 and 2"),
        ({"mask": torch.ones(5).bool()}, NotImplementedError, "packed sequences take no mask"),
        ({"bias": torch.ones(5)}, NotImplementedError, "packed sequences take no bias"),
        ({"mask": Q}, NotImplementedError, "mask must be a dense tensor, got a nested one"),
        (
            {"key_ranges": documents([25])},
            ValueError,
            "key_ranges must have shape (25, 2) or (25, 1 to 4, 2), got [1, 25, 2]",
        ),
        ({"key_ranges": OTHER}, ValueError, "key_ranges must be (batch, j, 2) or (batch, j, n, 2), j"),
        (
            {"key_ranges": torch.nested.nested_tensor_from_jagged(torch.zeros(25, 2).long(), starts(LENGTHS))},
            ValueError,
            "key_ranges must have the offsets of q, the same tensor, got jagged sizes j",
        ),
        ({"is_causal": True}, TypeError, "attention has no argument is_causal (use causal"),
    ],
)
def test_errors(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with refused(kind, message):
        attention(**{"q": Q, "k": K, "v": V} | changes)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_strided_layout_is_refused() -> None:
    strided = torch.nested.nested_tensor(STRIDED)
    with refused(NotImplementedError, "q must be a dense tensor on the CPU or a CUDA device, got layout Strided (nes"):
        attention(strided, strided, strided)
    with refused(TypeError, "k must be a nested tensor of layout torch.jagged like q, got torch.strided"):
        attention(Q, strided, V)


@pytest.mark.parametrize("call", [nn.MultiheadAttention(16, 4, batch_first=True), nn.TransformerEncoderLayer(16, 4, 8)])
@pytest.mark.parametrize("training", [False, True])
def test_torchs_modules_take_no_jagged_tensors(call: nn.Module, training: bool) -> None:
    """They refuse before they call any attention, as the page says."""
    x = torch.nested.nested_tensor([torch.randn(n, 16) for n in (3, 5)], layout=torch.jagged)
    given = (x,) if isinstance(call, nn.TransformerEncoderLayer) else (x, x, x)
    with pytest.raises(AssertionError, match="NestedTensor outside of its fast path"):
        call.train(training)(*given)
