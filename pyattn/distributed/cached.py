"""Decoding: queries that every rank has, over a sequence whose keys lie in the caches of several ranks."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import Unpack

from pyattn.arguments import check_tensor, check_type, refuse_positional
from pyattn.autocast import cast
from pyattn.cache import KVCache
from pyattn.distributed.cache_part import Whole, keys_of, part_of
from pyattn.distributed.call import Parsed, chosen, facts_of, refuse_transforms, seed_of
from pyattn.distributed.ranks import ERRORS, Group, Ranks, agree, exchange, gather_words, ranks_of
from pyattn.distributed.rows import Rows
from pyattn.distributed.shares import Dense
from pyattn.max_score import of_heads
from pyattn.ops.schema import LEARNED, Options
from pyattn.options import AttentionOptions
from pyattn.parse import takes_options

NAME = "attention_with_cache"


@takes_options
def attention_with_cache(
    q: Tensor,
    cache: KVCache,
    group: Group = None,
    *positional: object,
    return_lse: bool = False,
    return_max_score: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, ...]:
    """:func:`pyattn.attention_with_cache` over a sequence whose keys lie in the caches of several ranks.

    Rank 0's cache holds the first keys of each sequence, the next rank's those after them, and so on. Each rank
    computes the queries over its own keys; one exchange merges the results, in the order of the ranks, so all ranks get
    the same bits. To continue a text, only the last rank appends the keys of the new tokens.

    Args:
        q: (B, Hq, Sq, D), the same on all ranks: the newest Sq positions.
        cache: this rank's keys and values: a :class:`pyattn.KVCache` without a ring buffer.
        group: the ranks: a process group or a mesh of one dimension; None: all.
        return_lse: also return lse.
        return_max_score: also return max_score, after lse.
        options: as for :func:`pyattn.attention_with_cache`, with positions of the whole sequence and these differences.
            q_offset: after an append with lengths, pass it: the ranks do not know that append. mask, bias: the columns
            of this rank's own cache, max_seqlen of them. A mask with Sq columns on all ranks is one over the queries'
            own keys, as of a drafted tree, on whichever ranks these keys lie. dropout_seed: default: drawn by rank 0.

    Returns:
        As for :func:`pyattn.attention_with_cache`, on every rank, differentiable once. The loss is one that every rank
        computes, and the gradients of q, alibi_slopes, sinks and relative_bias are those of one process, the same bits
        on every rank; the gradient of a bias has this rank's columns. Backward, too, is a call of all ranks.

    Raises:
        ValueError, TypeError, NotImplementedError: as for :func:`pyattn.attention_with_cache`; a ring buffer. If the
            arguments of ranks differ, or one rank's are wrong, every rank raises.
        RuntimeError, in backward: as there, if this rank has appended since; the other ranks raise ValueError.
    """
    if positional:
        refuse_positional(attention_with_cache, positional)
    ranks, error = ranks_of(group), None
    known, facts, words = Options(), dict[str, Any](), Words()
    try:
        parsed = _checked(q, cache, options)
        known, q = parsed.options, cast(q)
        words = Words.of(cache, known)
        facts = _facts(q, cache, known, words.seed if parsed.chosen else None)
    except ERRORS as problem:
        error = problem
    all_words = [Words(*row) for row in agree(NAME, ranks, facts, [*words], error)]
    if known.dropout_p:
        known = known._replace(dropout_seed=known.dropout_seed.new_tensor(all_words[0].seed))
    call = _call(q, cache, known, ranks, all_words)
    learned = [getattr(known, name) for name in LEARNED]
    results = _OverRanks.apply(call, q, *learned)  # type: ignore[no-untyped-call]
    out, lse, largest = results
    return chosen(out, lse, of_heads(largest), return_lse, return_max_score)


class Words(NamedTuple):
    """The numbers of a rank's arguments, in which ranks may differ.

    Attributes:
        shortest, longest: the lengths of its sequences.
        slots: the size of its cache.
        mask, bias: their columns; 0 without one.
        seed: of dropout.
    """

    shortest: int = 0
    longest: int = 0
    slots: int = 0
    mask: int = 0
    bias: int = 0
    seed: int = 0

    @classmethod
    def of(cls, cache: KVCache, options: Options) -> "Words":
        """A rank's own."""
        shortest, longest = map(int, cache.lengths.aminmax()) if len(cache.lengths) else (0, 0)
        mask, bias = (t.shape[-1] if t is not None and t.dim() else 0 for t in (options.mask, options.bias))
        return cls(shortest, longest, cache.max_seqlen, mask, bias, seed_of(options))


class _Call(NamedTuple):
    """A call that all ranks agree on.

    Attributes:
        wanted: whether q and each of LEARNED need a gradient.
        one_column: whether one column of bias is for the keys of all ranks, so that its gradient is a sum too.
    """

    ranks: Ranks
    cache: KVCache
    whole: Whole
    options: Options
    wanted: tuple[bool, ...]
    one_column: bool


