"""Promise: attention takes jagged nested tensors: each sequence gets the result and gradients of a separate call."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.assertions import assert_close, graph_of, refused
from support.cases import each_dtype
from support.jagged import KEYS, LENGTHS, OPTIONS, drawn, jagged, one_by_one, ranges
from support.yardstick import in_double
from torch import Tensor, nn

from pyattn import attention, attention_varlen, attention_weights, reference
from pyattn.masks import KeyRanges
from pyattn.nn import MultiHeadAttention

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # torch's compiler, of a jagged view
]


@pytest.mark.parametrize("keys", [None, KEYS], ids=["self", "cross"])
@pytest.mark.parametrize("name", OPTIONS)
def test_forward_and_gradients(name: str, keys: Sequence[int] | None) -> None:
    q, k, v = drawn(LENGTHS, keys)
    options = in_double(OPTIONS[name])
    if "key_ranges" in options and keys is None:
        options["key_ranges"] = ranges(LENGTHS, LENGTHS, options["key_ranges"].dim())
    given = dict(options)
    learned = [options[t].requires_grad_() for t in ("alibi_slopes", "relative_bias", "sinks") if t in options]
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
    return x + model.out(reference.attention(q, k, v, window=(4, 0))[0].transpose(0, 1).flatten(1))


@pytest.mark.parametrize("name", ["causal", "all"])
def test_second_derivatives(name: str) -> None:
    """Along random directions, as of the sequences one by one, through views of jagged results too."""
    q, k, v = (t.detach().requires_grad_() for t in drawn(LENGTHS, KEYS))
    options = in_double(OPTIONS[name])
    leaves = [q, k, v, *(options[t].requires_grad_() for t in ("alibi_slopes", "relative_bias") if t in options)]
    out, lse = attention(q, k, v, return_lse=True, **options)
    exact_out, exact_lse, _ = one_by_one(q, k, v, **options)
    results, along = [], [torch.randn_like(t.values() if t.is_nested else t) for t in leaves]
    for x, y in ((out.transpose(1, 2).values(), lse.values()), (exact_out, exact_lse)):
        grads = torch.autograd.grad(x.sin().sum() + y[y.isfinite()].cos().sum(), leaves, create_graph=True)
        inner = sum(((g.values() if g.is_nested else g) * t).sum() for g, t in zip(grads, along, strict=True))
        results.append([g.values() if g.is_nested else g for g in torch.autograd.grad(inner, leaves)])
    assert_close(*results, 1e-10)


def narrowed(*sizes: int) -> tuple[Tensor, Any]:
    """A padded tensor (3, 9, *sizes), and 4, 0 and 6 tokens of its rows, which it holds with holes between them."""
    x = torch.randn(3, 9, *sizes, dtype=torch.float64, requires_grad=True)
    return x, torch.nested.narrow(x, 1, torch.tensor([0, 2, 1]), torch.tensor([4, 0, 6]), layout=torch.jagged)


@pytest.mark.parametrize("which", ["qkv", "q", "kv"])
def test_holes_are_left_out(which: str) -> None:
    """As of the tokens nested anew, with ranges and lse; weights, too."""
    leaves, holes = zip(narrowed(4, 8), narrowed(2, 8), narrowed(2, 6), strict=True)
    ranges = narrowed(2)[1].detach().long().abs()
    anew = [torch.nested.as_nested_tensor([*t.unbind()], layout=torch.jagged) for t in holes]
    qkv = [(h if name in which else n).transpose(1, 2) for name, h, n in zip("qkv", holes, anew, strict=True)]
    results = []
    for q, k, v in ([t.transpose(1, 2) for t in anew], qkv):
        out, lse = attention(q, k, v, window=(3, 0), sinks=torch.zeros(4).double(), return_lse=True)
        loss = out.values().sin().sum() + lse.values().cos().sum()
        entropy = attention_weights(q, k, lse=lse.detach(), sinks=torch.zeros(4).double(), reduce="entropy")
        results.append(
            [out.values(), lse.values(), entropy.values(), *torch.autograd.grad(loss, leaves, retain_graph=True)]
        )
    assert_close(*results, 1e-12)
    q = qkv[0]
    out = attention(q, *qkv[1:], causal=False, key_ranges=ranges.clamp(0, 0))
    assert not out.values().any()


def test_holes_in_modules_and_graphs_are_refused() -> None:
    x = narrowed(16)[1]
    with refused(NotImplementedError, "x must have no holes, so nest x.unbind() again, got lengths beside"):
        MultiHeadAttention(16, 16, 9, 0.0, 4).double()(x)


def test_offsets_are_compared_by_value() -> None:
    """q, k, v, ranges and lse may be nested apart; compiled code can't read offsets."""
    q, k, v = drawn(keys=KEYS)
    apart = jagged(v.values().detach().transpose(0, 1), v.offsets().clone())
    pairs = ranges(LENGTHS, KEYS)
    given = torch.nested.nested_tensor_from_jagged(pairs, q.offsets().clone())
    expected = attention(q, k, v, key_ranges=pairs)
    assert torch.equal(attention(q, k, apart, key_ranges=given).values(), expected.values())
    with pytest.raises(Exception, match="pyattn: v must have the tensor of offsets of k in compiled code, got another"):
        graph_of(attention)(q, k, apart)


def test_no_tokens() -> None:
    empty = jagged(torch.randn(0, 4, 8), torch.tensor([0, 0]))
    out, most = attention(empty, empty, empty, return_max_score=True)
    assert out.values().shape == (4, 0, 8)
    assert most.tolist() == [[-math.inf] * 4]
