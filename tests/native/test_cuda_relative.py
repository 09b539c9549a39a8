"""Promise: CUDA kernels add a relative bias, and sum up its gradient, as accurately as a bias of each pair.

With extreme offsets, so do those of every instruction set.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import emulated
import pytest
import torch
from params import before_a_wall
from support.backends import Backend
from support.cases import Case, alternate, each_dtype, seeded
from support.packed import Packed, results
from support.yardstick import NAMES, bound, excess
from torch import Tensor

from pyattn import reference

Inputs = tuple[Tensor, Tensor, Tensor]
Offset = int | Tensor | None
Call = Callable[..., Any]


def of_each_pair(table: Tensor, seqlen_q: int, seqlen_k: int, offset: Offset) -> Tensor:
    """The bias (batch or 1, heads or 1, seqlen_q, seqlen_k) that a table (batch or none, heads or 1, entries) means."""
    offsets = torch.as_tensor(seqlen_k - seqlen_q if offset is None else offset).reshape(-1, 1, 1)
    reach = table.shape[-1] // 2
    far = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - offsets.clamp(-(2**40), 2**40)
    entries = (far.clamp(-reach, reach) + reach).flatten(1)
    rows = table if table.dim() == 3 else table[None]
    count = max(len(rows), len(entries))
    rows = rows.expand(count, -1, -1)
    return rows.gather(2, entries[:, None].expand(count, rows.shape[1], -1)).unflatten(2, (seqlen_q, seqlen_k))


def by_bias(attend: Call, q: Tensor, k: Tensor, v: Tensor, relative_bias: Tensor, **options: Any) -> Any:
    """The same from a bias of each pair."""
    bias = of_each_pair(relative_bias, q.shape[2], k.shape[2], options.get("q_offset"))
    if (own := options.pop("bias", None)) is not None:
        bias = bias + own
    return attend(q, k, v, bias=bias, **options)


def table_of(dtype: torch.dtype, *shape: int) -> Tensor:
    """A table in the dtype of row statistics, on a CPU before a wall: an access past its end kills the process."""
    dtype, values = torch.promote_types(dtype, torch.float32), torch.randn(shape)
    return before_a_wall(*shape, dtype=dtype).copy_(values) if values.device.type == "cpu" else values.to(dtype)


def in_double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def assert_allowed(ours: tuple[Tensor, ...], plain: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    names = (*NAMES, "drelative", *("",) * 9)
    found = {
        name: excess(x, [bound(x.dtype, y, z)], z) for name, x, y, z in zip(names, ours, plain, exact, strict=False)
    }
    assert max(found.values()) <= 1, found


def assert_right(call: Call, drawn: tuple[Inputs, Tensor, Tensor], table: Tensor, **options: Any) -> Tensor:
    """Asserts that every result is as accurate as with a bias of each pair, and returns the gradient of the table."""
    qkv, dout, dlse = drawn
    dlse = dlse.to(torch.promote_types(dout.dtype, torch.float32))
    ours = results(functools.partial(call, **options), qkv, dout, dlse, relative_bias=table)
    plain = results(functools.partial(by_bias, call, **options), qkv, dout, dlse, relative_bias=table)
    doubles: Any = tuple(map(in_double, qkv))
    wide = {name: in_double(x) for name, x in options.items()}
    exactly = functools.partial(by_bias, reference.attention, **wide)
    exact = results(exactly, doubles, dout.double(), dlse.double(), relative_bias=table.double())
    assert_allowed(ours, plain, exact)
    return ours[-1]


FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": False, "softmax_scale": -0.3, "sinks": True},
    {"q_offset": 9, "dropout_p": 0.2},
    {"causal": False, "window": (30, 4), "q_offset": -5, "mask": "random hqk"},
    {"softcap": 3.0, "alibi": "bh", "key_ranges": "documents", "bias": "bands hqk", "wide": True},
]
REACHES = {0: (20, 20), 1: (72, 33), 6: (20, 20), 30: (200, 100), 90: (33, 40)}
"""From a single entry to one that no pair comes near, each with its head dimensions."""


def drawn_of(case: Case, dtype: torch.dtype) -> tuple[tuple[Inputs, Tensor, Tensor], dict[str, Any]]:
    seeded(0)
    options = case.options | case.tensors(dtype)
    return case.drawn(dtype), options


@each_dtype
@pytest.mark.parametrize(("reach", "features"), alternate(list(REACHES), FEATURES), ids=str)
def test_options(cuda_kernels: Backend, dtype: torch.dtype, reach: int, features: dict[str, Any]) -> None:
    """A table for each head, or one for all."""
    seqlen_q, seqlen_k = (9, 14) if dtype == torch.float64 else (37, 50)
    case = Case(1, 4, 2, seqlen_q, seqlen_k, *REACHES[reach], **features)
    drawn, options = drawn_of(case, dtype)
    heads = 1 if reach == 6 else 4
    assert_right(cuda_kernels.attention, drawn, table_of(dtype, heads, 2 * reach + 1), **options)


@each_dtype
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "by-sequence"])
def test_sequences(cuda_kernels: Backend, dtype: torch.dtype, shared: bool) -> None:
    """Separate offsets, of which some bring all keys to one end, and separate tables, or one for all."""
    case = Case(5, 2, 1, 9, 20, 16, 24, causal=False)
    drawn, options = drawn_of(case, dtype)
    options["q_offset"] = torch.tensor([3, 0, -4, 2**62, -(2**63)])
    table = table_of(dtype, 1, 9) if shared else table_of(dtype, 5, 2, 9)
    gradient = assert_right(cuda_kernels.attention, drawn, table, **options)
    if not shared:
        assert gradient[3, :, 1:].count_nonzero() == gradient[4, :, :-1].count_nonzero() == 0
        assert gradient[3, :, 0].all()
        assert gradient[4, :, -1].all()


@each_dtype
@pytest.mark.parametrize("offset", [2**63 - 1, -(2**63)])
def test_extreme_offsets(repeatable: Backend, dtype: torch.dtype, offset: int) -> None:
    case = Case(1, 2, 2, 12, 17, 16, 16, causal=False, q_offset=offset)
    drawn, options = drawn_of(case, dtype)
    gradient = assert_right(repeatable.attention, drawn, table_of(dtype, 2, 41), **options)
    assert torch.equal(gradient.any(0).nonzero().flatten(), torch.tensor([0 if offset > 0 else 40]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_bands(cuda_kernels: Backend, dtype: torch.dtype) -> None:
    """More diagonals than a thread block takes, more rows than a tile, tiles that no row sees, and split keys."""
    for case in (Case(1, 1, 1, 140, 300, 16, 16, causal=False), Case(1, 2, 1, 3, 600, 16, 16)):
        drawn, options = drawn_of(case, dtype)
        options["mask"] = torch.arange(case.seqlen_k) >= 100
        assert_right(cuda_kernels.attention, drawn, table_of(dtype, 1, 401), **options)


def one_by_one(packed: Packed, call: Call, table: Tensor, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """``call`` for one sequence after the other; tokens of no sequence get 0."""

    def attend(q: Tensor, k: Tensor, v: Tensor, relative_bias: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for b, (i, j) in enumerate(packed.spans):
            each = (x[None, s].transpose(1, 2) for x, s in ((q, i), (k, j), (v, j)))
            own = relative_bias[b] if table.dim() == 3 else relative_bias
            out, lse = by_bias(call, *each, relative_bias=own, return_lse=return_lse, **options)
            outs.append(out[0].transpose(0, 1)), lses.append(lse[0])
        rest = len(q) - sum(map(len, outs))
        pad = torch.zeros(rest, *outs[0].shape[1:]), torch.full((q.shape[1], rest), -torch.inf)
        return torch.cat([*outs, pad[0].to(outs[0])]), torch.cat([*lses, pad[1].to(lses[0])], 1)

    return attend


@each_dtype
@pytest.mark.parametrize(("shape", "options"), alternate([(2,), (3, 1), (3, 2)], [{}, {"causal": False}]), ids=str)
def test_packed(cuda_kernels: Backend, dtype: torch.dtype, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    lengths = ([5, 0, 12], [7, 3, 15]) if dtype == torch.float64 else ([40, 0, 33], [50, 3, 41])
    packed = Packed(*lengths, heads=(2, 1), rest=4)
    seeded(0)
    qkv, table = packed.inputs(dtype), table_of(dtype, *shape, 21)
    dout, dlse = torch.randn(*qkv[0].shape[:2], 20).to(dtype), torch.randn(2, len(qkv[0]), dtype=table.dtype)
    call = functools.partial(cuda_kernels.attention_varlen, **options)
    ours = results(
        lambda q, k, v, **named: call(q, k, v, *packed.packing, **named), qkv, dout, dlse, relative_bias=table
    )
    plain = results(one_by_one(packed, cuda_kernels.attention, table, **options), qkv, dout, dlse, relative_bias=table)
    exactly, doubles = one_by_one(packed, reference.attention, table, **options), tuple(map(in_double, qkv))
    exact = results(exactly, doubles, dout.double(), dlse.double(), relative_bias=table.double())
    assert_allowed(ours, plain, exact)


@each_dtype
def test_invalid_sequences_add_nothing(cuda_kernels: Backend, dtype: torch.dtype) -> None:
    packed = Packed([5, 9, 6], [7, 9, 20], heads=(2, 1))
    seeded(0)
    qkv, table = packed.inputs(dtype), table_of(dtype, 2, 9)
    dout, dlse = torch.randn(20, 2, 20).to(dtype), torch.randn(2, 20, dtype=table.dtype)
    for used, rows in (([7, 9, 20], 20), ([7, 10, 21], 5), ([8, 10, 21], 0)):
        call = functools.partial(cuda_kernels.attention_varlen, seqused_k=torch.tensor(used))
        attend = lambda q, k, v, call=call, **named: call(q, k, v, *packed.packing, **named)  # noqa: E731
        *_, gradient = results(attend, qkv, dout, dlse, relative_bias=table)
        assert not gradient.isnan().any()
        assert bool(gradient.any()) == (rows > 0)


def test_no_queries_and_no_keys(cuda_kernels: Backend) -> None:
    """The gradient of a table that no score uses is written too."""
    for sizes in ((1, 2, 1, 0, 5), (1, 2, 1, 5, 0), (0, 2, 1, 5, 5)):
        drawn, options = drawn_of(Case(*sizes, 16, 16), torch.float32)
        attend = functools.partial(cuda_kernels.attention, **options)
        *_, gradient = results(attend, *drawn, relative_bias=table_of(torch.float32, 2, 5))
        assert torch.equal(gradient, torch.zeros(2, 5)), sizes


def test_memory_is_linear(emulation: Backend) -> None:
    """In the numbers of queries and keys, whatever the reach is."""
    kernels = emulated.library()

    def workspace(seqlen: int, reach: int) -> int:
        q, k, v = Case(1, 2, 1, seqlen, seqlen, 16, 16).inputs(torch.float32)
        table = torch.zeros(2, 2 * reach + 1)
        call = emulated.Call((q, k, v), (None, None, None, table), {})
        call.p.drelative = call.address(table.clone())
        return int(kernels.backward_bytes(1, ctypes.byref(call.p), emulation.repeatable))

    assert workspace(1000, 5) == workspace(1000, 5000) <= workspace(2000, 5) <= 2 * workspace(1000, 5)