def _checked(q: Tensor, cache: KVCache, options: AttentionOptions) -> Parsed:
    """The options of a call, parsed; raises if this rank's arguments can't be used on several ranks."""
    check_tensor("q", q)
    check_type("cache", cache, KVCache)
    refuse_transforms(attention_with_cache)
    if q.dim() != 4:
        raise ValueError(f"pyattn: q must be (batch, heads, positions, head_dim), got shape {tuple(q.shape)}")
    if cache.window is not None:
        raise NotImplementedError("pyattn: a ring buffer on several ranks is not implemented; its keys fit one rank")
    return Parsed.of(attention_with_cache, options, q.device)


def _wanted(q: Tensor, options: Options) -> tuple[bool, ...]:
    given = q, *(getattr(options, name) for name in LEARNED)
    return tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in given)


def _facts(q: Tensor, cache: KVCache, options: Options, seed: int | None) -> dict[str, Any]:
    """The facts that ranks must have in common, by name."""
    k, paged = cache.k, cache.block_table is not None
    sizes = [len(cache.lengths), k.shape[2] if paged else k.shape[1], k.shape[-1], cache.v.shape[-1]]
    facts = {"dtype": str(q.dtype), "shape of q": list(q.shape), "cache's sizes": sizes} | facts_of(options)
    for name in ("mask", "bias"):
        if (pairs := getattr(options, name)) is not None:
            facts[f"shape of {name} without its columns"] = list(pairs.shape[:-1])
    return facts | {"dropout_seed": seed, "requires_grad of q, " + ", ".join(LEARNED): _wanted(q, options)}


def _call(q: Tensor, cache: KVCache, options: Options, ranks: Ranks, words: list[Words]) -> _Call:
    if all(own.shortest == own.longest for own in words):
        found = [[own.longest] * len(cache.lengths) for own in words]
    else:
        found = gather_words(cache.lengths.tolist(), ranks)
    seqlen_q = q.shape[2]
    own_keys = all(own.mask == seqlen_q > 1 for own in words) and any(own.slots != seqlen_q for own in words)
    one_column = all(own.bias == 1 for own in words) and any(own.slots != 1 for own in words)
    whole = Whole(cache.lengths.new_tensor(found), ranks.own, own_keys)
    return _Call(ranks, cache, whole, options, _wanted(q, options), one_column)


class _OverRanks(torch.autograd.Function):
    """(out, lse, each query's largest score) over all ranks' keys."""

    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, *learned: Tensor | None) -> tuple[Tensor, ...]:
        ranks, cache, whole, options, wanted, _ = call
        try:
            k, v, pages = keys_of(q, cache, any(wanted))
            part = part_of(q, cache, whole, options)
            own = part.forward(q, k, v, pages)
        except ERRORS as error:
            numbers = q.new_empty(2, *q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
            exchange(NAME, ranks, [*numbers, q.new_empty(*q.shape[:3], cache.v.shape[-1])], error)
            raise
        sent = own.row_max, own.row_sum, own.out
        rows, *others = (Rows(out, *numbers) for *numbers, out in exchange(NAME, ranks, sent))
        rows = Rows(*(t.to(rows.row_max.dtype, copy=True) for t in rows))  # not views of a message
        for other in others:
            rows.merge(other, Dense.column)
        largest = rows.row_max.clone()
        rows.merge_sinks(options.sinks, Dense.column)
        rows = rows._replace(out=rows.out.to(q.dtype))
        ctx.call, ctx.part, ctx.wide, ctx.device = call, part, rows.row_max.dtype, q.device
        ctx.kinds = [(None, None) if t is None else (t.shape, t.dtype) for t in (q, *learned)]
        ctx.mark_non_differentiable(largest)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *rows, *learned)
        return rows.out, rows.lse, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        call, part, error = ctx.call, ctx.part, None
        found: list[Tensor | None] = []
        # dq first: it is there whatever is wanted, so that every rank hears of an error.
        shares = [at for at, name in enumerate(LEARNED, 1) if call.wanted[at] and (name != "bias" or call.one_column)]
        summed = [0, *shares]
        sent = [torch.zeros(ctx.kinds[at][0], dtype=ctx.wide, device=ctx.device) for at in summed]
        try:
            q, k, v, out, row_max, row_sum, *learned = ctx.saved_tensors
            part = part._replace(options=part.options._replace(**dict(zip(LEARNED, learned, strict=True))))
            dout = torch.zeros_like(out) if dout is None else dout
            found = part.backward(dout, dlse, q, k, v, Rows(out, row_max, row_sum), call.wanted[1:])
            for total, at in zip(sent, summed, strict=True):
                if (share := found[at]) is not None:
                    total.copy_(share)
        except ERRORS as problem:
            error = problem
        parts = exchange(NAME, call.ranks, sent, error)
        for at, first, *others in zip(summed, *parts, strict=True):
            found[at] = sum(others, first)  # in the order of the ranks: the same bits on all
        return None, *(
            g.to(dtype) if g is not None and want else None
            for g, (_, dtype), want in zip(found, ctx.kinds, call.wanted, strict=True)
        )
