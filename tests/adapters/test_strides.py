"""Promise: the strides of an adapter's integer tensors and slopes never change a bit, forward or backward."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adapters.gradients import with_gradients
from support.cases import assert_equal
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from pyattn.adapters.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    padding,
    rotary,
)
from pyattn.adapters.flash_attn.rotary_embedding import RotaryEmbedding
from pyattn.adapters.transformers import attention_function, mask_function
from pyattn.adapters.transformers.mask import Mask
from pyattn.masks import KeyRanges

pytestmark = pytest.mark.usefixtures("torchs_varlen")

GENERATOR = torch.Generator().manual_seed(0)


def rand(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=GENERATOR)


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def every_other(x: Tensor) -> Tensor:
    """A slice of a tensor whose other elements are far out of range."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), 10**6)
    wide[..., 1::2] = x
    return wide[..., 1::2]


def column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def of_columns(x: Tensor) -> Tensor:
    """A column of a matrix, or columns of longer rows."""
    return every_other(column_major(x)) if x.dim() == 2 else every_other(x[:, None].repeat(1, 2))[:, 1]


def expanded(x: Tensor) -> Tensor:
    """The tensor with stride 0 along each dimension whose elements are all equal."""
    return x.select(0, 0)[None].expand_as(x) if (x == x.select(0, 0)).all() else every_other(x)


STRIDES = {"slice": every_other, "columns": of_columns, "column-major": column_major, "expanded": expanded}

Q, K, V = rand(3, 3, 12, 4, 8).unbind()
TOKENS = rand(3, 20, 4, 8).unbind()
STARTS = ints(0, 4, 11, 20)
PAGES = rand(2, 8, 16, 4, 8).unbind()
TABLE = ints([5, 2], [0, 3], [6, 1])
SAME_PAGES = ints([5, 2], [5, 2], [5, 2])
LENGTHS = ints(20, 9, 31)
SLOPES = torch.rand(3, 4, generator=GENERATOR)
NEW_Q, NEW_K, NEW_V = rand(3, 3, 2, 4, 8).unbind()
ANGLES = torch.rand(2, 40, 4, generator=GENERATOR).unbind()
TOKEN_MASK = ints([1, 1, 1, 0], [0, 1, 1, 0], [1, 1, 1, 1])


def varlen(starts: Tensor = STARTS, slopes: Tensor | None = None) -> tuple[Tensor, ...]:
    return with_gradients(
        lambda q, k, v: flash_attn_varlen_func(q, k, v, starts, starts, 9, 9, causal=True, alibi_slopes=slopes), *TOKENS
    )


