"""The options of attention, each defined once: type, check, meaning, names in other libraries, dimensions of a tensor.

Each option's name, place and default are those of the operators' schemas, generated from csrc/ops/options.h.
"""

from collections.abc import Callable, Mapping
from types import NoneType
from typing import Annotated, Any, NamedTuple, TypedDict, get_args, get_type_hints

import torch
from torch import Tensor

from pyattn.options.checks import (
    check_64_bits,
    check_finite,
    check_probability,
    check_scale,
    check_tensor,
    check_type,
    check_window,
)

__all__ = ["AttentionOptions"]


class Option(NamedTuple):
    """An option apart from its name and type.

    Attributes:
        check: ``check(name, value)`` raises TypeError or ValueError for values that no operator could take; the
            operator checks shapes and dtypes.
        meaning: the text that help() shows.
        peers: arguments of other libraries that this option replaces, each with how to use it instead.
        axes: the dimensions of the tensor, in the words of :mod:`pyattn.options.axes`; None for what is no tensor.
        packed: those for packed sequences, if they differ.
        by_position: whether it compares positions of queries and keys, or counts either.
    """

    check: Callable[[str, Any], None]
    meaning: str
    peers: Mapping[str, str] = {}
    axes: str | None = None
    packed: str | None = None
    by_position: bool = False


class Draws(NamedTuple):
    """A ``dropout_seed`` for a part of a larger call, whose draws the part repeats.

    Attributes:
        seed: the larger call's, an int64 scalar tensor.
        origins: where the part lies: ``dropout_origins`` of :class:`pyattn.options.schema.Options`.
    """

    seed: Tensor
    origins: Tensor


def _check_count(name: str, value: object) -> None:
    check_type(name, value, int, torch.SymInt)
    check_64_bits(name, value)


def _check_integer(name: str, value: object) -> None:
    check_type(name, value, int, torch.SymInt, Tensor)
    check_64_bits(name, value)


def _check_seed(name: str, value: object) -> None:
    if not isinstance(value, Draws):
        _check_integer(name, value)


