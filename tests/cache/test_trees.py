"""Promise: after a cache of any kind, a drafted token sees the text before it and its own branch."""

import random
from typing import Any

import pytest
import torch
from support.assertions import Refusals, assert_close, each_refusal, refused
from support.caches import KINDS, each_kind, made, same, snapshot
from support.cases import Case, assert_equal, each_dtype
from torch import Tensor

from pyattn import KVCache, attention, attention_weights, attention_with_cache, masks

CASE = Case(3, 4, 2, 60, 60, 16, 8)
NODES = 9


def drawn(count: int, seed: int = 0) -> list[int]:
    """The parents of a random forest."""
    draw = random.Random(seed)
    return [draw.randint(-1, i - 1) for i in range(count)]


def branch(parents: list[int], node: int) -> list[int]:
    """The node and its ancestors, the root first."""
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9, 70])
def test_a_token_sees_its_ancestors(count):
    forests = [drawn(count, seed) for seed in range(3)] + [list(range(-1, count - 1)), [-1] * count]
    for parents in forests:
        mask = masks.tree(parents)
        assert mask.shape == (count, count)
        assert mask.dtype == torch.bool
        for node in range(count):
            assert mask[node].nonzero().flatten().tolist() == branch(parents, node)
    together = masks.tree(torch.tensor(forests, dtype=torch.int32).view(5, count))
    assert torch.equal(together[:, 0], torch.stack([masks.tree(parents) for parents in forests]))


BAD_PARENTS: Refusals = [
    ([0], ValueError, "each of parents must be -1 or an earlier token, got 0 at [0]"),
    ([-1, 0, 3, 1], ValueError, "each of parents must be -1 or an earlier token, got 3 at [2]"),
    (torch.tensor([[-1, 0], [-1, -2]]), ValueError, "each of parents must be -1 or an earlier token, got -2 at [1, 1]"),
    (torch.zeros(1, 1, 1, dtype=torch.int64), ValueError, "parents must have 1 dimension, got shape (1, 1, 1)"),
    (torch.zeros(2), TypeError, "parents must be int32 or int64, got torch.float32"),
    ([-1, 0.0], TypeError, "each of parents must be int, got 0.0"),
    (3, TypeError, "parents must be Sequence or Tensor, got 3"),
]


@each_refusal(BAD_PARENTS)
def test_wrong_parents(changes, kind, message):
    with refused(kind, message):
        masks.tree(changes)


def empty(kind: str, dtype: torch.dtype, max_seqlen: int, left: int) -> KVCache:
    """A cache of this kind; a ring keeps ``max_seqlen`` positions and sees ``left`` before each."""
    return made(CASE, dtype, max_seqlen, **({"window": (left, 0)} if kind == "ring" else KINDS[kind]))


def filled(kind: str, dtype: torch.dtype, k: Tensor, v: Tensor) -> KVCache:
    """A cache with 20, 14 and 17 tokens of text and then NODES drafted ones."""
    cached = empty(kind, dtype, 24 if kind == "ring" else 40, left=9)
    for begin in range(0, 20, 10):
        cached.append(k[:, :, begin : begin + 10], v[:, :, begin : begin + 10])
    cached.truncate([20, 14, 17])
    cached.append(k[:, :, 20 : 20 + NODES], v[:, :, 20 : 20 + NODES])
    return cached


@each_dtype
@each_kind
def test_each_branch_is_a_text_of_its_own(attend, kind, dtype):
    """The rows of a call with the mask are those of attention over the text and one branch, window included."""
    q, k, v = CASE.inputs(dtype)
    parents, cached = drawn(NODES, 4), filled(kind, dtype, k, v)
    drafted = slice(20, 20 + NODES)
    out = attend(q[:, :, drafted], cached, mask=masks.tree(parents))
    bound = {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, 2e-2)
    for b, length in enumerate((20, 14, 17)):
        for node in range(NODES):
            oldest = 0 if kind != "ring" else max(0, length + node - 9)  # a window counts slots
            seen = [*range(oldest, length), *(20 + n for n in branch(parents, node) if length + n >= oldest)]
            alone = (t[b : b + 1, :, seen] for t in (k, v))
            own = attention(q[b : b + 1, :, 20 + node : 21 + node], *alone)
            assert_close(out[b : b + 1, :, node : node + 1], own, bound)


