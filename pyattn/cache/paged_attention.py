"""Attention over keys and values in pages, which a block table lists for each sequence.

The CPU's forward kernels read pages in place. In four cases, differentiable operations first copy the pages of all
sequences into one tensor, which attention treats like any other keys and values: on a GPU, if gradients are required,
inside a torch.func transform, or with dropout of selected keys. The gradient of a shared page is the sum over its
sequences. Without a copy, pages that many sequences share are read once for all of them:
:mod:`pyattn.cache.shared_pages`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyattn import ops
from pyattn.cache.pages import gathered
from pyattn.cache.shared_pages import over_shared_pages, shared_pages
from pyattn.derivatives import autograd
from pyattn.derivatives.tangents import DENSE
from pyattn.derivatives.transforms import transforming
from pyattn.options.autocast import cast
from pyattn.options.parse import parse
from pyattn.options.schema import LEARNED, Options
from pyattn.weights.max_score import of_heads, with_largest_scores


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    seqlen_k: int,
    return_max_score: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    """``(out, lse)`` or ``(out, lse, max_score)`` of :func:`pyattn.attention` over a paged cache.

    Positions in ``options`` are in [0, seqlen_k).

    Args:
        q: (B, Hq, Sq, D).
        k, v: (pages, page_size, Hkv, D) and (pages, page_size, Hkv, Dv).
        block_table: (B, pages of a sequence), each entry a page.
        lengths: (B,), how many positions of each sequence are filled.
        seqlen_k: how many positions a sequence has, filled or not.
        return_max_score, options: those of :func:`pyattn.attention`.
    """
    known = parse(attention, options, q.device)
    if torch._C._is_any_autocast_enabled():
        q, k, v = cast(q), cast(k), cast(v)
    whole = Options(*known)
    if needs_copy(q, k, v, whole):
        keys, values = copied(k, v, block_table, lengths, seqlen_k)
        return _results(partial(autograd.attend, DENSE, q, keys, values), whole, return_max_score)

    def compute(q: Tensor, block_table: Tensor, seqlen_k: int, options: Options) -> tuple[Tensor, ...]:
        def attend(values: tuple[Any, ...]) -> tuple[Tensor, ...]:
            return ops.attention_paged_forward(q, k, v, block_table, seqlen_k, *values)

        return _results(attend, options, return_max_score)

    if whole.selected is None and (shared := shared_pages(q, k, v, block_table, lengths)) is not None:
        found = over_shared_pages(compute, q, k, block_table, seqlen_k, shared, whole)
        if found is not None:
            return found
    return compute(q, block_table, seqlen_k, whole)


def _results(
    attend: Callable[[tuple[Any, ...]], tuple[Tensor, ...]], options: Options, return_max_score: bool
) -> tuple[Tensor, ...]:
    if return_max_score:
        out, lse, largest = with_largest_scores(attend, options)
        return out, lse, of_heads(largest)
    return attend(tuple(options))[:2]


def copied(k: Tensor, v: Tensor, block_table: Tensor, lengths: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """The pages of all sequences as k (B, Hkv, seqlen_k, D) and v (B, Hkv, seqlen_k, Dv)."""
    starts = seqlen_k * torch.arange(len(lengths) + 1, device=lengths.device)
    keys, values, _ = gathered(k, v, block_table, starts, seqlen_k, lengths)
    keys, values = (t.narrow(1, 0, seqlen_k).transpose(1, 2) for t in (keys, values))
    return keys, values


def needs_copy(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """Whether no kernel reads the pages in place: one of the four cases at the top of this file."""
    if (
        (options.selected is not None and options.dropout_p)
        or q.is_cuda
        or (not torch.compiler.is_compiling() and transforming())
    ):
        return True
    learned = (getattr(options, name) for name in LEARNED)
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, *learned))
