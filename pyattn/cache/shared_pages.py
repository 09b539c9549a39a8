"""Decoding over pages that several sequences share: each shared page is read once for all of them.

Sequences that :meth:`pyattn.KVCache.reorder` copied list the same first pages. Over these, they are answers to one
prompt: their queries are heads of one sequence. Their own pages follow in a second call, and the two are merged::

    block_table   3 0 | 5    a call over pages 3 and 0, with the queries of sequences 0 to 2 as heads of one sequence
                  3 0 | 1
                  3 0 | 2    a call over pages 5, 1 and 2, of one sequence each
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyattn.derivatives.merge import merge
from pyattn.options.axes import take
from pyattn.options.checks import has_values
from pyattn.options.positions import explicit, shift
from pyattn.options.schema import Options
from pyattn.prefix.answers import Answers, as_heads
from pyattn.weights.checks import check_call

LEAST_BYTES = 30 << 20
"""The fewest bytes of keys and values that need not be read again: two calls and a merge take 0.3 ms more than one."""

MOST_QUERIES = 8
"""The most queries of a sequence: with more of them, products take the time, not the reading of keys."""


class Shared(NamedTuple):
    """The first ``pages`` that the sequences of each prompt list alike."""

    answers: Answers
    pages: int


def shared_pages(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, lengths: Tensor) -> Shared | None:
    """The pages that adjacent sequences share, by the table's values; None if reading them once saves little.

    All prompts must have as many sequences. Pages count where every sequence has filled them.
    """
    if not (q.is_cpu and has_values(block_table) and q.dim() == k.dim() == 4) or not 2 <= len(q) == len(block_table):
        return None
    page_size, num_heads_kv = k.shape[1:3]
    if q.shape[2] > MOST_QUERIES or not num_heads_kv or q.shape[1] % num_heads_kv:
        return None
    page_bytes = page_size * num_heads_kv * (k.shape[3] + v.shape[3]) * k.element_size()
    count = min(int(lengths.min()) // page_size, block_table.shape[1])
    if count * page_bytes * (len(q) - 1) < LEAST_BYTES:
        return None
    first = block_table[:, 0].tolist()
    each = next((b for b, page in enumerate(first) if page != first[0]), len(first))
    if each == 1 or len(first) % each:
        return None
    answers = Answers.of(q, len(first) // each, num_heads_kv)
    tables = block_table[:, :count].unflatten(0, (answers.prompts, each))
    alike = (tables == tables[:, :1]).flatten(0, 1).all(0)
    pages = count if bool(alike.all()) else int(alike.to(torch.uint8).argmin())
    return Shared(answers, pages) if pages * page_bytes * (len(first) - answers.prompts) >= LEAST_BYTES else None


def over_shared_pages(
    compute: Callable[[Tensor, Tensor, int, Options], tuple[Tensor, ...]],
    q: Tensor,
    k: Tensor,
    block_table: Tensor,
    seqlen_k: int,
    shared: Shared,
    options: Options,
) -> tuple[Tensor, ...] | None:
    """(out, lse) or (out, lse, max_score) over all pages; None if the sequences' options differ over the shared ones.

    Args:
        compute: ``compute(q, block_table, seqlen_k, options)``, over some of the pages.
        q, k, block_table, seqlen_k, options: of the whole call.
        shared: of :func:`shared_pages`.
    """
    answers, pages = shared
    length = pages * k.shape[1]
    check_call(q, k.new_empty(()).expand(len(q), k.shape[2], seqlen_k, k.shape[3]), None, options)
    whole = explicit(options, len(q), q.shape[1], seqlen_k - q.shape[2], q.device)
    over_prompt = shift(take(whole._replace(sinks=None), keys=slice(length)), 0, 0, length)
    together = as_heads(over_prompt, answers, length)
    if together is None:
        return None
    found = compute(answers.stacked(q), block_table[:: answers.each, :pages], length, together)
    prompt_out, prompt_lse, *prompt_most = (answers.unstacked(t) for t in found)
    rest = shift(take(whole, keys=slice(length, seqlen_k)), 0, length, seqlen_k - length)
    out, lse, *most = compute(q, block_table[:, pages:], seqlen_k - length, rest)
    merged = merge(prompt_out, prompt_lse, out, lse)
    return *merged, *(torch.maximum(*pair) for pair in zip(prompt_most, most, strict=True))