@pytest.mark.parametrize("kind", ["slots", "pages"])
def test_same_bits_as_a_mask_over_all_positions(isa, kind):
    """Masks of every shape that broadcasts, one for each sequence or head; any options; gradients of the rest."""
    q, k, v = CASE.inputs(torch.float32)
    q, cached = q[:, :, :NODES], filled(kind, torch.float32, k, v)
    trees = masks.tree(torch.tensor([drawn(NODES, seed) for seed in range(3)]))
    heads = torch.rand(4, NODES, NODES) < 0.5
    shapes = [trees, trees[1], trees[0, 0], heads, trees & heads, trees[0, 0, -1], heads[:, :1]]
    options: list[dict[str, Any]] = [{}, {"sinks": torch.ones(4), "softcap": 5.0, "window": (11, 0)}, {"causal": False}]
    before = cached.lengths - NODES
    for mask in shapes:
        wide = mask[(None,) * (4 - mask.dim())].expand(3, -1, -1, -1)
        whole = torch.ones(*wide.shape[:3], 40, dtype=torch.bool)
        for b, length in enumerate(before.tolist()):
            whole[b, :, :, length : length + NODES] = wide[b]
        for more in options:
            ours = attention_with_cache(q, cached, mask=mask, return_lse=True, **more)
            assert_equal(ours, attention_with_cache(q, cached, mask=whole, return_lse=True, **more))
    learned = [q.clone().requires_grad_() for _ in range(2)]
    outs = [attention_with_cache(t, cached, mask=m) for t, m in zip(learned, (mask, whole), strict=True)]
    assert_equal(*(torch.autograd.grad(out.square().sum(), t) for out, t in zip(outs, learned, strict=True)))


@each_kind
def test_ragged_trees_and_offsets(kind):
    """After an append with lengths, the tree of a sequence begins at its own tokens; padding sees nothing."""
    q, k, v = CASE.inputs(torch.float64)
    cached = empty(kind, torch.float64, 40, left=30)
    cached.append(k[:, :, :8], v[:, :, :8], [8, 3, 0])
    before, counts, parents = cached.lengths.clone(), [2, 5, 4], [-1, 0, 0, 2, 1]
    cached.append(k[:, :, 20:25], v[:, :, 20:25], counts)
    out, lse = attention_with_cache(q[:, :, :5], cached, mask=masks.tree(parents), return_lse=True)
    same_place = attention_with_cache(q[:, :, :5], cached, mask=masks.tree(parents), q_offset=before)
    for b, (length, count) in enumerate(zip((8, 3, 0), counts, strict=True)):
        assert lse[b, :, count:].isneginf().all()
        for node in range(count):
            seen = [*range(length), *(20 + n for n in branch(parents, node))]
            own = attention(q[b : b + 1, :, node : node + 1], *(t[b : b + 1, :, seen] for t in (k, v)))
            assert_close(out[b : b + 1, :, node : node + 1], own, 1e-13)
            assert_close(same_place[b : b + 1, :, node : node + 1], own, 1e-13)


def test_trees_across_the_ends_of_a_cache():
    """Tokens before position 0 and after the last one have no key; the others see their branch."""
    cached = KVCache(3, 2, 12, 16, dtype=torch.float64)
    k, v = torch.randn(2, 3, 2, 12, 16, dtype=torch.float64)
    cached.append(k, v)
    q, mask = torch.randn(3, 4, 3, 16, dtype=torch.float64), masks.tree([-1, -1, 1])
    for offset in (-1, 11, torch.tensor([-1, 4, 10])):
        out, lse = attention_with_cache(q, cached, mask=mask, q_offset=offset, return_lse=True)
        for b, first in enumerate(torch.as_tensor(offset).expand(3).tolist()):
            for node, drafted in enumerate(([0], [1], [1, 2])):
                seen = [*range(first), *(first + n for n in drafted if 0 <= first + n < 12)]
                own = attention(q[b : b + 1, :, node : node + 1], k[b : b + 1, :, seen], v[b : b + 1, :, seen])
                assert_close(out[b : b + 1, :, node : node + 1], own, 1e-13)
            assert lse[b, :, 0].isneginf().all() == (first < 0)


@each_kind
def test_weights_see_the_tree(kind):
    q, k, v = CASE.inputs(torch.float64)
    cached, mask = filled(kind, torch.float64, k, v), masks.tree(drawn(NODES, 6))
    weights, out = (call(q[:, :, :NODES], cached, mask=mask) for call in (attention_weights, attention_with_cache))
    for b, length in enumerate((20, 14, 17)):
        values = torch.cat([v[b, :, :length], v[b, :, 20 : 20 + NODES]], 1).repeat_interleave(2, 0)
        assert_close(weights[b, :, :, : length + NODES] @ values, out[b], 1e-13)
        drafted = weights[b, :, :, length : length + NODES]
        assert ((drafted > 0) == (mask & (torch.ones_like(mask).triu(-9) if kind == "ring" else True))).all()


