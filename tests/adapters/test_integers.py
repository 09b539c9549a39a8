"""Promise: any integer argument of an adapter gives the right result up to int64's ends, one sentence beyond them."""

from collections.abc import Callable

import pytest
import torch
from support.assertions import refused
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from pyattn.adapters.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    padding,
    rotary,
)
from pyattn.adapters.flash_attn.rotary_embedding import RotaryEmbedding
from pyattn.adapters.transformers import attention_function

pytestmark = pytest.mark.usefixtures("torchs_varlen")

ENDS = (2**31, 2**62, 2**63 - 1, 2**63, 2**64, 2**100, -(2**31) - 1, -(2**62), -(2**63), -(2**63) - 1, -(2**100))

Q, K, V = torch.randn(3, 2, 9, 2, 8, generator=torch.Generator().manual_seed(0))
HEADS = [x[:1].transpose(1, 2) for x in (Q, K, V)]
TOKENS = Q[0], K[0], V[0]
STARTS = torch.tensor([0, 4, 9], dtype=torch.int32)
CACHES = K.new_zeros(2, 32, 2, 8), K.new_ones(2, 32, 2, 8)
NEW = K[:, :1], V[:, :1]
TABLE = torch.tensor([[0], [1]], dtype=torch.int32)
ANGLES = torch.rand(2, 40, 4).unbind()


def cached(n: int = 5, **options: object) -> Tensor:
    caches = (cache.clone() for cache in CACHES)
    return flash_attn_with_kvcache(Q[:, :1], *caches, *NEW, cache_seqlens=n, **options)


def gradient(window: tuple[int, int]) -> Tensor:
    q = Q.clone().requires_grad_()
    return torch.autograd.grad(flash_attn_func(q, K, V, window_size=window).square().sum(), q)[0]


def by_torch(max_q: int = 5, max_k: int = 5, window: tuple[int, int] = (-1, -1)) -> Tensor:
    return varlen_attn(*TOKENS, STARTS, STARTS, max_q, max_k, window_size=window)


def packed(max_q: int = 5, max_k: int = 5, **options: object) -> Tensor:
    out = flash_attn_varlen_func(*TOKENS, STARTS, STARTS, max_q, max_k, **options)
    return out if isinstance(out, Tensor) else out[0]


def model(window: int | None = None, **options: object) -> Tensor:
    return attention_function(nn.Module(), *HEADS, None, sliding_window=window, **options)[0]


BOUNDS: dict[str, Callable[[int], Tensor]] = {
    "window left": lambda n: flash_attn_func(Q, K, V, window_size=(n, 0)),
    "window right": lambda n: flash_attn_func(Q, K, V, window_size=(3, n)),
    "window backward": lambda n: gradient((n, 1)),
    "packed window": lambda n: packed(window_size=(n, n)),
    "cached window": lambda n: cached(window_size=(n, n)),
    "torch's window": lambda n: by_torch(window=(2, n)),
}
"""In flash-attn any number below 0 means all keys; torch takes only -1."""

LENGTHS: dict[str, Callable[[int], Tensor]] = {
    "max_seqlen_q": lambda n: packed(n),
    "max_seqlen_k": lambda n: packed(5, n),
    "max_seqlen": lambda n: flash_attn_varlen_qkvpacked_func(torch.stack(TOKENS, 1), STARTS, n),
    "torch's max_q": lambda n: by_torch(n),
    "torch's max_k": lambda n: by_torch(5, n),
    "max_length_q": lambda n: model(cu_seq_lens_q=STARTS, max_length_q=n),
    "max_length_k": lambda n: model(cu_seq_lens_q=STARTS, max_length_k=n),
    "num_splits": lambda n: cached(num_splits=n),
    "sliding_window": model,
}
"""Upper bounds: every one that is large enough gives the same result."""

PLACES: dict[str, Callable[[int], Tensor]] = {
    "cache_seqlens": cached,
    "cache_seqlens of pages": lambda n: cached(n, block_table=TABLE),
    "cache_seqlens as int32": lambda n: cached(torch.tensor([5, min(n, 2**31 - 1) if n > 0 else -(2**31)]).int()),
    "seqlen_offsets": lambda n: rotary.apply_rotary(Q, *ANGLES, n),
    "max_seqlen of rotary": lambda n: rotary.apply_rotary(Q[0], *ANGLES, 0, STARTS, n),
    "num_heads_q": lambda n: rotary.apply_rotary_emb_qkv_(torch.cat([Q, K, V], 2), *ANGLES, num_heads_q=n),
    "seqlen_offset": lambda n: RotaryEmbedding(8)(torch.stack([Q, K, V], 2), seqlen_offset=n << 32),
    "max_seqlen of the module": lambda n: RotaryEmbedding(8)(torch.stack([Q, K, V], 2), max_seqlen=n << 32),
    "dim": lambda n: RotaryEmbedding(n << 32).inv_freq,
    "probabilities": lambda n: packed(5, n << 32, dropout_p=0.1, return_attn_probs=True),
    "batch of padding": lambda n: padding.pad_input(Q[0], torch.arange(9), n << 32, 9),
    "seqlen of padding": lambda n: padding.pad_input(Q[0], torch.arange(9), 1, n << 32),
    "first_axis_dim": lambda n: padding.index_put_first_axis(Q[0], torch.arange(9), n << 32),
}
"""int64's ends are no valid places or sizes; numbers that memory could hold are shifted beyond it."""


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds(name):
    whole = BOUNDS[name](-1)
    for n in ENDS:
        if n >= 2**63 or (name == "torch's window" and n < 0):
            with pytest.raises((ValueError, RuntimeError), match=r"^pyattn: |torch_attn::_varlen_attn\(\) Expected"):
                BOUNDS[name](n)
        else:
            assert torch.equal(BOUNDS[name](n), whole), n


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths(name):
    whole = LENGTHS[name](100)
    for n in ENDS:
        if 0 <= n < 2**63:
            assert torch.equal(LENGTHS[name](n), whole), n
        else:
            with pytest.raises((ValueError, RuntimeError), match=r"^pyattn: |torch_attn::_varlen_attn\(\) Expected"):
                LENGTHS[name](n)


@pytest.mark.parametrize("name", PLACES)
def test_places_and_sizes(name):
    for n in ENDS:
        with pytest.raises(ValueError, match=r"^pyattn: "):
            PLACES[name](n)


@pytest.mark.parametrize("wrong", [torch.tensor([5, 5]), torch.tensor(5.0)])
def test_a_longest_sequence_that_is_no_integer(wrong):
    with refused(ValueError, "max_seqlen_q must be an int, or an int32 or int64 tensor of one, "):
        packed(wrong)
