"""Promise: torch compiles, maps, checkpoints and counts attention over packed sequences like any operator."""

from functools import partial
from typing import Any

import pytest
import torch
from support.assertions import assert_close, finite, graph_of
from support.cases import assert_equal
from support.packed import GROUPED, Packed
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from pyattn import attention, attention_varlen
from pyattn.options import Options

forward = torch.ops.pyattn.attention_varlen_forward
backward = torch.ops.pyattn.attention_varlen_backward

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def learned(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {
        "alibi_slopes": torch.rand(4).to(dtype),
        "sinks": torch.randn(4).to(dtype),
        "relative_bias": torch.randn(3, 4, 5).to(dtype),
    }


SMALL = Packed([3, 0, 4], [4, 2, 3], (4, 2), rest=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("more", [False, True])
def test_opcheck(dtype: torch.dtype, more: bool) -> None:
    q, k, v = SMALL.inputs(dtype)
    options = Options(window=(2, 1), softcap=1.5, **learned(dtype)) if more else Options()
    arguments = *SMALL.packing, torch.tensor([4, 1, 3]) if more else None, *options
    out, _, row_max, row_sum = forward(q, k, v, *arguments)
    torch.library.opcheck(forward, (q, k, v, *arguments))
    rows = torch.randn_like(out), torch.randn_like(row_sum), q, k, v, out, row_max, row_sum
    torch.library.opcheck(backward, (*rows, *arguments, True, [False, more, more, more]))


def test_compiled_once_for_all_lengths() -> None:
    """With an equal total, lengths are values of a tensor, not sizes."""

    def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        return attention_varlen(q, k, v, cu, cu, 9, 9, alibi_slopes=slopes, return_lse=True)

    compiled = graph_of(call)
    for lengths in ([3, 6, 0], [9, 0, 0], [1, 1, 7]):
        packed = Packed(lengths, heads=(4, 2))
        leaves = [x.requires_grad_() for x in (*packed.inputs(torch.float64), torch.rand(4).double())]
        both = []
        for function in (compiled, call):
            with torch._dynamo.config.patch(error_on_recompile=True):
                out, lse = function(*leaves[:3], packed.packing[0], leaves[3])
            both.append((out, lse, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves)))
        assert_equal(*both)


def grads_of(q: Tensor, k: Tensor, v: Tensor, **tensors: Tensor) -> tuple[Tensor, ...]:
    def loss(*qkv: Tensor) -> Tensor:
        out, lse = finite(*attention_varlen(*qkv, *SMALL.packing, return_lse=True, **tensors))
        return out.sin().sum() + lse.cos().sum()

    return torch.func.grad(loss, (0, 1, 2))(q, k, v)


@pytest.mark.parametrize(
    "mapped", ["q", "k v", "q k v", "alibi_slopes", "relative_bias", "sinks q", "key_ranges", "q_offset v"]
)
@pytest.mark.parametrize("size", [0, 3])
def test_vmap(mapped: str, size: int) -> None:
    inputs = dict(zip("qkv", SMALL.inputs(torch.float64), strict=True)) | learned()
    inputs |= {"key_ranges": SMALL.ranges(), "q_offset": torch.tensor([0, 3, 1])}
    dims = {name: (i % 2) if name in mapped.split() else None for i, name in enumerate(inputs)}
    stacks = {
        name: x if dims[name] is None else torch.stack([x, x.roll(1, 0), x], dims[name]).narrow(dims[name], 0, size)
        for name, x in inputs.items()
    }

    def call(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        q, k, v, slopes, sinks, relative, ranges, offset = tensors.values()
        ranges = torch.zeros_like(ranges) if mapped == "key_ranges" else ranges
        more = {"alibi_slopes": slopes, "sinks": sinks, "relative_bias": relative, "key_ranges": ranges}
        more["q_offset"] = offset
        both = attention_varlen(q, k, v, *SMALL.packing, return_lse=True, **more)
        return *both, *grads_of(q, k, v, **more)

    found = torch.vmap(call, (dims,))(stacks)
    assert {len(x) for x in found} == {size}
    for i in range(size):
        one = {name: x if dims[name] is None else x.select(dims[name], i) for name, x in stacks.items()}
        assert_close(tuple(x[i] for x in found), call(one))


def test_vmap_of_gradients_of_scores() -> None:
    q, k, v = (torch.stack([x, 2 * x], 1) for x in SMALL.inputs(torch.float64))

    def grads(q: Tensor, k: Tensor, v: Tensor, **tensors: Tensor) -> dict[str, Tensor]:
        def loss(tensors: dict[str, Tensor]) -> Tensor:
            return attention_varlen(q, k, v, *SMALL.packing, **tensors).sin().sum()

        return torch.func.grad(loss)(tensors)

    for slopes in (torch.rand(4).double(), torch.rand(3, 4).double()):
        tensors = learned() | {"alibi_slopes": slopes}
        found = torch.vmap(partial(grads, **tensors), 1)(q, k, v)
        for i in range(2):
            one = grads(q[:, i], k[:, i], v[:, i], **tensors)
            assert_close({name: x[i] for name, x in found.items()}, one)


def test_vmap_with_dropout() -> None:
    q, k, v = (torch.stack([x, 2 * x]) for x in SMALL.inputs(torch.float64))
    call = partial(attention_varlen, dropout_p=0.5, dropout_seed=torch.tensor(4))
    found = torch.vmap(lambda q, k, v: call(q, k, v, *SMALL.packing))(q, k, v)
    for i in range(2):
        assert_close(found[i], call(q[i], k[i], v[i], *SMALL.packing))


def test_raw_operators_have_no_derivatives() -> None:
    q, k, v = (x.requires_grad_() for x in SMALL.inputs(torch.float64))
    with pytest.raises(RuntimeError, match="attention_varlen_forward"):
        forward(q, k, v, *SMALL.packing)[0].sum().backward()


def test_checkpoint_and_autocast() -> None:
    leaves = [x.requires_grad_() for x in SMALL.inputs(torch.float32)]
    call = partial(checkpoint, attention_varlen, use_reentrant=False)
    expected = torch.autograd.grad(attention_varlen(*leaves, *SMALL.packing).sin().sum(), leaves)
    assert_equal(torch.autograd.grad(call(*leaves, *SMALL.packing).sin().sum(), leaves), expected)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention_varlen(*leaves, *SMALL.packing)
    assert torch.equal(out, attention_varlen(*(x.bfloat16() for x in leaves), *SMALL.packing))
    assert [x.dtype for x in torch.autograd.grad(out.float().sum(), leaves)] == [torch.float32] * 3


def test_meta_tensors() -> None:
    q, k, v = (x.to("meta").requires_grad_() for x in SMALL.inputs(torch.float16))
    cu_seqlens = torch.empty(4, dtype=torch.int32, device="meta")
    out, lse = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 5, 5, return_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == ((8, 4, 20), (4, 8), torch.float32)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("name", ["", "window", "key_ranges"])
def test_operations_are_those_of_each_alone(name: str) -> None:
    known: dict[str, Any] = {"window": (3, -1), "key_ranges": GROUPED.ranges()}
    options = {name: known[name]} if name else {}
    qkv = [x.requires_grad_() for x in GROUPED.inputs(torch.float32)]
    with FlopCounterMode(display=False) as packed:
        attention_varlen(*qkv, *GROUPED.packing, **options).sum().backward()
    with FlopCounterMode(display=False) as alone:
        for i, j in GROUPED.spans:
            each = (x[None, s].transpose(1, 2) for x, s in zip(qkv, (i, j, j), strict=True))
            own = {name: x[None, i] if name == "key_ranges" else x for name, x in options.items()}
            attention(*each, **own).sum().backward()
    assert packed.get_total_flops() == alone.get_total_flops() > 0