@each_kind
def test_accepted_branches_continue_the_text(kind):
    """Draft, check, keep, round after round: bits of the keys and accuracy of the rows as without drafts."""
    q, k, v = CASE.inputs(torch.float64)
    drafting, plain = (made(CASE, torch.float64, 40, **KINDS[kind]) for _ in range(2))
    draw, done = random.Random(3), 7
    for cached in (drafting, plain):
        cached.append(k[:, :, :7], v[:, :, :7])
    while done < 30:
        parents = drawn(6, done)
        path = branch(parents, draw.randrange(6))
        nodes = torch.randint(40, 60, (6,))
        nodes[path] = torch.arange(done, done + len(path))  # the other nodes are wrong guesses
        drafting.append(k[:, :, nodes], v[:, :, nodes])
        out = attention_with_cache(q[:, :, nodes], drafting, mask=masks.tree(parents))
        drafting.keep([[done + n for n in path]] * 3, done)
        for step in range(len(path)):
            now = slice(done + step, done + step + 1)
            plain.append(k[:, :, now], v[:, :, now])
            if kind != "ring":  # in the tree, wrong guesses take places of its window
                assert_close(out[:, :, path[step]], attention_with_cache(q[:, :, now], plain)[:, :, 0], 1e-13)
        done += len(path)
        assert torch.equal(drafting.lengths, plain.lengths)
    if kind == "slots":
        assert same(snapshot(drafting)[2:], snapshot(plain)[2:])
        assert torch.equal(drafting.k[:, :, :done], plain.k[:, :, :done])
    assert_close(*(attention_with_cache(q[:, :, :1], cached) for cached in (drafting, plain)), 1e-14)


@each_kind
def test_prompts_in_chunks(attend, kind):
    """Chunks of any size after a cache of any kind, each sequence with its own chunks, equal the whole."""
    q, k, v = CASE.inputs(torch.float64)
    window = (6, 0) if kind == "ring" else (-1, -1)
    whole = attention(q, k, v, window=window)
    cached = empty(kind, torch.float64, 20 if kind == "ring" else 60, left=6)
    draw, rows = random.Random(1), torch.arange(3)[:, None]
    while int(cached.lengths.min()) < 60:
        before = cached.lengths.clone()
        counts = [min(draw.randint(0, 14), 60 - n) for n in before.tolist()]
        at = (before[:, None] + torch.arange(max(counts))).clamp(max=59)
        qs, ks, vs = (t.transpose(1, 2)[rows, at].transpose(1, 2) for t in (q, k, v))
        cached.append(ks, vs, counts)
        out = attend(qs, cached)
        for b, (begin, count) in enumerate(zip(before.tolist(), counts, strict=True)):
            assert_close(out[b, :, :count], whole[b, :, begin : begin + count], 1e-13)
            assert (out[b, :, count:] == 0).all()


@each_kind
def test_compiles_once_for_all_lengths(kind):
    q, k, v = CASE.inputs(torch.float32)
    ours, expected = (made(CASE, torch.float32, 40, **KINDS[kind]) for _ in range(2))

    def step(cached, q, k, v, parents):
        cached.append(k, v)
        return attention_with_cache(q, cached, mask=masks.tree(parents))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in range(4):
            now, parents = slice(6 * n, 6 * n + 6), torch.tensor(drawn(6, n))
            tokens = q[:, :, now], k[:, :, now], v[:, :, now], parents
            assert torch.equal(compiled(ours, *tokens), step(expected, *tokens))


BAD_MASKS: Refusals = [
    ({"mask": torch.ones(3, 4, dtype=torch.bool)}, ValueError, "mask must have 1 to 4 dimensions, each 1 or that"),
    ({"mask": torch.ones(2, 3, dtype=torch.bool)}, ValueError, "mask must have 1 to 4 dimensions, each 1 or that"),
    (
        {"mask": torch.ones(2, 1, 3, 3, dtype=torch.bool)},
        ValueError,
        "mask must have 1 to 4 dimensions, each 1 or that",
    ),
    ({"mask": torch.ones(3, 3)}, TypeError, "mask must have dtype bool, got float32"),
    ({"q_offset": 0.5}, TypeError, "q_offset must be int or Tensor, got 0.5"),
    ({"q_offset": 2**63}, ValueError, "q_offset must fit in 64 bits"),
    ({"q_offset": torch.zeros(2, dtype=torch.int64)}, ValueError, ""),
]


@each_refusal(BAD_MASKS)
def test_wrong_masks(changes, kind, message):
    cached = KVCache(3, 2, 20, 8)
    cached.append(*torch.randn(2, 3, 2, 6, 8))
    with refused(kind, message, inside=True):
        attention_with_cache(torch.randn(3, 4, 3, 8), cached, **{"mask": masks.tree([-1, 0, 0])} | changes)


def test_a_ring_has_no_mask_over_positions():
    cached = KVCache(1, 2, 20, 8, window=(3, 0))
    message = "over a cache with a window, a mask has the keys of the 2 queries alone, got shape (2, 20) and window="
    with refused(NotImplementedError, message, inside=True):
        attention_with_cache(torch.randn(1, 4, 2, 8), cached, mask=torch.ones(2, 20, dtype=torch.bool))
