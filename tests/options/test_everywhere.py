"""Promise: every tensor option, in every form of its axes, goes through transforms, weights, caches and packing."""

from typing import Any

import pytest
import torch
from support.axes import PUBLIC, forms, of_axes, with_seed
from torch import Tensor

from pyattn import KVCache, attention, attention_varlen, attention_weights, attention_with_cache
from pyattn.options import LEARNED
from pyattn.options.axes import AXES, PACKED_AXES, having, part, words_of

B, HQ, HKV, SQ, SK, D = 3, 4, 2, 5, 7, 8
SIZES = {"b": B, "h": HQ, "g": HKV, "q": SQ, "k": SK, "n": 2, "r": 9, "2": 2}
FORMS = [(name, *form) for name in PUBLIC for form in forms(name)]


def qkv(seqlen_q: int = SQ) -> list[Tensor]:
    sizes = (HQ, seqlen_q), (HKV, SK), (HKV, SK)
    return [torch.randn(B, heads, length, D, dtype=torch.float64) for heads, length in sizes]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize(("name", "broadcast", "left_out"), FORMS)
@pytest.mark.parametrize("mapped", [True, False])
def test_vmap(name: str, broadcast: str, left_out: int, mapped: bool) -> None:
    """Gradients over copies of the option and of q, or of q alone."""
    q, k, v = qkv()
    options = [of_axes(name, SIZES, broadcast, left_out) for _ in range(2 if mapped else 1)]
    qs, option = torch.stack([q, q.flip(2)]), torch.stack(options) if mapped else options[0]

    def loss(q: Tensor, option: Tensor) -> Tensor:
        return attention(q, k, v, **with_seed(name, option)).square().sum()

    wanted = (0, 1) if name in LEARNED else (0,)
    if name != "dropout_seed" or not mapped:
        found = torch.vmap(torch.func.grad(loss, wanted), (0, 0 if mapped else None))(qs, option)
        each = [torch.func.grad(loss, wanted)(one, option[i] if mapped else option) for i, one in enumerate(qs)]
        close(found, tuple(torch.stack(parts) for parts in zip(*each, strict=True)))


@pytest.mark.parametrize(("name", "broadcast", "left_out"), FORMS)
def test_weights_of_some_heads_and_rows(name: str, broadcast: str, left_out: int) -> None:
    q, k, v = qkv()
    given = with_seed(name, of_axes(name, SIZES, broadcast, left_out))
    whole = attention_weights(q, k, **given)
    pairs = whole if name != "selected" else _at_keys(whole, given[name])
    close(pairs @ v.repeat_interleave(2, 1), attention(q, k, v, **given))
    close(attention_weights(q, k, heads=[3, 0], rows=[-1, 2], **given), whole[:, [3, 0]][:, :, [-1, 2]])


@pytest.mark.parametrize(("name", "broadcast", "left_out"), FORMS)
def test_derivatives(name: str, broadcast: str, left_out: int) -> None:
    """First and second ones, in q, k, v and the option."""
    option = of_axes(name, SIZES, broadcast, left_out)
    tensors = [*(t.requires_grad_() for t in qkv()), option.requires_grad_(name in LEARNED)]

    def attend(q: Tensor, k: Tensor, v: Tensor, option: Tensor) -> Tensor:
        return attention(q, k, v, **with_seed(name, option))

    assert torch.autograd.gradcheck(attend, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, tensors, fast_mode=True)


@pytest.mark.parametrize(("name", "broadcast", "left_out"), FORMS)
@pytest.mark.parametrize("pages", [None, 16])
def test_caches(name: str, broadcast: str, left_out: int, pages: int | None) -> None:
    """One that has as many slots as keys, and a paged one; weights have the keys in use alone."""
    q, k, v = (t.float() for t in qkv())
    slots = SK if pages is None else 16
    cache = KVCache(B, HKV, slots, D, dtype=torch.float32, page_size=pages)
    cache.append(k, v)
    given = with_seed(name, of_axes(name, SIZES | {"k": slots}, broadcast, left_out))
    given = {key: t.float() if isinstance(t, Tensor) and t.is_floating_point() else t for key, t in given.items()}
    direct = given | {key: part(AXES[key], given[key], {"k": slice(SK)}) for key in having("k") if key in given}
    if name == "key_ranges":
        direct[name] = given[name].clamp(max=SK)
    if name == "selected":  # no key is there yet
        direct[name] = torch.where(given[name] < SK, given[name], -1)
    torch.testing.assert_close(attention_with_cache(q, cache, **given), attention(q, k, v, **direct))
    torch.testing.assert_close(attention_weights(q, cache, **given), attention_weights(q, k, **direct))


@pytest.mark.parametrize(("name", "broadcast", "left_out"), [form for form in FORMS if form[0] not in ("mask", "bias")])
def test_packed_sequences(name: str, broadcast: str, left_out: int) -> None:
    """A batch of equal lengths, packed; its derivatives run sequence by sequence."""
    q, k, v = qkv()
    tensor = of_axes(name, SIZES, broadcast, left_out)
    packed = tensor if PACKED_AXES[name] == AXES[name] else _packed(name, tensor)
    ends = [torch.arange(B + 1) * length for length in (SQ, SK)]
    tokens = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, **with_seed(name, tensor)).transpose(1, 2).flatten(0, 1)

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_varlen(q, k, v, *ends, SQ, SK, **with_seed(name, packed))

    close(varlen(*tokens), dense(q, k, v))
    tangents = [torch.randn_like(t) for t in (q, k, v)]
    moved = torch.func.jvp(dense, (q, k, v), tuple(tangents))[1]
    close(torch.func.jvp(varlen, tuple(tokens), tuple(t.transpose(1, 2).flatten(0, 1) for t in tangents))[1], moved)


def _at_keys(weights: Tensor, selected: Tensor) -> Tensor:
    """(B, HQ, SQ, n) weights of listed keys -> (B, HQ, SQ, SK)."""
    lists = selected.repeat_interleave(HQ // selected.shape[1], 1).expand_as(weights)
    return torch.zeros(B, HQ, SQ, SK + 1, dtype=weights.dtype).scatter_add(-1, lists % (SK + 1), weights)[..., :SK]


def _packed(name: str, tensor: Tensor) -> Tensor:
    """A batch's option as one of packed sequences: its rows or columns are tokens."""
    words = words_of(AXES[name], tensor.dim())
    at = next(dim for dim, word in enumerate(words) if word[0] in "qk")
    sizes = [
        SIZES[word[0]] if dim in (0, at) else size
        for dim, (word, size) in enumerate(zip(words, tensor.shape, strict=True))
    ]
    return tensor.expand(sizes).movedim(0, at - 1).flatten(at - 1, at)
