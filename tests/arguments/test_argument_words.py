"""Promise: arguments as users write them work if their meaning is clear, and otherwise get advice on what to write."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.assertions import refused
from support.cases import Case, assert_equal
from torch import Tensor

import pyattn
from pyattn import KVCache, masks
from pyattn.adapters import flex
from pyattn.options.attention_options import OPTIONS

q, k, v = Case(2, 4, 2, 3, 5, 8, 8).inputs(torch.float32)
CU_SEQLENS = torch.tensor([0, 1, 3]), torch.tensor([0, 2, 5])


def over_cache(**sizes: Any) -> Callable[..., Any]:
    cache = KVCache(2, 2, 5, 8, **sizes)
    cache.append(k, v)
    queries = q[:, :, :2]
    return lambda **options: pyattn.attention_with_cache(queries, cache, return_lse=True, **options)


def backward(**options: Any) -> Any:
    forward = {name: None if name == "dropout_p" else x for name, x in options.items()}
    out, lse = pyattn.attention(q, k, v, return_lse=True, **forward)
    return pyattn.parts.attention_backward(out, q, k, v, out, lse, **options)[:3]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attention": lambda **options: pyattn.attention(q, k, v, return_lse=True, **options),
    "attention_varlen": lambda **options: pyattn.attention_varlen(
        *(x[0].transpose(0, 1) for x in (q, k, v)), *CU_SEQLENS, 2, 3, **options
    ),
    "attention_weights": lambda **options: pyattn.attention_weights(q, k, **options),
    "attention_with_cache": over_cache(),
    "attention_with_prefix": lambda **options: pyattn.attention_with_prefix(
        q, k[:, :, 2:], v[:, :, 2:], k[:1, :, :2], v[:1, :, :2], return_lse=True, **options
    ),
    "attention_with_cache, ring": over_cache(window=(1, 0)),
    "attention_with_cache, pages": over_cache(page_size=16),
    "attention_backward": backward,
}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def results(name: str, **options: Any) -> tuple[Tensor, ...]:
    found = FUNCTIONS[name](**options)
    return found if isinstance(found, tuple) else (found,)


@each_function
@pytest.mark.parametrize("causal", [True, False])
def test_none_is_not_given(name: str, causal: bool) -> None:
    """Model configurations pass None."""
    expected, optional = results(name, causal=causal), OPTIONS.keys() - {"causal"}
    for options in (*([option] for option in optional), optional):
        assert_equal(results(name, causal=causal, **dict.fromkeys(options)), expected)


@each_function
def test_offsets_of_32_bits(name: str) -> None:
    offsets = torch.tensor([3, 3])
    assert_equal(results(name, q_offset=offsets.int()), results(name, q_offset=offsets))
    with pytest.raises(TypeError, match=r"^pyattn: .* must (have dtype|be) int64, got (torch\.)?float32"):
        results(name, q_offset=offsets.float())


def test_offsets_of_32_bits_within_vmap() -> None:
    offsets = torch.tensor([[0, 1], [3, -1]], dtype=torch.int32)
    found = torch.vmap(lambda offset: pyattn.attention(q, k, v, q_offset=offset))(offsets)
    for out, offset in zip(found, offsets, strict=True):
        assert torch.equal(out, pyattn.attention(q, k, v, q_offset=offset.long()))


@each_function
@pytest.mark.parametrize("window", [256, 0, (1, 2, 3), (1.0, 0), (True, 0), "all"])
def test_a_window_that_is_no_pair(name: str, window: Any) -> None:
    rule = "window must be a pair of ints (left, right), window=(W - 1, 0) for a query and the W - 1 keys before it"
    with refused(TypeError, f"{rule}, got {window!r}"):
        results(name, window=window)


NAMES: list[tuple[Callable[..., Any], str, str]] = [
    (pyattn.attention, "casual", "did you mean causal?"),
    (pyattn.attention, "softmaxscale", "did you mean softmax_scale?"),
    (
        pyattn.attention,
        "is_casual",
        "did you mean is_causal? use causal (default True, bottom-right; scaled_dot_product",
    ),
    (
        pyattn.attention,
        "sliding_windows",
        "did you mean sliding_window? use window=(W - 1, 0): a query sees itself and",
    ),
    (pyattn.attention_varlen, "seqused", "did you mean seqused_k?"),
    (pyattn.attention_varlen, "is_causal", "use causal (default True"),
    (pyattn.attention_weights, "head", "did you mean heads?"),
    (pyattn.attention_with_cache, "return_lsee", "did you mean return_lse?"),
    (pyattn.attention_with_prefix, "prefix", "did you mean prefix_k?"),
    (pyattn.parts.attention_backward, "dropoutp", "did you mean dropout_p?"),
    (pyattn.parts.attention_backward, "scale", "use softmax_scale"),
    (pyattn.parts.merge, "lse", "did you mean lse_a?"),
    (pyattn.dropout_mask, "dropout", "did you mean dropout_p?"),
    (masks.documents, "length", "did you mean lengths?"),
    (masks.prefix_lm, "prefix_length", "did you mean prefix?"),
    (masks.chunked, "chunk_size", "did you mean chunk?"),
    (masks.padding, "seqlen", "did you mean seqlen_k?"),
    (masks.from_bool, "flavour", "its arguments are mask"),
    (flex.sliding_window, "offsets", "did you mean offset?"),
    (flex.softcap, "softcap", "did you mean cap?"),
    (KVCache, "num_heads", "did you mean num_heads_kv?"),
]


@pytest.mark.parametrize(("function", "word", "hint"), NAMES, ids=[f"{f.__name__} {word}" for f, word, _ in NAMES])
def test_unknown_names(function: Callable[..., Any], word: str, hint: str) -> None:
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    rule = f"pyattn: {function.__name__} has no argument {word} ({hint}"
    with pytest.raises(TypeError, match=f"^{re.escape(rule)}.*, got 1$"):
        function(*[q] * len(required), **{word: 1})


FACTORIES = [flex.causal, flex.sliding_window, flex.document, flex.prefix_lm, flex.and_masks, flex.or_masks]


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_a_mask_that_was_not_called(factory: Any, place: str) -> None:
    """On every device, before torch's own function sees it."""
    name = factory.__name__
    rule = f"pyattn: mask_mod must be what {name}(...) returns, got the function {name} itself"
    with pytest.raises(TypeError, match=f"^{re.escape(rule)}$"):
        flex.create_block_mask(factory, None, None, 8, 8, device=place)
    for combine in (flex.and_masks, flex.or_masks):
        with pytest.raises(TypeError, match=f"^{re.escape(rule)}$"):
            combine(flex.causal(), factory)


