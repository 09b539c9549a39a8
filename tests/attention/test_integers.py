"""Promise: any integer argument of a call gives the right result up to int64's ends, and one sentence beyond them."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.assertions import assert_close
from support.cases import Case
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from pyattn import KVCache, attention, attention_varlen, attention_weights, attention_with_cache, dropout_mask, masks
from pyattn.adapters import flex, sdpa
from pyattn.adapters.sdpa.arguments import SdpaError
from pyattn.reference import attention as formula
from pyattn.reference import visible

# torch scripts its own forward-mode rules on first use; the category is FutureWarning since torch 2.15.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")

LOWEST, HIGHEST = -(2**63), 2**63 - 1
OFFSETS = (LOWEST, LOWEST + 1, -(2**62), -3, 0, 2, 2**32, 2**62, HIGHEST)
WINDOWS = tuple(itertools.product((-1, 0, 2, 2**62, HIGHEST), repeat=2))

SMALL = Case(1, 2, 1, 3, 4, 2, 2)
CU_SEQLENS = torch.tensor([0, 3]), torch.tensor([0, 4])
PACKED = torch.zeros(3, 2, 2), torch.zeros(4, 1, 2), torch.zeros(4, 1, 2)


def packed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    tokens = (x[0].transpose(0, 1) for x in (q, k, v))
    out, lse = attention_varlen(*tokens, *CU_SEQLENS, HIGHEST, HIGHEST, return_lse=True, **options)
    return out.transpose(0, 1)[None], lse[None]


def cached(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    cache = KVCache(1, 1, 4, 2, dtype=torch.float64)
    cache.append(k, v)
    return attention_with_cache(q, cache, return_lse=True, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("q_offset", OFFSETS)
def test_offsets_and_windows(q_offset: int, causal: bool) -> None:
    q, k, v = SMALL.inputs(torch.float64)
    for window in WINDOWS:
        options: dict[str, Any] = {"causal": causal, "window": window, "q_offset": q_offset}
        truth = formula(q, k, v, return_lse=True, return_weights=True, **options)
        weights = attention_weights(q, k, **options)
        moved = torch.func.jvp(lambda q, options=options: attention(q, k, v, return_lse=True, **options), (q,), (q,))
        results = [moved[0], packed(q, k, v, **options), cached(q, k, v, **options)]
        each = options | {"q_offset": torch.tensor([q_offset])}
        results += [attention(q, k, v, return_lse=True, **each), packed(q, k, v, **each), cached(q, k, v, **each)]
        for found in results:
            assert_close((*found, weights), truth, 1e-14)
        expected = torch.func.jvp(lambda q, options=options: formula(q, k, v, **options), (q,), (q,))[1]
        assert_close(moved[1][0], expected, 1e-14)


@pytest.mark.parametrize("q_offset", OFFSETS)
def test_flex_windows(q_offset: int) -> None:
    for window in WINDOWS:
        seen = visible(3, 4, causal=False, q_offset=q_offset, window=window)
        for offset in (q_offset, torch.tensor(q_offset), torch.tensor([q_offset])):
            mask_mod = flex.sliding_window(*window, offset=offset)
            blocks = flex.create_block_mask(mask_mod, 1, 1, 3, 4, device="cpu", BLOCK_SIZE=1)
            assert torch.equal(blocks.to_dense()[0, 0].bool(), seen)
        by_function = torch_flex.create_mask(flex.sliding_window(*window, offset=q_offset), 1, 1, 3, 4, device="cpu")
        assert torch.equal(by_function[0, 0], seen)


def test_flex_prefixes_and_offsets_of_causal() -> None:
    for prefix in (0, 2, 2**62, HIGHEST):
        blocks = flex.create_block_mask(flex.prefix_lm(prefix), 1, 1, 4, 4, device="cpu", BLOCK_SIZE=1)
        expected = torch.ones(4, 4).tril().bool() | (torch.arange(4) < prefix)
        assert torch.equal(blocks.to_dense()[0, 0].bool(), expected)
    assert torch.equal(masks.chunked(4, HIGHEST), masks.chunked(4, 4))


NO_DOUBLES = (10**400, -(10**400), 10**5000)
PAST = (2**63, LOWEST - 1, *NO_DOUBLES)
CUT = torch.zeros(1, 1, 4, 2)


def flex_mask(*sizes: Any, **options: Any) -> Any:
    return flex.create_block_mask(flex.causal(), *sizes, device="cpu", **options)


def cache(*sizes: Any, **options: Any) -> KVCache:
    return KVCache(*sizes, **options)


NUMBERS: dict[str, Callable[[Any], Any]] = {
    "q_offset": lambda n: attention(CUT, CUT, CUT, q_offset=n),
    "window": lambda n: attention(CUT, CUT, CUT, window=(n, 0)),
    "window of weights": lambda n: attention_weights(CUT, CUT, window=(0, n)),
    "dropout_seed": lambda n: attention(CUT, CUT, CUT, dropout_p=0.5, dropout_seed=n),
    "heads": lambda n: attention_weights(CUT, CUT, heads=[n]),
    "rows": lambda n: attention_weights(CUT, CUT, rows=[n]),
    "max_seqlen_q": lambda n: attention_varlen(*PACKED, *CU_SEQLENS, n, 4),
    "max_seqlen_k": lambda n: attention_varlen(*PACKED, *CU_SEQLENS, 3, n),
    "seed": lambda n: dropout_mask(n, 1, 1, 2, 2, 0.5),
    "prefix": lambda n: masks.prefix_lm(n, 4),
    "chunk": lambda n: masks.chunked(4, n),
    "flex offset": lambda n: flex.causal(n),
    "flex left": lambda n: flex.sliding_window(n),
    "flex right": lambda n: flex.sliding_window(0, n),
    "flex prefix": lambda n: flex.prefix_lm(n),
    "flex alibi": lambda n: flex.alibi(torch.ones(2), n),
    "BLOCK_SIZE": lambda n: flex_mask(1, 1, 4, 4, BLOCK_SIZE=n),
    "BLOCK_SIZE of keys": lambda n: flex_mask(1, 1, 4, 4, BLOCK_SIZE=(128, n)),
    "position in a cache": lambda n: attention_with_cache(CUT, cache(1, 1, 4, 2), q_offset=n),
    "position in a ring": lambda n: attention_with_cache(CUT[:, :, :1], cache(1, 1, 4, 2, window=(1, 0)), q_offset=n),
    "window of a ring": lambda n: cache(1, 1, 4, 2, window=(n, 0)),
    "idx": lambda n: cache(1, 1, 4, 2).reorder([n]),
    "new lengths": lambda n: cache(1, 1, 4, 2).append(CUT, CUT, [n]),
}
SCALES: dict[str, Callable[[Any], Any]] = {
    "scale": lambda n: sdpa.scaled_dot_product_attention(CUT, CUT, CUT, scale=n),
    "softmax_scale": lambda n: attention(CUT, CUT, CUT, softmax_scale=n),
    "softmax_scale of weights": lambda n: attention_weights(CUT, CUT, softmax_scale=n),
    "softcap": lambda n: attention(CUT, CUT, CUT, softcap=n),
    "flex softcap": lambda n: flex.softcap(n),
}
PROBABILITIES: dict[str, Callable[[Any], Any]] = {
    "dropout_p of sdpa": lambda n: sdpa.scaled_dot_product_attention(CUT, CUT, CUT, dropout_p=n),
    "dropout_p": lambda n: attention(CUT, CUT, CUT, dropout_p=n),
    "probability": lambda n: dropout_mask(1, 1, 1, 2, 2, n),
}
SIZES: dict[str, Callable[[Any], Any]] = {
    "batch of a mask": lambda n: dropout_mask(1, n, 1, 2, 2, 0.5),
    "heads of a mask": lambda n: dropout_mask(1, 1, n, 2, 2, 0.5),
    "queries of a mask": lambda n: dropout_mask(1, 1, 1, n, 2, 0.5),
    "keys of a mask": lambda n: dropout_mask(1, 1, 1, 2, n, 0.5),
    "document": lambda n: masks.documents([2, n]),
    "documents": lambda n: masks.documents([n, n]),
    "seqlen of a prefix": lambda n: masks.prefix_lm(0, n),
    "seqlen of chunks": lambda n: masks.chunked(n, 4),
    "seqlen of padding": lambda n: masks.padding([0, 0], n),
    "B": lambda n: flex_mask(n, 1, 4, 4),
    "H": lambda n: flex_mask(1, n, 4, 4),
    "Q_LEN": lambda n: flex_mask(1, 1, n, 4),
    "KV_LEN": lambda n: flex_mask(1, 1, 4, n),
    "batch": lambda n: cache(n, 0, 4, 2),
    "num_heads_kv": lambda n: cache(1, n, 4, 2),
    "max_seqlen": lambda n: cache(1, 1, n, 2),
    "head_dim": lambda n: cache(1, 1, 4, n),
    "head_dim_v": lambda n: cache(1, 1, 4, 2, head_dim_v=n),
    "page_size": lambda n: cache(1, 1, 4, 2, page_size=n),
}


@pytest.mark.parametrize("name", [*NUMBERS, *SIZES, *SCALES, *PROBABILITIES])
def test_past_the_ends(name: str) -> None:
    call = (NUMBERS | SIZES | SCALES | PROBABILITIES)[name]
    numbers = NO_DOUBLES if name in SCALES else PAST
    for number in (*numbers, *((LOWEST, -1, 2**60, HIGHEST) if name in SIZES else ())):
        with pytest.raises((ValueError, SdpaError), match=r"^pyattn: [^\n]*, got [^\n]{1,300}$") as caught:
            call(number)
        assert caught.value.__cause__ is caught.value.__context__ is None


@pytest.mark.parametrize("name", [*NUMBERS, *SIZES, *SCALES])
@pytest.mark.parametrize("value", [True, False])
def test_a_bool_is_no_number(name: str, value: bool) -> None:
    with pytest.raises(TypeError, match=r"^pyattn: [^\n]* must be [^\n]*, got [(\[]?[^\n]*(True|False)"):
        (NUMBERS | SIZES | SCALES)[name](value)


@pytest.mark.parametrize("name", PROBABILITIES)
def test_false_is_a_probability(name: str) -> None:
    """``training and p`` gives False."""
    PROBABILITIES[name](False)
