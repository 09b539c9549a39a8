"""Promise: a call whose mask hides every key of every query says so once; calls that may be empty say nothing."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import pyattn
from pyattn import KVCache, nn
from pyattn.options import polarity

HIDDEN = torch.ones(6, 6).triu(1).bool()
"""The book's mask: True = hidden."""


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polarity, "_warned", False)


def tensors(seqlen: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 2, 4, seqlen, 8, dtype=dtype)


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def over_cache(mask: Tensor) -> Tensor:
    cache = KVCache(2, 4, 6, 8)
    cache.append(*tensors()[:2])
    return pyattn.attention_with_cache(tensors()[0], cache, mask=mask)


def over_prefix(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    return pyattn.attention_with_prefix(q, k[:, :, 2:], v[:, :, 2:], k[:1, :, :2], v[:1, :, :2], mask=mask)


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "attention": lambda mask: pyattn.attention(*tensors(), mask=mask),
    "float64": lambda mask: pyattn.attention(*tensors(dtype=torch.float64), mask=mask),
    "bfloat16": lambda mask: pyattn.attention(*tensors(dtype=torch.bfloat16), mask=mask),
    "with gradients": lambda mask: pyattn.attention(*tensors().requires_grad_(), mask=mask),
    "transposed": lambda mask: pyattn.attention(*(t.transpose(1, 2) for t in torch.randn(3, 2, 6, 4, 8)), mask=mask),
    "a cache": over_cache,
    "answers to a prompt": lambda mask: over_prefix(*tensors(), mask),
    "a module": lambda mask: nn.MultiHeadAttention(8, 8, 6, 0.0, 2)(torch.randn(2, 6, 8), mask=mask),
    "one head": lambda mask: nn.CausalAttention(8, 8, 6, 0.0)(torch.randn(2, 6, 8), mask=mask),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_it_warns_once(call: Callable[[Tensor], Any]) -> None:
    with pytest.warns(
        UserWarning, match="^pyattn: no query sees a key, so every result is 0: mask is True where a key "
    ):
        call(HIDDEN)
    with silent():
        call(HIDDEN)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_mask_of_the_other_polarity_is_silent(call: Callable[[Tensor], Any]) -> None:
    one = torch.zeros(6, 6).bool()
    one[2, 0] = True
    with silent():
        call(~HIDDEN), call(one)


def test_what_may_be_empty_is_silent() -> None:
    """Parts, which ask for lse; no keys, no queries, no sequences; masks by ranges; compiled graphs."""
    q, k, v = tensors()
    empty = torch.zeros(6, 6).bool()
    with silent():
        pyattn.attention(q, k, v, mask=empty, return_lse=True)
        pyattn.attention(q, k[:, :, :0], v[:, :, :0], mask=empty[:, :0])
        pyattn.attention(q[:, :, :0], k, v, mask=empty[:0])
        pyattn.attention(q[:0], k[:0], v[:0], mask=empty)
        pyattn.attention(q, k, v, key_ranges=torch.zeros(1, 6, 2, dtype=torch.int64))
        pyattn.attention(*(t.to("meta") for t in (q, k, v)), mask=empty.to("meta"))
        pyattn.attention_with_cache(q, KVCache(2, 4, 6, 8), mask=empty)
        torch.func.vmap(lambda *t: pyattn.attention(*t, mask=empty))(*(t[:, None] for t in (q, k, v)))
