"""Promise: pages of size 0 in any dimension work like no pages, with gradients, in transforms, and without either."""

from collections.abc import Callable

import pytest
import torch
from support.assertions import assert_close
from torch import Tensor

from pyattn import KVCache, attention_varlen, attention_with_cache, reference

FULL = {"batch": 2, "pages": 4, "columns": 2, "heads": 2, "seqlen_q": 3, "head_dim": 4, "head_dim_v": 5}
TOGETHER = [("pages", "columns"), ("pages", "batch"), ("heads", "pages"), ("head_dim", "pages")]
EMPTY = [(name,) for name in FULL] + TOGETHER


def plainly(call: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return call(*inputs)


def with_gradients(call: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, lse = call(*leaves)
    loss = out.sin().sum() + lse.masked_fill(lse.isinf(), 0.0).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves, materialize_grads=True)


def in_a_transform(call: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
    if call.__name__ == "truth":  # truth reads values
        return tuple(torch.stack([x, x]) for x in call(*inputs))
    return torch.vmap(call)(*(torch.stack([x, x]) for x in inputs))


@pytest.mark.parametrize("run", [plainly, with_gradients, in_a_transform])
@pytest.mark.parametrize("empty", EMPTY, ids="-".join)
def test_packed_sequences(empty, run):
    size = FULL | dict.fromkeys(empty, 0)
    lengths = [20, 5] if size["pages"] and size["columns"] else [0, 0]
    starts = [torch.tensor([0, *some[: size["batch"]]]).cumsum(0) for some in ([size["seqlen_q"]] * 2, lengths)]
    where = *starts, size["seqlen_q"], max(lengths)
    table = torch.arange(size["batch"] * size["columns"]).view(size["batch"], size["columns"])
    shapes = [
        (size["batch"] * size["seqlen_q"], size["heads"], size["head_dim"]),
        *((size["pages"], 16, size["heads"], columns) for columns in (size["head_dim"], size["head_dim_v"])),
    ]
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]

    def ours(*qkv):
        return attention_varlen(*qkv, *where, block_table=table, return_lse=True)

    def truth(*qkv):
        return reference.attention_varlen(*qkv, *where, block_table=table, return_lse=True)

    assert_close(run(ours, *inputs), run(truth, *inputs))


@pytest.mark.parametrize("run", [plainly, with_gradients, in_a_transform])
@pytest.mark.parametrize("empty", ["batch", "heads", "max_seqlen", "head_dim", "seqlen_q", "tokens"])
def test_cache(empty, run):
    size = {"batch": 2, "heads": 2, "max_seqlen": 20, "head_dim": 4, "seqlen_q": 3, "tokens": 18} | {empty: 0}
    tokens = min(size["tokens"], size["max_seqlen"])
    k, v = torch.randn(2, size["batch"], size["heads"], tokens, size["head_dim"], dtype=torch.float64)
    q = torch.randn(size["batch"], size["heads"], size["seqlen_q"], size["head_dim"], dtype=torch.float64)
    results = []
    for page_size in (None, 16):
        cache = KVCache(*list(size.values())[:4], dtype=torch.float64, page_size=page_size)
        cache.append(k, v)
        results.append(run(lambda q, cache=cache: attention_with_cache(q, cache, return_lse=True), q))
    assert_close(*results)