class AttentionOptions(TypedDict, total=False):
    """The options of :func:`pyattn.attention` and of all functions like it, for your own ``**options: Unpack[...]``.

    ``help(pyattn.attention)`` shows what each means.
    """

    causal: Annotated[
        bool,
        Option(
            lambda name, value: check_type(name, value, bool),
            "if True, a query sees no key after its own position. Default: True.",
            {
                "is_causal": "use causal (default True, bottom-right; scaled_dot_product_attention's upper-left is "
                "q_offset=0)"
            },
            by_position=True,
        ),
    ]
    q_offset: Annotated[
        int | Tensor | None,
        Option(
            _check_integer,
            "key position of query 0, an int or a (B,) int32 or int64 tensor; default ``Sk - Sq``, which puts the last "
            "query at the last key. May be negative: the first queries then see nothing.",
            axes="b",
            by_position=True,
        ),
    ]
    window: Annotated[
        tuple[int, int] | None,
        Option(
            lambda _, value: check_window(value),
            "(left, right): how many keys before and after its own position a query sees; -1: all. Default or None: "
            "all. Any int that fits in 64 bits is valid, here and in q_offset: sums saturate.",
            {
                "sliding_window": "use window=(W - 1, 0): a query sees itself and the W - 1 keys before it",
                "window_size": "use window",
            },
            by_position=True,
        ),
    ]
    key_ranges: Annotated[
        Tensor | None,
        Option(
            lambda name, value: check_type(name, value, Tensor),  # parsing checks the rest, on the bare tensor
            "(B or 1, Sq or 1, 2), int32 or int64: query ``i`` sees only the keys [begin, end), 0 <= begin <= end <= "
            "Sk; one row serves every query. Or (B or 1, Sq or 1, n, 2), n from 1 to 4: a query sees the keys in any "
            "of its n intervals, which are sorted and disjoint; they may be empty or touch. :mod:`pyattn.masks` builds "
            "them for packed documents, prefixes, chunks, padding, streaming, and unions of these.",
            {
                "block_mask": "use mask for a mask given as a tensor, key_ranges for up to 4 ranges of keys per query: "
                "see pyattn.masks"
            },
            axes="b? q? (n) 2",
            packed="q (n) 2",
            by_position=True,
        ),
    ]
    mask: Annotated[
        Tensor | None,
        Option(
            check_tensor,
            "bool, True = takes part, 1 to 4 dimensions, which broadcast from the right to (B, Hq, Sq, Sk), any "
            "strides. A mask whose rows are intervals costs as little as ``key_ranges``.",
            {
                "attn_mask": "use mask if it is bool, True = takes part, bias if it is added to the scores; with "
                "causal=False if it is the whole mask",
                "key_padding_mask": "use mask of shape (B, 1, 1, Sk), True = takes part, or "
                "key_ranges=pyattn.masks.padding(...)",
            },
            axes="(b?) (h?) (q?) k?",
            by_position=True,
        ),
    ]
    softmax_scale: Annotated[
        float | None,
        Option(
            check_scale,
            "finite factor on the scores; default ``1 / sqrt(D)``.",
            {"scale": "use softmax_scale"},
        ),
    ]
    softcap: Annotated[
        float | None,
        Option(check_finite, "bound on the scaled scores, finite and at least 0; 0, the default, or None: no bound."),
    ]
    bias: Annotated[
        Tensor | None,
        Option(
            check_tensor,
            "added to the scores, in q's dtype or float32, 1 to 4 dimensions, which broadcast from the right to (B, "
            "Hq, Sq, Sk), any strides. -inf masks the key; the lowest finite number does not.",
            {"attn_bias": "use bias", "score_mod": "use softcap, bias or alibi_slopes"},
            axes="(b?) (h?) (q?) k?",
            by_position=True,
        ),
    ]
    alibi_slopes: Annotated[
        Tensor | None,
        Option(
            check_tensor,
            "(Hq,) or (B, Hq), in q's dtype or float32. Without causal, distances count both ways.",
            axes="(b) h",
            by_position=True,
        ),
    ]
    sinks: Annotated[
        Tensor | None,
        Option(
            check_tensor,
            "(Hq,), in q's dtype or float32: the score of an extra key without a value.",
            {"s_aux": "use sinks"},
            axes="h",
        ),
    ]
    relative_bias: Annotated[
        Tensor | None,
        Option(
            check_tensor,
            "(Hq or 1, 2 R + 1) or (B, Hq or 1, 2 R + 1), in q's dtype or float32: ``relative_bias[h, d + R]`` is "
            "added to the score of a key at distance ``d = j - (i + q_offset)``, clamped to [-R, R]. Memory is linear "
            "in R and the lengths. -inf is a weight of 0; a row without other keys is NaN, as in softmax. "
            ":mod:`pyattn.relative_bias` makes T5's.",
            {"position_bias": "use relative_bias with a value for each distance, or bias with one for each pair"},
            axes="(b) h? r",
            by_position=True,
        ),
    ]
    dropout_p: Annotated[
        float | None,
        Option(
            check_probability,
            "probability of dropping a weight after the softmax, at least 0 and below 1, rounded to a multiple of "
            "1/65536; kept weights are scaled by 1 / (1 - dropout_p). lse does not change. Default or None: 0.",
            {"dropout": "use dropout_p"},
            by_position=True,
        ),
    ]
    dropout_seed: Annotated[
        int | Tensor | None,
        Option(
            _check_seed,
            "an int or an int64 scalar tensor. Seed and position alone decide which weights are dropped, as "
            ":func:`pyattn.dropout_mask` shows, for any number of threads, instruction set and device. Default: drawn "
            "from torch's generator, so ``torch.manual_seed`` repeats it and activation checkpointing recomputes it.",
            axes="",
        ),
    ]
    selected: Annotated[
        Tensor | None,
        Option(
            check_tensor,
            "(B or 1, 1 or Hkv or Hq, Sq, n), int32 or int64: the keys that a query may see, in any order. -1 stands "
            "for none, and a repeated key counts once. The result is that of a ``mask`` with True at these keys, but "
            "time and memory follow the number of listed keys. All other masks apply as well. On a CPU only.",
            {"indices": "use selected", "block_indices": "use selected with selected_block"},
            axes="b? g? q n",
            packed="g? q n",
            by_position=True,
        ),
    ]
    selected_block: Annotated[
        int | None,
        Option(
            _check_count,
            "how many neighbouring keys an entry of ``selected`` stands for: entry ``e`` for the keys ``[e * "
            "selected_block, (e + 1) * selected_block)``. Default or None: 1.",
        ),
    ]


TYPES: dict[str, Any] = get_type_hints(AttentionOptions)
OPTIONS: dict[str, Option] = {
    name: get_args(hint)[1] for name, hint in get_type_hints(AttentionOptions, include_extras=True).items()
}
FLOATS = frozenset(name for name, hint in TYPES.items() if float in get_args(hint))
MAY_BE_NONE = frozenset(name for name, hint in TYPES.items() if NoneType in get_args(hint))
PEERS = {word: use for option in OPTIONS.values() for word, use in option.peers.items()} | {
    "enable_gqa": "leave it out, k and v may have fewer heads than q"
}
