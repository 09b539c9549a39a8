"""Promise: head_dim, qk_norm, softmax_scale and position_embeddings equal the plain module, over a cache too."""

from typing import Any

import pytest
import torch
from support.assertions import Refusals, each_refusal, graph_of, refused
from support.modules import (
    ARGUMENTS,
    CONTEXT_LENGTH,
    D_IN,
    ROWS,
    assert_same,
    cache_for,
    class_of,
    error,
    gradients,
    sequences,
    turned,
)
from torch import Tensor

from pyattn import masks, nn, reference

NAMES = ("MultiHeadAttention", "GroupedQueryAttention")
each_module = pytest.mark.parametrize("name", NAMES)

VARIANTS: dict[str, dict[str, Any]] = {
    "scale": {"softmax_scale": 0.7},
    "head_dim": {"head_dim": 6},
    "norm": {"qk_norm": True},
    "norm of all heads": {"qk_norm": "all_heads", "head_dim": 4},
    "qwen": {"head_dim": 6, "qk_norm": True, "softmax_scale": 0.3},
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def angles(columns: int, interleaved: bool = False, rows: int = CONTEXT_LENGTH) -> tuple[Tensor, Tensor]:
    """(cos, sin), each (rows, columns), as the book's models make them."""
    half = columns // 2
    angle = torch.outer(torch.arange(rows).double(), 100.0 ** (-torch.arange(half).double() / half))
    both = angle.repeat_interleave(2, -1) if interleaved else torch.cat([angle, angle], -1)
    return both.cos(), both.sin()


def twins(name: str, base: float | None = None, **changes: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The native module, with a rotary base, and the plain one, in float64, with norms that differ from 1."""
    made = []
    first, second, *others = ARGUMENTS[name]
    for home in (nn, reference):
        torch.manual_seed(123)
        width, native = D_IN if "head_dim" in changes else second, {"rotary": base} if home is nn else {}
        module = class_of(name, home)(first, width, *others, **changes, **native).double()
        for norm in (norm for norm in module.modules() if isinstance(norm, torch.nn.RMSNorm)):
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
        made.append(module)
    return made[0], made[1]


def check(native: torch.nn.Module, plain: torch.nn.Module, tables: tuple[Tensor, Tensor] | None = None) -> None:
    """States both ways; results, gradients and both kinds of caches."""
    ours, theirs = native.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    plain.load_state_dict(ours, strict=True)
    native.load_state_dict(theirs, strict=True)
    options: dict[str, Any] = {} if tables is None else {"position_embeddings": tables}
    x = sequences(2, ROWS).requires_grad_()
    out, exact = native(x, **options), plain(x, **options)
    assert_same(out, exact)
    leaves = zip(*(gradients(t, [x, *m.parameters()]) for t, m in ((out, native), (exact, plain))), strict=True)
    for found, expected in leaves:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    cached = cache_for(native)
    for part in x.split((4, 1, 3, 1), 1):
        assert_same(native(part, kv_cache=cached, **options), plain(part, use_cache=True, **options))
    plain.reset_cache()
    for part in x.split((4, 1, 3, 1), 1):
        assert_same(native(part, use_cache=True, **options), plain(part, use_cache=True, **options))


@each_module
@each_variant
@pytest.mark.parametrize("rotated", [False, True])
def test_equals_plain(name, variant, rotated):
    native, plain = twins(name, **VARIANTS[variant])
    check(native, plain, angles(native.head_dim) if rotated else None)


@each_module
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("columns", [2, 4])
def test_rotations(name, interleaved, columns):
    """In halves and interleaved, of some columns and of all; also from rows for each token."""
    native, plain = twins(name, head_dim=4, rotary_interleaved=interleaved)
    tables = angles(columns, interleaved)
    check(native, plain, tables)
    x, rows = sequences(2, ROWS), [tuple(t[None, :ROWS].expand(n, -1, -1) for t in tables) for n in (1, 2)]
    for given in rows:
        assert_same(native(x, position_embeddings=given), plain(x, position_embeddings=tables))


@each_module
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradcheck(name, interleaved):
    native, _ = twins(name, head_dim=4, qk_norm=True, softmax_scale=0.4, rotary_interleaved=interleaved)
    tables = angles(2, interleaved)
    state = {key: value.detach().requires_grad_() for key, value in native.named_parameters()}

    def call(x, *values):
        named = dict(zip(state, values, strict=True))
        return torch.func.functional_call(native, named, (x,), {"position_embeddings": tables})

    assert torch.autograd.gradcheck(call, (sequences(2, 4).requires_grad_(), *state.values()), fast_mode=True)


@each_module
def test_a_base_equals_its_tables(name):
    for interleaved in (False, True):
        native, _ = twins(name, head_dim=4, rotary_interleaved=interleaved)
        based, _ = twins(name, head_dim=4, rotary_interleaved=interleaved, base=100.0)
        x, tables = sequences(2, ROWS), angles(4, interleaved)
        assert_same(based(x), native(x, position_embeddings=tables))
    x = torch.randn(1, 5, 1, 4, dtype=torch.float64)
    cos, sin = angles(4, rows=5)
    assert_same(reference.heads.turn(x.transpose(1, 2), cos, sin).transpose(1, 2), turned(x, 100.0))


def test_a_tree_turns_by_depth():
    """A table by position takes the rows of ``positions``; those of another order than the tokens'."""
    native, _ = twins("GroupedQueryAttention", head_dim=4)
    x, tables, cached = sequences(1, 6), angles(4), cache_for(native, 1)
    drafted, depth = masks.tree([-1, 0, 0]), torch.tensor([[0, 1, 1]])
    native(x[:, :3], kv_cache=cached, position_embeddings=tables)
    last = native(x[:, 3:], kv_cache=cached, mask=drafted, positions=3 + depth, position_embeddings=tables)
    path = torch.cat([x[:, :4], x[:, 5:]], 1)
    assert_same(last[:, 2], native(path, position_embeddings=tables)[:, -1])


def test_jagged():
    native, _ = twins("MultiHeadAttention", head_dim=4, qk_norm="all_heads")
    x, tables = sequences(1, 12)[0], angles(4)
    jagged = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, 12]))
    alone = [native(part[None], position_embeddings=tables)[0] for part in x.split((3, 9))]
    assert_same(native(jagged, position_embeddings=tables).values(), torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes(dtype):
    native, plain = twins("GroupedQueryAttention", head_dim=4, qk_norm=True)
    x, tables = sequences(2, ROWS), angles(4)
    exact = plain(x, position_embeddings=tables)
    ours, theirs = (m.to(dtype)(x.to(dtype), position_embeddings=tables) for m in (native, plain))
    assert ours.dtype == dtype
    assert error(ours, exact) <= 2 * error(theirs, exact) + 4 * torch.finfo(dtype).eps


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled():
    native, _ = twins("MultiHeadAttention", head_dim=4, qk_norm=True)
    x, tables = sequences(2, ROWS), angles(4)
    assert_same(graph_of(native)(x, position_embeddings=tables), native(x, position_embeddings=tables))


def test_norms_and_projections_may_be_replaced():
    native, plain = twins("GroupedQueryAttention", qk_norm=True)
    x, usual = sequences(1, 3), twins("GroupedQueryAttention")[0]
    usual.load_state_dict({key: value for key, value in native.state_dict().items() if "norm" not in key})
    native.q_norm = torch.nn.Identity()
    native.k_norm = None
    assert_same(native(x), usual(x))
    for module in (usual, plain):
        module.out_proj = torch.nn.Sequential(module.out_proj, torch.nn.Tanh())
    native.out_proj, native.q_norm, native.k_norm = plain.out_proj, plain.q_norm, plain.k_norm
    assert_same(native(x), plain(x))


COS, SIN = angles(4)
BAD: Refusals = [
    ({"position_embeddings": COS}, TypeError, "position_embeddings must be tuple or list, got torch.Tensor of shape"),
    ({"position_embeddings": (COS,)}, ValueError, "position_embeddings must be (cos, sin), each (at least 3, R)"),
    ({"position_embeddings": (COS[:2], SIN[:2])}, ValueError, "position_embeddings must be (cos, sin), each (at least"),
    ({"position_embeddings": (COS, SIN[:9])}, ValueError, "position_embeddings must be (cos, sin), each (at least 3, "),
    ({"position_embeddings": angles(6)}, ValueError, "position_embeddings must be (cos, sin), each (at least 3, R), "),
    ({"position_embeddings": angles(4, True)}, ValueError, "position_embeddings must have two equal halves, cat([ang"),
    ({"position_embeddings": (COS[:, :2], SIN[:, :2])}, ValueError, "position_embeddings must have two equal halves"),
    (
        {"position_embeddings": (COS[None, :3], SIN[None, :3]), "positions": torch.tensor([[0, 1, 2]])},
        ValueError,
        "positions must come with a table by position, got the rows of each token as well",
    ),
    (
        {"position_embeddings": (COS, SIN), "positions": torch.tensor([[0, 1, 19]])},
        ValueError,
        "each of the tokens' positions in position_embeddings must be between 0 and 18, got 19 at 2",
    ),
]


@each_refusal(BAD)
def test_wrong_tables(changes, kind, message):
    native, _ = twins("MultiHeadAttention")
    with refused(kind, message):
        native(sequences(2, 3), **changes)


def test_tables_beside_a_base_and_past_their_end():
    native, _ = twins("MultiHeadAttention", base=100.0)
    with refused(ValueError, "position_embeddings must come without rotary, got rotary=100.0"):
        native(sequences(2, 3), position_embeddings=(COS, SIN))
    native, _ = twins("MultiHeadAttention")
    cached = cache_for(native)
    native(sequences(2, 3), kv_cache=cached, position_embeddings=(COS, SIN))
    with refused(ValueError, "each of the tokens' positions in position_embeddings must be between 0 and 2, got 3"):
        native(sequences(2, 1), kv_cache=cached, position_embeddings=(COS[:3], SIN[:3]))
    assert cached.lengths.tolist() == [3, 3]


@each_module
@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"head_dim": 5},
            ValueError,
            "d_out must be d_in or num_heads * head_dim if head_dim is given, got 7, 12 ",
        ),
        ({"head_dim": 0}, ValueError, "head_dim must be at least 1, got 0"),
        ({"qk_norm": "yes"}, ValueError, "qk_norm must be a bool or 'all_heads', got 'yes'"),
        ({"qk_norm": 1}, ValueError, "qk_norm must be a bool or 'all_heads', got 1"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale must be finite and at least 0, got nan"),
        ({"softmax_scale": "0.1"}, TypeError, "softmax_scale must be int or float, got '0.1'"),
        ({"rotary_interleaved": 1}, TypeError, "rotary_interleaved must be bool, got 1"),
    ],
)
def test_constructor_errors(name, changes, kind, message):
    first, second, *others = ARGUMENTS[name]
    with refused(kind, message):
        class_of(name)(first, 7 if changes.get("head_dim") == 5 else second, *others, **changes)


def test_either_width_of_out():
    for d_out in (D_IN, 2 * 5):
        module = nn.MultiHeadAttention(D_IN, d_out, 9, 0.0, 2, head_dim=5)
        assert module.W_query.weight.shape == (10, D_IN)
        assert module.out_proj.weight.shape == (D_IN, 10)
        assert "head_dim=5" in repr(module)
