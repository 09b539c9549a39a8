"""A call over the caches of several ranks: its arguments, checked and parsed, once all ranks have agreed on them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from pyattn.cache import KVCache
from pyattn.cache.attention import misfit
from pyattn.distributed.agreement.checks import DIMS, check_dense, check_options, check_values, refuse_transforms
from pyattn.distributed.agreement.local_options import ParsedOptions, seed_of, summed_wide, with_rows
from pyattn.distributed.agreement.ranks import Group, Ranks, agree, gather_words, ranks_of
from pyattn.distributed.cache.local_keys import SequenceLengths
from pyattn.ops.row_invariance import refuse_row_invariance
from pyattn.options.attention_options import AttentionOptions
from pyattn.options.autocast import cast
from pyattn.options.checks import check_type
from pyattn.options.schema import Options


class CacheCall(NamedTuple):
    """A call that all ranks agree on.

    Attributes:
        name: of the function.
        ranks: the ranks of the call.
        cache: this rank's.
        whole: the sequences, as all ranks know them.
        options: this rank's options, with rank 0's dropout seed.
        wanted: whether q and each of LEARNED need a gradient.
        one_column: whether one column of bias is for the keys of all ranks, so that its gradient is a sum too.
    """

    name: str
    ranks: Ranks
    cache: KVCache
    whole: SequenceLengths
    options: Options
    wanted: list[bool]
    one_column: bool


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


def agreed_on_caches(
    function: Callable[..., Any],
    q: Tensor,
    cache: KVCache,
    group: Group | Ranks,
    options: AttentionOptions | ParsedOptions,
    known_error: Exception | None = None,
) -> CacheCall:
    """The call, once all ranks have the same arguments: see :func:`pyattn.distributed.agreement.ranks.agree`.

    ``known_error``: one that this rank had while it compiled the call.
    """
    ranks, error = ranks_of(group), None
    parsed, facts, words = ParsedOptions(Options(), False, []), dict[str, Any](), Words()
    try:
        if known_error is not None:
            raise known_error
        check_kinds(function, q, cache)
        if problem := misfit(q, cache):
            raise problem
        check_values("q", q)
        parsed = options if isinstance(options, ParsedOptions) else ParsedOptions.of(function, (q,), options)
        parsed = parsed._replace(options=with_rows(parsed.options, q.shape[2]))
        _check_offsets(parsed.options, len(cache.lengths))
        check_options(_without_keys(q, cache), parsed.options)
        words = Words.of(cache, parsed.options)
        facts = _facts(q, cache, parsed)
    except Exception as problem:  # whatever it is, the others must not wait for this rank
        error = problem
    all_words = [Words(*row) for row in agree(function.__name__, ranks, facts, [*words], error)]
    known, seqlen_q = parsed.options, q.shape[2]
    if known.dropout_p:
        known = known._replace(dropout_seed=known.dropout_seed.new_tensor(all_words[0].seed))
    if all(own.shortest == own.longest for own in all_words):
        lengths = [[own.longest] * len(cache.lengths) for own in all_words]
    else:
        lengths = gather_words(cache.lengths.tolist(), ranks)
    own_keys = all(own.mask == seqlen_q > 1 for own in all_words) and any(own.slots != seqlen_q for own in all_words)
    one_column = all(own.bias == 1 for own in all_words) and any(own.slots != 1 for own in all_words)
    known = summed_wide(known, cast(q).dtype, not one_column)
    whole = SequenceLengths(cache.lengths.new_tensor(lengths), ranks.own, own_keys)
    return CacheCall(function.__name__, ranks, cache, whole, known, parsed.wanted, one_column)


def check_kinds(function: Callable[..., Any], q: Tensor, cache: KVCache) -> None:
    """Checks the arguments whatever their sizes."""
    check_type("cache", cache, KVCache)
    if cache.window is not None:
        raise NotImplementedError("pyattn: a ring buffer on several ranks is not implemented; its keys fit one rank")
    if cache.kv_dtype is not None:
        raise NotImplementedError(
            f"pyattn: a cache of 8 bits on several ranks is not implemented, got {cache.kv_dtype}"
        )
    check_dense("q", q)
    refuse_transforms(function)
    refuse_row_invariance(function.__name__)
    if q.dim() != len(DIMS):
        raise ValueError(f"pyattn: q must be ({', '.join(DIMS)}), got shape {tuple(q.shape)}")


def _check_offsets(options: Options, sequences: int) -> None:
    offsets = options.q_offsets
    if offsets is not None and offsets.shape != (sequences,):
        raise ValueError(
            f"pyattn: q_offset must be an int or have a number for each of {sequences} sequences, got shape "
            f"{tuple(offsets.shape)}"
        )


def _without_keys(q: Tensor, cache: KVCache) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a call without keys."""
    heads = cache.k.shape[1 if cache.block_table is None else 2]
    k, v = (cast(t.new_empty(len(cache.lengths), heads, 0, t.shape[-1])) for t in (cache.k, cache.v))
    return cast(q), k, v


def _facts(q: Tensor, cache: KVCache, parsed: ParsedOptions) -> dict[str, Any]:
    """The facts that ranks must have in common, by name."""
    k, paged = cache.k, cache.block_table is not None
    sizes = [len(cache.lengths), k.shape[2] if paged else k.shape[1], k.shape[-1], cache.v.shape[-1]]
    of_q = {"dtype": str(cast(q).dtype), "device": q.device.type, "shape of q": list(q.shape)}
    return of_q | {"cache's sizes": sizes} | parsed.facts("q", "k")
