"""The bytes that each rank of a ring sends, counted and by formula, and the pairs of query and key that it computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pyattn.distributed.attention import ring_attention, ring_attention_varlen
from pyattn.distributed.layout import EACH, Chunks, chunks_of, sequence_layout_of, shard
from pyattn.distributed.ring.messages import Messages
from pyattn.distributed.ring.routes import routes_of

HEAD_DIM = 64


class Case(NamedTuple):
    """A causal call in float32 on all ranks.

    Attributes:
        seqlen: positions of all ranks.
        heads, heads_kv: numbers of query and KV heads.
        window: how many keys a query sees at most, itself included; 0: all.
        lengths: of packed sequences; none: a batch of one.
        layout: of the ranks.
    """

    seqlen: int
    heads: int = 4
    heads_kv: int = 4
    window: int = 0
    lengths: tuple[int, ...] = ()
    layout: str = "zigzag"

    def cut(self, ranks: int) -> tuple[Chunks, Tensor]:
        """Each rank's chunks of positions, and (seqlen,): the token at each of these positions."""
        begins = [0, *accumulate(self.lengths or (self.seqlen,))]
        sequences = sequence_layout_of("cu_seqlens", begins, self.seqlen, ranks, self.layout)
        chunks, order = chunks_of(self.seqlen, ranks, self.layout, sequences=sequences), torch.arange(self.seqlen)
        for chunk in chain(*chunks):
            order[chunk.start : chunk.stop] = torch.tensor([i for run in sequences.tokens(chunk) for i in run])
        return chunks, order

    def first_keys(self) -> Tensor:
        """(seqlen,): the first key that each query sees; the last is its own."""
        lengths = torch.tensor(self.lengths or (self.seqlen,))
        begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        return torch.maximum(begins, torch.arange(self.seqlen) + 1 - (self.window or self.seqlen))

    def formula(self, ranks: int) -> list[tuple[int, int]]:
        """The bytes that each rank sends in forward and in backward.

        A chunk's k and v leave every rank on its way but the last. Backward sends them again, and their gradients in
        float32 from every rank that they reached.
        """
        first, (chunks, order) = self.first_keys(), self.cut(ranks)

        def seen(queries: range, keys: range) -> range:
            tokens, seeing = order[queries.start : queries.stop], torch.zeros(self.seqlen + 1)
            seeing.index_add_(0, first[tokens], torch.ones(len(tokens)))
            seeing.index_add_(0, tokens + 1, -torch.ones(len(tokens)))
            seen = keys.start + (seeing.cumsum(0) > 0)[order[keys.start : keys.stop]].nonzero()
            return range(int(seen[0]), int(seen[-1]) + 1) if len(seen) else range(0)

        position = 2 * self.heads_kv * HEAD_DIM * torch.float32.itemsize
        found = []
        for rank in range(ranks):
            hops = [(len(t.keys), t.hop(rank, ranks), t.hops) for t in routes_of(chunks, chunks, seen)]
            onward = position * sum(length for length, hop, last in hops if hop < last)
            home = position * sum(length for length, hop, last in hops if 1 <= hop <= last)
            found.append((onward, onward + home))
        return found

    def pairs(self, ranks: int) -> list[int]:
        """The pairs of query and visible key of each rank."""
        seen = torch.arange(self.seqlen) + 1 - self.first_keys()
        held, order = self.cut(ranks)
        return [sum(int(seen[order[c.start : c.stop]].sum()) for c in chunks) for chunks in held]


DOCUMENTS = 3000, 200, 2500, 1000, 1492
CASES = {
    "causal": Case(8192),
    "window of 512": Case(32768, window=512),
    "4 query heads, 1 KV head": Case(8192, heads_kv=1),
    "packed, zigzag": Case(8192, lengths=DOCUMENTS),
    "packed, zigzag_varlen": Case(8192, lengths=DOCUMENTS, layout="zigzag_varlen"),
}


@contextmanager
def counting() -> Iterator[list[int]]:
    """The sizes in bytes of the messages that this rank's rings send meanwhile."""
    sizes: list[int] = []
    send = Messages.send

    def counted(messages: Messages, tensor: Tensor, *place: Any) -> dist.Work:
        sizes.append(tensor.numel() * tensor.element_size())
        return send(messages, tensor, *place)

    Messages.send = counted  # type: ignore[assignment,method-assign]
    try:
        yield sizes
    finally:
        Messages.send = send  # type: ignore[method-assign]


def sent(case: Case) -> tuple[int, int]:
    """The bytes that this rank sends in forward and in backward."""
    window = (case.window - 1, 0) if case.window else (-1, -1)
    counts = case.heads, case.heads_kv, case.heads_kv
    q, k, v = (torch.randn(1, heads, case.seqlen, HEAD_DIM) for heads in counts)
    with counting() as sizes:
        if case.lengths:
            begins = torch.tensor([0, *case.lengths]).cumsum(0)
            given = begins if case.layout == EACH else None
            tokens = (t[0].transpose(0, 1) for t in (q, k, v))
            q, k, v = (shard(t, 0, layout=case.layout, cu_seqlens=given).requires_grad_() for t in tokens)
            out = ring_attention_varlen(q, k, v, begins, begins, layout=case.layout, window=window)
        else:
            q, k, v = (shard(t, 2, layout=case.layout).requires_grad_() for t in (q, k, v))
            out = ring_attention(q, k, v, layout=case.layout, window=window)
        assert isinstance(out, Tensor)
        forward = sum(sizes)
        out.sum().backward()
    return forward, sum(sizes) - forward
