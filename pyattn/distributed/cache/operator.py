"""The operator of attention over the caches of several ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyattn.cache import KVCache, paged_attention
from pyattn.cache.call_gradients import keys_and_values, lengths_before
from pyattn.cache.storage import over
from pyattn.distributed.agreement.checks import DIMS
from pyattn.distributed.agreement.local_options import ParsedOptions
from pyattn.distributed.agreement.ranks import Group
from pyattn.distributed.cache.call import CacheCall, agreed_on_caches, check_kinds
from pyattn.distributed.cache.merge import Merging, Saved
from pyattn.distributed.compiled.operator import (
    FUNCTIONS,
    Given,
    Operator,
    known_error,
    names_of,
    placeholders,
    ranks_named,
    told,
)
from pyattn.distributed.partial_results import PartialResults
from pyattn.options.attention_options import AttentionOptions
from pyattn.options.autocast import cast
from pyattn.options.schema import Options
from pyattn.weights.max_score import of_heads


def compiled(
    function: Callable[..., Any],
    q: Tensor,
    cache: KVCache,
    group: Group,
    options: AttentionOptions,
    wrong: Exception | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_score) of a call that torch.compile traces; ``wrong``: an error that is known before."""
    try:
        if wrong is not None:
            raise wrong
        check_kinds(function, q, cache)
        parsed, error = ParsedOptions.of(function, (q,), options), ""
    except (TypeError, ValueError, NotImplementedError) as problem:
        parsed, error = ParsedOptions.nothing(1), told(problem)
        (q,) = placeholders((q,), len(DIMS))
        cache = over(KVCache, q, q, torch.zeros(q.shape[0], dtype=torch.int64), None, q.shape[2])
    table, slots = cache.block_table, cache.max_seqlen
    # Backward has copies, which changes of the cache before it do not reach.
    lengths = lengths_before(cache)
    k, v = (cache.k, cache.v) if table is not None else keys_and_values(cache, q, options)
    k, v = cast(k), cast(v)
    if table is not None and any(parsed.wanted):
        (k, v), table = paged_attention.copied(k, v, table, lengths, slots), None
    place = function.__name__, names_of(group), error, parsed.chosen, parsed.wanted
    out, lse, *_, most = _attend(*place, cast(q), k, v, lengths, table, slots, *parsed.options)
    return out, lse, most.detach()


def _agreed(given: Given, options: Options) -> CacheCall:
    (ranks,) = ranks_named(given["groups"])
    cache = over(KVCache, *(given[name] for name in ("k", "v", "lengths", "block_table", "slots")))
    parsed = ParsedOptions(options, given["chosen"], given["wanted"], in_graph=True)
    return agreed_on_caches(FUNCTIONS[given["name"]], given["q"], cache, ranks, parsed, known_error(given))


def _forward(given: Given, options: Options) -> tuple[PartialResults, Tensor, Options]:
    call, q = _agreed(given, options), given["q"]
    results, largest, _ = Merging(call, q).forward(q)
    return results, of_heads(largest), call.options


def _backward(
    given: Given, options: Options, dout: Tensor, dlse: Tensor | None, results: PartialResults
) -> list[Tensor | None]:
    q = given["q"]
    merging = Merging(_agreed(given, options), q)

    def saved() -> Saved:
        own = merging.own(q)
        return Saved(q, own.part, own.k, own.v, results)

    return merging.backward(dout, dlse, saved)


def _shape(given: Given) -> tuple[int, int]:
    batch, heads, *_ = given["q"].shape
    return batch, heads


_ARGUMENTS = "str name, str[] groups, str error, bool chosen, bool[] wanted, "
_ARGUMENTS += "Tensor q, Tensor k, Tensor v, Tensor lengths, Tensor? block_table, SymInt slots"
_attend = Operator("attend_with_cache", _ARGUMENTS, ("q",), _forward, _backward, _shape).call