@pytest.mark.parametrize("factory", [flex.softcap, flex.alibi])
@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_a_score_that_was_not_called(factory: Any, place: str) -> None:
    name = factory.__name__
    rule = f"pyattn: score_mod must be what {name}(...) returns, got the function {name} itself"
    with pytest.raises(TypeError, match=f"^{re.escape(rule)}$"):
        flex.flex_attention(*[torch.zeros(1, 1, 8, 8, device=place)] * 3, score_mod=factory)


@pytest.mark.parametrize("dtype", ["float32", float, 32, Tensor])
def test_what_is_no_dtype(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"^pyattn: dtype must be a torch\.dtype, such as torch\.float32, got "):
        KVCache(1, 1, 4, 8, dtype=dtype)


FACES = [pyattn.attention, pyattn.attention_varlen, pyattn.attention_weights]
FACES += [pyattn.attention_with_cache, pyattn.attention_with_prefix]


def test_none_is_in_the_signatures() -> None:
    for function in FACES:
        for name in ("window", "softcap", "dropout_p"):
            assert "None" in str(inspect.signature(function).parameters[name].annotation)


HABITS: list[tuple[dict[str, Any], str]] = [
    ({"is_causal": True}, "is_causal (use causal (default True, bottom-right; "),
    ({"scale": 0.5}, "scale (use softmax_scale), got 0.5"),
    (
        {"attn_mask": torch.zeros(5, 7)},
        "attn_mask (use mask if it is bool, True = takes part, bias if it is added to the scores; with causal=False if "
        "it is the whole mask), got torch.Tensor of shape (5, 7)",
    ),
    ({"enable_gqa": True}, "enable_gqa (leave it out, k and v may have fewer heads than q), got True"),
    ({"dropout": 0.1}, "dropout (use dropout_p), got 0.1"),
    ({"window_size": (3, 0)}, "window_size (use window), got (3, 0)"),
    ({"sliding_window": 4}, "sliding_window (use window=(W - 1, 0): a query sees itself and the W - 1 keys before it)"),
    (
        {"flavour": "mild"},
        "flavour (its arguments are q, k, v, causal, q_offset, window, key_ranges, mask, softmax_scale, softcap, bias, "
        "alibi_slopes, sinks, relative_bias, dropout_p, dropout_seed, selected, selected_block, return_lse, "
        "return_max_score), got 'mild'",
    ),
    (
        {"scale": 0.5, "dropout": 0.0},
        "scale (use softmax_scale), got 0.5; no argument dropout (use dropout_p), got 0.0",
    ),
]


@pytest.mark.parametrize(("named", "message"), HABITS, ids=[m[:20] for _, m in HABITS])
def test_arguments_of_other_libraries(named: dict[str, Any], message: str) -> None:
    with refused(TypeError, f"attention has no argument {message}"):
        pyattn.attention(q, k, v, **named)


def test_a_fourth_positional_argument() -> None:
    message = (
        "pyattn: attention takes q, k, v by position and the rest by name (other libraries have attn_mask or dropout_p "
        "next), got 1 more, the first torch.Tensor of shape (5, 7)"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        pyattn.attention(q, k, v, torch.zeros(5, 7))


def test_the_signature_shows_no_catch_all() -> None:
    kinds = {parameter.kind for parameter in inspect.signature(pyattn.attention).parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'v'"):
        pyattn.attention(q, k)
