"""Packed sequences, their results one by one, and padded batches with the same meaning."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from support.backends import Backend
from support.cases import Case, Truth, seeded
from torch import Tensor

from pyattn import attention_varlen

Inputs = tuple[Tensor, Tensor, Tensor]


def starts(lengths: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


class Packed:
    """Random packed sequences, and tokens after them that belong to none."""

    def __init__(
        self, queries: Sequence[int], keys: Sequence[int] | None = None, heads: tuple[int, int] = (8, 8), rest: int = 0
    ) -> None:
        self.queries, self.keys = queries, queries if keys is None else keys
        self.heads, self.rest = heads, rest

    def on(self, backend: Backend, dtype: torch.dtype = torch.float32) -> "Packed":
        """These sequences, or as many of them as the emulated kernels run in a second."""
        if backend.family != "emulated":
            return self
        most = 20 if dtype == torch.float64 else 70
        queries, keys = ([min(n, most) for n in lengths] for lengths in (self.queries, self.keys))
        return Packed(queries, keys, (self.heads[0] // self.heads[1], 1), self.rest)

    def inputs_of(self, backend: Backend, dtype: torch.dtype) -> Inputs:
        """On a GPU, packed sequences and batches share kernels, and so have the same bits, from 33 columns on."""
        return self.inputs(dtype, 40, 36) if backend.cuda_kernels else self.inputs(dtype)

    @property
    def packing(self) -> tuple[Tensor, Tensor, int, int]:
        return starts(self.queries), starts(self.keys), max(self.queries), max(self.keys)

    @property
    def spans(self) -> list[tuple[slice, slice]]:
        """The queries and the keys of each sequence."""
        cu_q, cu_k = (x.tolist() for x in self.packing[:2])
        return [(slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])) for b in range(len(self.queries))]

    def inputs(self, dtype: torch.dtype, head_dim: int = 16, head_dim_v: int = 20) -> Inputs:
        total_q, total_k = sum(self.queries) + self.rest, sum(self.keys) + self.rest
        sizes = (total_q, self.heads[0], head_dim), (total_k, self.heads[1], head_dim), (total_k, self.heads[1])
        q, k, v = torch.randn(sizes[0]), torch.randn(sizes[1]), torch.randn(*sizes[2], head_dim_v)
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def ranges(self) -> Tensor:
        """Random ranges, (total_q, 2), counted within the sequences."""
        counts = zip(self.queries, self.keys, strict=True)
        ranges = [sorted(torch.randint(n + 1, (2,)).tolist()) for m, n in counts for _ in range(m)]
        return torch.tensor(ranges + [[0, 0]] * self.rest, dtype=torch.int32)


def results(call: Callable[..., Any], qkv: Inputs, dout: Tensor, dlse: Tensor, **learned: Tensor) -> tuple[Tensor, ...]:
    """out, lse and the gradients of q, k, v and other learned tensors."""
    leaves = [x.detach().requires_grad_() for x in (*qkv, *learned.values())]
    out, lse = call(*leaves[:3], **dict(zip(learned, leaves[3:], strict=True)), return_lse=True)
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    return out.detach(), lse.detach(), *grads


def gradients_of(qkv: Inputs) -> tuple[Tensor, Tensor]:
    """dout and dlse, the same for the same shapes."""
    seeded(1)
    q, _, v = qkv
    dlse = torch.randn(q.shape[1], len(q), dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.randn(*q.shape[:2], v.shape[2]).to(q.dtype), dlse


def results_of(
    packed: Packed, qkv: Inputs, attend: Callable[..., Any] = attention_varlen, **options: Any
) -> tuple[Tensor, ...]:
    call = functools.partial(attend, **options)
    return results(lambda q, k, v, **named: call(q, k, v, *packed.packing, **named), qkv, *gradients_of(qkv))


def one_by_one(packed: Packed, qkv: Inputs, attend: Callable[..., Any], **options: Any) -> tuple[Tensor, ...]:
    """The same by :func:`attention`, one call per sequence."""
    (q, k, v), (dout, dlse) = qkv, gradients_of(qkv)
    out, lse = torch.zeros_like(dout), torch.full_like(dlse, -math.inf)
    grads = [torch.zeros_like(x) for x in qkv]
    for b, (i, j) in enumerate(packed.spans):
        own = dict(options)
        if "key_ranges" in own:
            own["key_ranges"] = own["key_ranges"][None, i]
        if isinstance(own.get("q_offset"), Tensor):
            own["q_offset"] = own["q_offset"][b : b + 1]
        if own.get("alibi_slopes", torch.empty(0)).dim() == 2:
            own["alibi_slopes"] = own["alibi_slopes"][b]
        if own.get("relative_bias", torch.empty(0)).dim() == 3:
            own["relative_bias"] = own["relative_bias"][b]
        if (used := own.pop("seqused_k", None)) is not None:
            j = slice(j.start, j.start + int(used[b]))
        each = tuple(x[None, s].transpose(1, 2) for x, s in ((q, i), (k, j), (v, j)))
        one = results(functools.partial(attend, **own), each, dout[None, i].transpose(1, 2), dlse[None, :, i])
        out[i], lse[:, i] = one[0][0].transpose(0, 1), one[1][0]
        for grad, s, x in zip(grads, (i, j, j), one[2:], strict=True):
            grad[s] = x[0].transpose(0, 1)
    return out, lse, *grads


MIXED = Packed([3, 0, 17, 70, 1, 130, 8, 0], [5, 4, 17, 100, 0, 300, 8, 0], rest=3)
GROUPED = Packed([5, 33, 1, 2, 100, 64], [5, 20, 1200, 40, 100, 90], heads=(24, 8))


class Unpadded:
    """:func:`attention_varlen` in place of a padded batch whose padding queries see nothing."""

    def __init__(self, case: Case, queries: Sequence[int], keys: Sequence[int]) -> None:
        self.packed = Packed(queries, keys, (case.num_heads_q, case.num_heads_kv))
        self.is_query = torch.arange(case.seqlen_q) < torch.tensor(queries)[:, None]
        self.is_key = torch.arange(case.seqlen_k) < torch.tensor(keys)[:, None]
        lengths = torch.tensor(keys)[:, None].expand(-1, case.seqlen_q)
        ranges = torch.stack([torch.zeros_like(lengths), lengths], -1)
        if case.key_ranges:
            ranges = case.options["key_ranges"]
        each = (..., *(None,) * (ranges.dim() - 2))
        self.ranges = ranges.clamp(max=lengths[each]) * self.is_query[each]
        self.offset = torch.tensor(keys) - torch.tensor(queries)
        self.case = case

    def truth(self, dtype: torch.dtype) -> Truth:
        """The truth of the padded batch; lse of padding has no gradient."""
        qkv, dout, dlse = self.case.drawn(dtype)
        q_offset = self.offset if self.case.q_offset is None else self.case.q_offset
        options = self.case.given(dtype) | {"q_offset": q_offset, "key_ranges": self.ranges}
        return Truth((qkv, dout, dlse.masked_fill(~self.is_query[:, None], 0.0)), options)

    def attend(
        self, call: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        masks = self.is_query, self.is_key, self.is_key
        qkv = [x.transpose(1, 2)[mask] for x, mask in zip((q, k, v), masks, strict=True)]
        options["key_ranges"] = self.ranges[self.is_query]
        if options["q_offset"] is self.offset:
            options["q_offset"] = None
        out, lse = call(*qkv, *self.packed.packing, **options)
        nothing = options.get("sinks", torch.tensor(-math.inf)).to(lse.dtype)
        padded = nothing.expand(*self.is_query.shape, q.shape[1]).masked_scatter(self.is_query[..., None], lse.mT)
        wide = out.new_zeros(*self.is_query.shape, *out.shape[1:]).masked_scatter(self.is_query[..., None, None], out)
        return wide.transpose(1, 2), padded.transpose(1, 2)


@functools.cache
def truth_of_padded(
    case: Case, queries: tuple[int, ...], keys: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Unpadded, Truth]:
    """The pair, computed once for all backends of a device."""
    unpadded = Unpadded(case, queries, keys)
    return unpadded, unpadded.truth(dtype)
