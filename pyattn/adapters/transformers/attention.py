"""The attention function that transformers calls in each layer, with its arguments as options of pyattn."""

import sys

import torch
from torch import Tensor, nn

from pyattn import AttentionOptions, attention, attention_varlen, attention_weights, attention_with_cache
from pyattn.adapters.transformers import models, packed, selected
from pyattn.adapters.transformers import options as transformers_options
from pyattn.adapters.transformers.cache import CachedRows, over_slots
from pyattn.adapters.transformers.mask import Mask
from pyattn.adapters.transformers.position_bias import PositionBias, relative_options
from pyattn.masks import KeyRanges
from pyattn.options.checks import check_size, shown
from pyattn.options.dropout import draw_seed
from pyattn.options.tensor_types import check_outside

NOT_ABOUT_ATTENTION = frozenset(
    {
        "cache_position",
        "decoder_input_ids",
        "image_sizes",
        "labels",
        "logits_to_keep",
        "num_items_in_batch",
        "seq_idx",
        "shift_labels",
    }
)
"""Tensors that models pass through: cache positions, which the mask contains, tokens, arguments of other layers and of
the loss. Gemma 4 and Gemma 3n pass their labels."""


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | KeyRanges | Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    position_bias: Tensor | PositionBias | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    cache: object = None,
    output_attentions: bool | None = None,
    **named: object,
) -> tuple[Tensor, Tensor | None]:
    """:func:`pyattn.attention` as transformers' ``AttentionInterface`` calls it.

    Args:
        module: the layer; its ``is_causal`` applies if the argument ``is_causal`` is None.
        query: (B, Hq, Sq, D); a batch of 1 serves every batch of the keys.
        key, value: (B, Hkv, Sk, D), heads not repeated.
        attention_mask: the result of :func:`mask_function`, or a tensor of four dimensions that broadcasts to (B, Hq,
            Sq, Sk): bool, True = takes part, or float, added to the scores. A tensor is the whole mask, and so are
            KeyRanges (B or 1, Sq, 2) or (B or 1, Sq, n, 2) marked as whole. None, and other KeyRanges in addition:
            causal from the upper left if ``is_causal`` and there are several queries, else every key. A Mask must be
            made for Sq queries and Sk keys.
        dropout: probability of dropping a weight.
        scaling: factor on the scores; default 1 / sqrt(D).
        sliding_window: a query sees itself and the ``sliding_window`` - 1 keys before it. A mask already contains it;
            without a mask, it applies to causal attention, and otherwise must be at least the number of keys.
        softcap: bound on the scores.
        is_causal: see ``attention_mask``.
        s_aux: (Hq,), sinks.
        sinks: (B, Hq, Sq, 1), a sink of each query, as in Inkling 2; not with s_aux.
        indices: (B, Sq, n) integers: of the keys that the mask shows, a query sees those in its list; -1 lists none.
        block_indices: (B, H, Sq, n), the same with blocks of ``module.config.index_block_size`` keys; the H lists
            of a query serve Hq / H heads each.
        position_bias: added to the scores, as in T5; differentiable. A PositionBias, which the layers of T5 and its
            relatives make with this implementation, takes no S x S.
        position_ids: (B or 1, Sq) integers; where they restart, causal attention sees
            no earlier token, in addition to a mask of :func:`mask_function` or none;
            a bool or float mask is the whole mask. Other shapes have no effect.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences, batch 1,
            as for flash-attn: no query sees another sequence. They add to a mask; without
            one, each sequence is causal by itself. position_ids then have no effect.
        cache: the paged cache of continuous batching, which is refused.
        output_attentions: whether the weights are wanted too; the model's own setting counts as well.
        named: tensors of other names are refused, except positions, tokens, image sizes, and the arguments of the loss
            and of state space layers; anything else has no effect here.

    Returns:
        ``(out, weights)``: out (B, Sq, Hq, Dv), contiguous; weights (B, Hq, Sq, Sk), after dropout, or None. A query
        that sees no key has out 0.

    Raises:
        TypeError: a tensor of another name; a mask of another type or dtype.
        ValueError: a mask of other dimensions or made for other numbers of queries and keys; a sliding_window without
            the mask it needs; packed sequences with a batch above 1; indices out of range; sinks beside s_aux.
        NotImplementedError: a paged cache; packed sequences without a mask, with position_bias, sinks of each query,
            indices or output_attentions; a call within :func:`pyattn.distributed.context_parallel`.
    """
    check_outside('attn_implementation="pyattn", unlike "sdpa",')
    _check_others(named, cache)
    models.remember(module)
    if sinks is not None and s_aux is not None:
        raise ValueError(f"pyattn: sinks must be None where s_aux is given, got {shown(sinks)}")
    decoder = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    mask = transformers_options.mask_of(attention_mask, query, key)
    if isinstance(mask, Mask) and mask.is_causal:
        mask, decoder = None, True
    whole = mask is not None and not (isinstance(attention_mask, KeyRanges) and not attention_mask.whole)
    causal = query.shape[2] > 1 and not whole and decoder
    if query.shape[0] == 1 != key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)
    options: AttentionOptions = {"causal": causal, "softmax_scale": scaling}  # each further one costs a token's time
    if softcap:
        options["softcap"] = softcap
    if s_aux is not None:
        options["sinks"] = s_aux
    if dropout:
        options["dropout_p"] = dropout
    if not whole and sliding_window is not None:
        options["window"] = transformers_options.window(sliding_window, decoder, key.shape[2])
    if cu_seq_lens_q is not None:
        starts = cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        if query.shape[0] != 1:
            raise ValueError(f"pyattn: cu_seq_lens_q must come with batch 1, got batch {query.shape[0]}")
        if mask is None:
            wanted = output_attentions or None
            _check_absent(position_bias=position_bias, output_attentions=wanted, sinks=sinks)
            _check_absent(indices=indices, block_indices=block_indices)
            longest = int(max_length_q or query.shape[2]), int(max_length_k or key.shape[2])
            return _packed_attention((query, key, value), starts, longest, options | {"causal": decoder}), None
        options["key_ranges"] = packed.by_lengths(*starts, query.shape[2])
    elif decoder and query.shape[2] > 1:
        options["key_ranges"] = transformers_options.documents(module, position_ids, query, key, mask)
    if causal:
        options["q_offset"] = 0  # keys after the queries are unfilled slots of a static cache
    if isinstance(position_bias, PositionBias):
        options |= relative_options(position_bias, query, causal)
        position_bias = None
    if mask is not None or position_bias is not None:
        options |= transformers_options.masked(mask, position_bias, options.get("key_ranges"))
    wants_weights = output_attentions or _captures_weights()
    lists = []
    if indices is not None:
        lists.append(selected.by_indices(indices, query, key))
    if block_indices is not None:
        size = getattr(getattr(module, "config", None), "index_block_size", None)
        lists.append(selected.by_blocks(block_indices, size, query, key))
    if len(lists) == 1 and query.is_cpu and not wants_weights:
        options |= lists[0].options()
    else:
        for one in lists:
            transformers_options.select(options, one.mask(query, key))
    if not wants_weights:
        out, _ = _attention((query, key, value), sinks, options)
        return out.transpose(1, 2).contiguous(), None
    if dropout:
        options["dropout_seed"] = draw_seed(query.device)
    out, share = _attention((query, key, value), sinks, options)
    if isinstance(key, CachedRows):
        weights = attention_weights(query, key.cache, **over_slots(key.cache, options))
    else:
        weights = attention_weights(query, key, **options)
    if share is not None:
        weights = (weights * share).to(weights.dtype)
    return out.transpose(1, 2).contiguous(), weights


