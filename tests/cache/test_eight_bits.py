"""Promise: a cache of 8 bits gives attention over the numbers that its values and scales stand for, for every kind."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from support.assertions import assert_close, refused
from torch import Tensor

from pyattn import KVCache, attention_weights, attention_with_cache, nn, reference
from pyattn.reference import eight_bits

LEFT = 9
KINDS: dict[str, dict[str, Any]] = {
    "slots": {},
    "pages": {"page_size": 16},
    "ring": {"window": (LEFT, 0)},
    "shared": {"shared_values": True, "head_dim_v": 40},
    "shared ring": {"shared_values": True, "head_dim_v": 40, "window": (LEFT, 0)},
    "shared pages": {"shared_values": True, "head_dim_v": 40, "page_size": 16},
}
BYTES = [torch.int8, torch.float8_e4m3fn]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_kind = pytest.mark.parametrize("kind", KINDS)
each_byte = pytest.mark.parametrize("kv_dtype", BYTES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
HEADS, GROUPS, D = 4, 2, 48
BOUNDS = {torch.int8: 0.02, torch.float8_e4m3fn: 0.06}


def tokens(new: int, heads: int = GROUPS, dtype: torch.dtype = torch.float32, batch: int = 2) -> Tensor:
    return torch.randn(batch, heads, new, D).to(dtype)


def stored(cache: KVCache, k: Tensor, v: Tensor) -> list[Tensor]:
    """The numbers that the cache has for k and v."""
    assert cache.kv_dtype is not None
    rows = []
    for t, block in ((k, cache.rotation), (v, 1)):
        rows.append(eight_bits.dequantized(*eight_bits.quantized(t.double(), cache.kv_dtype, block), block))
    return rows


class Text:
    """A cache of 8 bits beside a list of the numbers that the reference's 8 bits of the same tokens stand for."""

    def __init__(self, kind: str, kv_dtype: torch.dtype, dtype: torch.dtype = torch.float32, most: int = 64) -> None:
        most = 24 if "ring" in kind else most
        given = {"head_dim_v": 40} | KINDS[kind]
        self.cache = KVCache(2, GROUPS, most, D, dtype=dtype, kv_dtype=kv_dtype, **given)
        self.k: list[Tensor] = [torch.zeros(GROUPS, 0, D).double()] * 2
        self.v: list[Tensor] = [torch.zeros(GROUPS, 0, self.cache.v.shape[-1]).double()] * 2

    def append(self, new: int, lengths: list[int] | None = None) -> None:
        k = tokens(new, dtype=self.cache.dtype)
        v = tokens(new, dtype=self.cache.dtype)[..., : self.cache.v.shape[-1]]
        self.cache.append(k, *(() if self.cache.shared_values else (v,)), lengths=lengths)
        rows_k, rows_v = self.numbers(k, v)
        for b in range(2):
            count = new if lengths is None else lengths[b]
            self.k[b] = torch.cat([self.k[b], rows_k[b, :, :count]], 1)
            self.v[b] = torch.cat([self.v[b], rows_v[b, :, :count]], 1)

    def numbers(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = stored(self.cache, k, v)
        return keys, keys[..., : self.cache.v.shape[-1]] if self.cache.shared_values else values

    def expected(self, q: Tensor, **options: Any) -> Tensor:
        """out of each sequence's newest queries over its own keys."""
        if self.cache.window is not None:
            options |= {"window": self.cache.window}
        outs = []
        for b in range(2):
            given = {n: t[b : b + 1] if isinstance(t, Tensor) and t.dim() == 4 else t for n, t in options.items()}
            given = {n: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in given.items()}
            outs.append(reference.attention(q[b : b + 1].double(), self.k[b][None], self.v[b][None], **given))
        return torch.cat(outs)

    def check(self, new: int, **options: Any) -> None:
        q = tokens(new, HEADS, self.cache.dtype)
        with torch.no_grad():
            out = attention_with_cache(q, self.cache, **options)
        assert out.dtype == self.cache.dtype
        options.pop("q_offset", None)  # of the newest queries, which is the dense default
        # A value on the border of two steps may round to either: the reference quantises in float64.
        assert relative(out, self.expected(q, **options)) < 2e-3 + 2 * torch.finfo(out.dtype).eps


def relative(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@each_kind
@each_byte
@each_dtype
def test_prompts_chunks_and_tokens(isa: str, kind: str, kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Through a ring's moves, ragged appends and every path of the kernels: few rows, and blocks of queries."""
    text = Text(kind, kv_dtype, dtype)
    for new in (13, 1, 3, 1, 12):
        text.append(new), text.check(new)
    text.append(3, [3, 1]), text.check(1, q_offset=text.cache.lengths - 1)
    text.append(1), text.check(1)
    text.append(15), text.check(15), text.check(1)


@each_byte
@each_dtype
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(72, 68), (76, 100), (130, 64)])
def test_columns_that_fill_no_vector(
    isa: str, kv_dtype: torch.dtype, dtype: torch.dtype, head_dim: int, head_dim_v: int
) -> None:
    """Few rows, each of which sees other keys of a block."""
    k, v = torch.randn(1, GROUPS, 150, head_dim).to(dtype), torch.randn(1, GROUPS, 150, head_dim_v).to(dtype)
    cache = KVCache(1, GROUPS, 160, head_dim, head_dim_v=head_dim_v, dtype=dtype, kv_dtype=kv_dtype)
    cache.append(k, v)
    for scale in (None, 1.0):
        for ranges in ([[0, 50], [40, 149], [100, 117]], [[128, 150], [31, 32], [60, 60]]):
            options = {"causal": False, "key_ranges": torch.tensor([ranges]), "softmax_scale": scale}
            q = torch.randn(1, HEADS, 3, head_dim).to(dtype)
            exact = reference.attention(q.double(), *stored(cache, k, v), **options)
            found = attention_with_cache(q, cache, **options)
            assert relative(found, exact) < 2e-3 + 2 * torch.finfo(dtype).eps


OPTIONS: dict[str, dict[str, Any]] = {
    "scores": {"softcap": 3.0, "alibi_slopes": torch.rand(HEADS), "sinks": torch.rand(HEADS)},
    "relative": {"relative_bias": torch.rand(HEADS, 31), "softmax_scale": 0.3},
    "window": {"window": (5, 0)},
    "tree": {"mask": torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()},
}


@each_kind
@each_byte
@pytest.mark.parametrize("name", OPTIONS)
def test_options(isa: str, kind: str, kv_dtype: torch.dtype, name: str) -> None:
    text, options = Text(kind, kv_dtype), OPTIONS[name]
    text.append(14), text.append(3)
    q, dense = tokens(3, HEADS), dict(options)
    if name == "tree":
        dense["mask"] = torch.cat([torch.ones(3, 14, dtype=torch.bool), options["mask"]], 1)
    if "ring" in kind and name == "window":
        dense = {}
        text.cache.window = options["window"]
        options = {}
    assert relative(attention_with_cache(q, text.cache, **options), text.expected(q, **dense)) < 2e-3


@each_kind
@each_byte
def test_what_changes_a_cache(kind: str, kv_dtype: torch.dtype) -> None:
    """Rows move with their scales: beam search, dropped drafts, kept branches, copies."""
    text = Text(kind, kv_dtype)
    text.append(12), text.append(4, [4, 2])
    text.cache.reorder([1, 0])
    text.k.reverse(), text.v.reverse()
    text.check(1, q_offset=text.cache.lengths - 1)
    text.append(5)
    text.cache.truncate(text.cache.lengths - 2)
    text.k, text.v = ([t[:, :-2] for t in rows] for rows in (text.k, text.v))
    text.check(1)
    text.append(4)
    kept = [[n - 4, n - 2] for n in text.cache.lengths.tolist()]
    text.cache.keep(kept)
    text.k, text.v = ([torch.cat([t[:, :-4], t[:, [-4, -2]]], 1) for t in rows] for rows in (text.k, text.v))
    text.check(2)
    text.cache.reorder([1, 1])
    text.k, text.v = [text.k[1]] * 2, [text.v[1]] * 2
    text.check(1), text.append(3), text.check(3)
    twin = copy.copy(text)
    for made in (
        text.cache.clone(),
        copy.deepcopy(text.cache),
        pickle.loads(pickle.dumps(text.cache)),
        text.cache.to(torch.bfloat16).to(torch.float32),
    ):
        assert made.kv_dtype == kv_dtype
        assert made.k.data_ptr() != text.cache.k.data_ptr()
        twin.cache = made
        twin.check(2)
    assert text.cache.to(torch.bfloat16).dtype == torch.bfloat16
    text.cache.reset()
    text.k, text.v = [text.k[0][:, :0]] * 2, [text.v[0][:, :0]] * 2
    text.append(7), text.check(7)


@each_kind
@each_byte
def test_kept_positions_have_the_bits_of_others(kind: str, kv_dtype: torch.dtype) -> None:
    """A cache that got nothing else has the same values and scales."""
    k, v, q = tokens(14), tokens(14), tokens(1, HEADS)
    drafted, plain = Text(kind, kv_dtype).cache, Text(kind, kv_dtype).cache
    values = () if drafted.shared_values else (v[..., :40],)
    drafted.append(k, *values), drafted.keep([[10, 12]] * 2)
    chosen = [*range(10), 10, 12]
    plain.append(k[:, :, chosen], *(t[:, :, chosen] for t in values))
    for ours, theirs in zip(*((attention_with_cache(q, c, return_lse=True)) for c in (drafted, plain)), strict=True):
        assert torch.equal(ours, theirs)


def outlying(seqlen: int, head_dim: int) -> Tensor:
    """Keys as models have them: one channel of each head is some 25 times as large as the others."""
    k = torch.randn(1, 8, seqlen, head_dim)
    k[:, torch.arange(8), :, torch.randint(head_dim, (8,))] += 25 * torch.randn(8, 1, 1).sign()
    return k


@each_byte
@each_dtype
@pytest.mark.parametrize("head_dim", [64, 128])
def test_error_of_keys_with_outlying_channels(
    isa: str, kv_dtype: torch.dtype, dtype: torch.dtype, head_dim: int
) -> None:
    """Against float64 over the numbers that were appended."""
    k, v = outlying(1500, head_dim).to(dtype), torch.randn(1, 8, 1500, head_dim).to(dtype)
    q = torch.randn(1, 16, 1, head_dim).to(dtype)
    cache = KVCache(1, 8, 1500, head_dim, dtype=dtype, kv_dtype=kv_dtype)
    cache.append(k, v)
    exact = reference.attention(q.double(), k.double(), v.double())
    assert relative(attention_with_cache(q, cache), exact) <= BOUNDS[kv_dtype]
    chunk = torch.randn(1, 16, 20, head_dim).to(dtype)
    assert (
        relative(attention_with_cache(chunk, cache), reference.attention(chunk.double(), k.double(), v.double()))
        <= (BOUNDS[kv_dtype])
    )


@each_byte
def test_error_of_latent_vectors(isa: str, kv_dtype: torch.dtype) -> None:
    """Shared values: 512 latent columns, and 64 rotary ones with outlying channels."""
    k = torch.randn(1, 1, 1500, 576)
    k[..., 520:524] *= 4
    q = torch.randn(1, 16, 1, 576) / 2
    cache = KVCache(1, 1, 1500, 576, head_dim_v=512, shared_values=True, kv_dtype=kv_dtype)
    cache.append(k)
    exact = reference.attention(q.double(), k.double(), k[..., :512].double())
    assert relative(attention_with_cache(q, cache), exact) <= BOUNDS[kv_dtype]


def test_memory() -> None:
    """A token has at most 0.6 of bfloat16's."""
    cache = KVCache(1, 8, 64, 128, dtype=torch.bfloat16, kv_dtype=torch.int8)
    stored = [t for t in vars(cache).values() if isinstance(t, Tensor)]
    per_token = sum(t.numel() * t.element_size() for t in stored) / 64
    assert per_token <= 0.6 * 8 * (128 + 128) * 2


@each_kind
@each_byte
@pytest.mark.parametrize("reduce", [None, "queries", "heads", "entropy"])
def test_weights(kind: str, kv_dtype: torch.dtype, reduce: Any) -> None:
    """By position, as over the numbers that the 8 bits stand for."""
    text = Text(kind, kv_dtype)
    for new in (12, 12, 12):
        text.append(new)
    q, k = tokens(2, HEADS), torch.stack(text.k).float()
    found = attention_weights(q, text.cache, reduce=reduce)
    assert relative(found, attention_weights(q, k, reduce=reduce, window=text.cache.window).double()) < 2e-3


@each_kind
@each_byte
def test_masked_rows_that_are_not_finite(isa: str, kind: str, kv_dtype: torch.dtype) -> None:
    """A row with NaN or inf is NaN where it is visible, and changes no bit where it is masked."""
    for wrong in (math.nan, math.inf):
        for new in (1, 20):
            caches = [Text(kind, kv_dtype).cache for _ in range(2)]
            k, v, q = tokens(22), tokens(22)[..., :40], tokens(new, HEADS)
            soiled = [t.clone() for t in (k, v)]
            for t in soiled:
                t[:, :, 20, 3] = wrong
            for cache, (keys, values) in zip(caches, ((k, v), soiled), strict=True):
                for part in (slice(10), slice(10, 22)):
                    cache.append(keys[:, :, part], *(() if cache.shared_values else (values[:, :, part],)))
            before = {"q_offset": 20 - new} if "ring" not in kind else {"q_offset": 19}
            if "ring" in kind and new > 1:
                continue
            clean, ours = (attention_with_cache(q, c, **before) for c in caches)
            assert torch.equal(clean, ours)
            assert attention_with_cache(q[:, :, -1:], caches[1]).isnan().all()
            if "ring" not in kind:
                mask = torch.arange(64) != 20
                clean, ours = (attention_with_cache(q[:, :, -1:], c, mask=mask) for c in caches)
                assert torch.equal(clean, ours)


@each_kind
@each_byte
def test_one_graph(kind: str, kv_dtype: torch.dtype) -> None:
    def step(cache: KVCache, k: Tensor, v: Tensor, q: Tensor) -> Tensor:
        cache.append(k, None if cache.shared_values else v)
        return attention_with_cache(q, cache)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    ours, expected = Text(kind, kv_dtype).cache, Text(kind, kv_dtype).cache
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for _ in range(4):
            k, v, q = tokens(3), tokens(3)[..., :40], tokens(3, HEADS)
            assert_close(compiled(ours, k, v, q), step(expected, k, v, q))


@each_byte
def test_max_score_and_layouts(isa: str, kv_dtype: torch.dtype) -> None:
    """Heads that are neighbours in memory decode together, with the same bits."""
    cache = KVCache(2, GROUPS, 300, D, kv_dtype=kv_dtype)
    cache.append(tokens(300), tokens(300))
    q = tokens(1, HEADS)
    out, largest = attention_with_cache(q, cache, return_max_score=True)
    for name in ("k", "_v", "k_scale", "_v_scale"):
        t = getattr(cache, name)
        setattr(cache, name, t.transpose(1, 2).contiguous().transpose(1, 2))
    assert torch.equal(attention_with_cache(q, cache), out)
    k = eight_bits.dequantized(cache.k, cache.k_scale.double(), cache.rotation)
    assert_close(largest, (q.double() @ k.repeat_interleave(2, 1).mT / D**0.5).amax((2, 3)).float(), 2e-4)


def test_a_module_decodes() -> None:
    module = nn.GroupedQueryAttention(32, 32, 0.0, 4, 2).eval()
    x = torch.randn(2, 9, 32)
    cache = KVCache(2, 2, 16, 8, kv_dtype=torch.int8)
    with torch.no_grad():
        outs = [module(part, kv_cache=cache) for part in x.split(3, 1)]
        assert relative(torch.cat(outs, 1), module(x).double()) < 0.02
    with refused(
        NotImplementedError, "a cache with kv_dtype=torch.int8 has no gradients: append under torch.no_grad()"
    ):
        module(x[:, :1], kv_cache=cache)