def probabilities(starts: Tensor, slopes: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    options = {"dropout_p": 0.5, "alibi_slopes": slopes, "return_attn_probs": True}
    return tuple(flash_attn_varlen_func(*TOKENS, starts, starts, 9, 9, **options))


def paged(table: Tensor, starts: Tensor | None = None) -> Tensor:
    starts = ints(0, 20, 29, 60) if starts is None else starts
    queries = ints(0, 2, 4, 6)
    return flash_attn_varlen_func(NEW_Q.flatten(0, 1), *PAGES, queries, starts, 2, 32, causal=True, block_table=table)


def paged_slopes(slopes: Tensor) -> Tensor:
    options = {"alibi_slopes": slopes, "block_table": TABLE}
    return flash_attn_varlen_func(NEW_Q.flatten(0, 1), *PAGES, ints(0, 2, 4, 6), ints(0, 20, 29, 60), 2, 32, **options)


def cached(**options: Any) -> tuple[Tensor, ...]:
    """out, and both caches afterwards."""
    caches = [x.clone() for x in (PAGES if "block_table" in options else (rand_cache(0), rand_cache(1)))]
    options = {"cache_seqlens": ints(20, 9, 28), "causal": True} | options
    out = flash_attn_with_kvcache(NEW_Q, *caches, NEW_K, NEW_V, *ANGLES, **options)
    return out, *caches


def rand_cache(seed: int) -> Tensor:
    return torch.randn(5, 32, 4, 8, generator=torch.Generator().manual_seed(seed))


def by_torch(starts: Tensor = STARTS, **options: Any) -> tuple[Tensor, ...]:
    if options:
        return (varlen_attn(*TOKENS, starts, starts, 9, 9, **options),)
    return with_gradients(lambda q, k, v: varlen_attn(q, k, v, starts, starts, 9, 9, window_size=(-1, 0)), *TOKENS)


def paged_by_torch(table: Tensor, used: Tensor) -> Tensor:
    options = {"block_table": table, "seqused_k": used, "window_size": (-1, 0)}
    return varlen_attn(NEW_Q.flatten(0, 1), *PAGES, ints(0, 2, 4, 6), None, 2, 32, **options)


def turned(offsets: Tensor) -> tuple[Tensor, ...]:
    return with_gradients(lambda x: rotary.apply_rotary_emb(x, *ANGLES, seqlen_offsets=offsets), Q)


def model(**options: Any) -> tuple[Tensor, ...]:
    row = [x[None].transpose(1, 2) for x in TOKENS]
    return with_gradients(lambda q, k, v: attention_function(nn.Module(), q, k, v, **options)[0], *row)


RANGES = mask_function(1, 20, 20, attention_mask=torch.arange(20)[None] > 3)
assert isinstance(RANGES, Mask)
assert RANGES.ranges is not None
POSITIONS = torch.cat([torch.arange(8), torch.arange(12)])[None]

CALLS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "dense slopes": (
        lambda s: with_gradients(lambda *qkv: flash_attn_func(*qkv, causal=True, alibi_slopes=s), Q, K, V),
        (SLOPES,),
    ),
    "dense slopes of heads": (lambda s: flash_attn_func(Q, K, V, alibi_slopes=s), (SLOPES[0],)),
    "qkvpacked slopes": (lambda s: flash_attn_qkvpacked_func(torch.stack([Q, K, V], 2), alibi_slopes=s), (SLOPES,)),
    "kvpacked slopes": (lambda s: flash_attn_kvpacked_func(Q, torch.stack([K, V], 2), alibi_slopes=s), (SLOPES,)),
    "varlen": (varlen, (STARTS, SLOPES)),
    "varlen_qkvpacked": (lambda c: flash_attn_varlen_qkvpacked_func(torch.stack(TOKENS, 1), c, 9), (STARTS,)),
    "varlen_kvpacked": (
        lambda c, d: flash_attn_varlen_kvpacked_func(TOKENS[0], torch.stack(TOKENS[1:], 1), c, d, 9, 9),
        (STARTS, STARTS),
    ),
    "probabilities": (probabilities, (STARTS, SLOPES)),
    "pages": (paged, (TABLE,)),
    "the same pages": (paged, (SAME_PAGES,)),
    "starts of pages": (lambda c: paged(TABLE, c), (ints(0, 20, 29, 60),)),
    "slopes over pages": (paged_slopes, (SLOPES,)),
    "cache_seqlens": (lambda n: cached(cache_seqlens=n), (ints(20, 9, 28),)),
    "cache_seqlens of one length": (lambda n: cached(cache_seqlens=n), (ints(9, 9, 9),)),
    "cache_batch_idx": (lambda i: cached(cache_batch_idx=i), (ints(4, 0, 2),)),
    "cache_leftpad": (lambda p: cached(cache_leftpad=p), (ints(3, 0, 7),)),
    "both": (lambda i, p: cached(cache_batch_idx=i, cache_leftpad=p), (ints(4, 0, 2), ints(3, 0, 7))),
    "block_table": (lambda t, n: cached(block_table=t, cache_seqlens=n), (TABLE, ints(20, 9, 28))),
    "the same block_table, read": (
        lambda t, n: flash_attn_with_kvcache(NEW_Q, *PAGES, cache_seqlens=n, block_table=t, causal=True),
        (SAME_PAGES, ints(9, 9, 9)),
    ),
    "slopes over a cache": (lambda s: cached(alibi_slopes=s), (SLOPES,)),
    "torch's varlen": (by_torch, (STARTS,)),
    "rotary offsets": (turned, (ints(3, 0, 7),)),
    "rotary starts": (
        lambda c, o: rotary.apply_rotary(TOKENS[0], *ANGLES, o, c, 9),
        (STARTS, ints(3, 0, 7)),
    ),
    "RotaryEmbedding": (
        lambda o: RotaryEmbedding(8)(torch.stack([Q, K, V], 2), seqlen_offset=o, max_seqlen=40),
        (ints(3, 0, 7),),
    ),
    "unpad_input": (lambda m: padding.unpad_input(Q[:, :4], m), (TOKEN_MASK,)),
    "unpad_input, two masks": (lambda m, u: padding.unpad_input(Q[:, :4], m, u), (TOKEN_MASK, 1 - TOKEN_MASK)),
    "unpad_input_for_concatenated_sequences": (
        lambda n: padding.unpad_input_for_concatenated_sequences(Q[:, :4], n),
        (ints([2, 1, 0, 0], [4, 0, 0, 0], [1, 1, 1, 1]),),
    ),
    "pad_input": (lambda i: padding.pad_input(TOKENS[0][:5], i, 2, 4), (torch.tensor([0, 1, 4, 6, 7]),)),
    "cu_seq_lens": (lambda c, d: model(attention_mask=None, cu_seq_lens_q=c, cu_seq_lens_k=d), (STARTS, STARTS)),
    "cu_seq_lens in a mask": (lambda c: model(attention_mask=RANGES, cu_seq_lens_q=c), (STARTS,)),
    "ranges": (lambda m: model(attention_mask=KeyRanges(m[None], whole=True)), (RANGES.ranges[0],)),
    "position_ids": (lambda p: model(attention_mask=None, position_ids=p), (POSITIONS,)),
}
if "seqused_k" in inspect.signature(varlen_attn).parameters:  # from torch 2.12 on
    CALLS |= {
        "torch's seqused_k": (lambda n: by_torch(seqused_k=n), (ints(4, 2, 7),)),
        "torch's pages": (paged_by_torch, (TABLE, LENGTHS)),
    }


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("name", CALLS)
def test_strides_change_nothing(name, strides):
    call, arguments = CALLS[name]
    changed = [STRIDES[strides](x) if x.dim() == 2 or strides != "column-major" else every_other(x) for x in arguments]
    assert_equal(changed, arguments)
    results, expected = call(*changed), call(*arguments)
    if isinstance(expected, Tensor):
        results, expected = (results,), (expected,)
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