def _check_others(named: dict[str, object], cache: object) -> None:
    """Refuses arguments that would change attention, and that :func:`attention_function` does not know."""
    for name, argument in named.items():
        if isinstance(argument, Tensor) and name not in NOT_ABOUT_ATTENTION:
            raise TypeError(f"pyattn: the attention function has no tensor argument {name}, got {shown(argument)}")
    if cache is not None:
        raise NotImplementedError(
            f"pyattn: cache must be None, continuous batching is not supported, got {shown(cache)}"
        )


def _check_absent(**given: object) -> None:
    """Refuses what packed sequences without a mask do not take."""
    for name, argument in given.items():
        if argument is not None:
            raise NotImplementedError(f"pyattn: cu_seq_lens_q must come with a mask if {name} is given")


def _attention(
    inputs: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor | None]:
    """Attention (B, Hq, Sq, Dv); with sinks of each query also the share of each softmax that its keys have."""
    if isinstance(inputs[1], CachedRows) and sinks is None:
        cached = inputs[1].cache
        return attention_with_cache(inputs[0], cached, **over_slots(cached, options)), None
    if sinks is None:
        return attention(*inputs, **options), None
    return selected.with_sinks(*inputs, sinks, options)


def _packed_attention(
    inputs: tuple[Tensor, Tensor, Tensor],
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    options: AttentionOptions,
) -> Tensor:
    """Attention of packed sequences, heads (1, H, total, D) in and (1, total, H, Dv) out."""
    for name, length in zip(("max_length_q", "max_length_k"), longest, strict=True):
        check_size(name, length)
    q, k, v = (x[0].transpose(0, 1) for x in inputs)
    return attention_varlen(q, k, v, *starts, *longest, **options)[None]


def _captures_weights() -> bool:
    """Whether transformers collects attentions now: not every model passes ``output_attentions`` to its layers."""
    if torch.compiler.is_compiling():
        return False
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    return collector is not None and any(name.endswith("attentions") for name in collector.get() or ())
