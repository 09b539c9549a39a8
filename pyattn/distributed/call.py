"""A call on several ranks: its arguments, checked and parsed, once all ranks have agreed on them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyattn.arguments import check_tensor
from pyattn.autocast import cast
from pyattn.derivatives import autograd
from pyattn.distributed.layout import Chunks, check_layout, chunks_of
from pyattn.distributed.ranks import Group, Ranks, agree, ranks_of
from pyattn.key_ranges import by_interval, rule_for, wrong_rows
from pyattn.ops.schema import Options
from pyattn.options import AttentionOptions
from pyattn.parse import parse

DIMS = ("batch", "heads", "positions", "head_dim")
DIMS_PACKED = ("positions", "heads", "head_dim")

OWN_ROWS = ("key_ranges", "mask", "bias")
"""Options of which each rank has the rows of its own queries."""


class Call(NamedTuple):
    """A rank's arguments, and what it knows of the others'.

    Attributes:
        ranks: the ranks of the call.
        q, k, v: this rank's tensors.
        options: its options, with rank 0's dropout seed.
        queries, keys: the positions that each rank has.
        by_row: the names of masks and biases of which each rank has its own rows.
    """

    ranks: Ranks
    q: Tensor
    k: Tensor
    v: Tensor
    options: Options
    queries: Chunks
    keys: Chunks
    by_row: frozenset[str]

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of queries and keys of all ranks."""
        return sum(len(c) for held in self.queries for c in held), sum(len(c) for held in self.keys for c in held)


class Parsed(NamedTuple):
    """Options that have been parsed, and whether the caller chose the dropout seed."""

    options: Options
    chosen: bool

    @classmethod
    def of(cls, function: Callable[..., Any], options: AttentionOptions, device: torch.device) -> "Parsed":
        """The options given to a public function."""
        return cls(Options(*parse(function, options, device)), options.get("dropout_seed") is not None)


def agreed(
    function: Callable[..., Any],
    tensors: tuple[Tensor, Tensor, Tensor],
    group: Group | Ranks,
    layout: str,
    options: AttentionOptions | Parsed,
    dims: tuple[str, ...],
    facts: Mapping[str, Any],
) -> Call:
    """The call, once all ranks have the same arguments: see :func:`pyattn.distributed.ranks.agree`.

    ``dims`` names the dimensions of q; ``facts`` are more that ranks must have in common.
    """
    ranks, error = ranks_of(group), None
    known, at = Options(), dims.index("positions")
    words, all_facts = [0] * (3 + 2 * len(OWN_ROWS)), dict(facts)
    try:
        check_layout(layout)
        _check(function, tensors, dims)
        parsed = options if isinstance(options, Parsed) else Parsed.of(function, options, tensors[0].device)
        known = parsed.options
        _check_rows(known, len(dims))
        if known.key_ranges is not None:
            known = known._replace(key_ranges=by_interval(known.key_ranges, len(dims) - 2))
        words = [tensors[0].shape[at], tensors[1].shape[at], int(known.dropout_seed) if known.dropout_p else 0]
        words += [size for name in OWN_ROWS for size in _size(name, getattr(known, name))]
        seed = words[2] if parsed.chosen else None
        all_facts |= {"layout": layout} | _facts(tensors, at, known) | {"dropout_seed": seed}
    except (TypeError, ValueError, NotImplementedError) as problem:  # all ranks must hear of it
        error = problem
    rows = agree(function.__name__, ranks, all_facts, words, error)
    q, k, v = map(cast, tensors)
    if known.dropout_p:
        known = known._replace(dropout_seed=known.dropout_seed.new_tensor(rows[0][2]))
    queries, keys = (_held(name, [row[i] for row in rows], layout, ranks.inner) for i, name in enumerate("qk"))
    call = Call(ranks, q, k, v, known, queries, keys, _by_row(rows))
    for rank, row in enumerate(rows):  # every rank checks all, so all raise
        for name, sizes in _sizes(row).items():
            ends = row[0], 2 if name == "key_ranges" else call.lengths[1]
            if sizes and any(size not in (1, end) for size, end in zip(sizes, ends, strict=True)):
                raise ValueError(
                    f"pyattn: {name} must have {ends[0]} rows, those of the rank's queries, and {ends[1]} columns on "
                    f"rank {rank}, got {sizes[0]} and {sizes[1]}"
                )
    if known.key_ranges is not None:
        agree(function.__name__, ranks, {}, [], _misplaced(call, facts.get("cu_seqlens_q"), facts.get("cu_seqlens_k")))
    return call


def _misplaced(call: Call, begins_q: list[int] | None, begins_k: list[int] | None) -> ValueError | None:
    """The error of this rank's key_ranges if one lies beyond the keys; as in one process, a GPU's are not read."""
    ranges = call.options.key_ranges
    positions = torch.tensor([i for chunk in call.queries[call.ranks.own] for i in chunk], dtype=torch.int64)
    if ranges is None or ranges.is_cuda or _size("key_ranges", ranges) != (len(positions), 2):
        return None
    seqlen_k = torch.full_like(positions, call.lengths[1])
    if begins_q and begins_k and len(begins_q) == len(begins_k):  # tokens after the last sequence see nothing anyway
        lengths = torch.tensor([*torch.tensor(begins_k).diff().tolist(), torch.iinfo(torch.int64).max])
        seqlen_k = lengths[torch.bucketize(positions, torch.tensor(begins_q[1:]), right=True)]
    wrong = wrong_rows(ranges, seqlen_k)
    if not wrong.any():
        return None
    at = int(wrong.flatten().to(torch.uint8).argmax())
    query = at % len(positions)
    rule = rule_for(ranges.flatten(0, -3)[at], int(seqlen_k[query]))
    return ValueError(f"{rule} for query {query} of rank {call.ranks.own}")


def _size(name: str, tensor: Tensor | None) -> tuple[int, int]:
    """The rows and columns of an option, -1 if it is not given."""
    if tensor is None:
        return -1, -1
    if name == "key_ranges":
        return tensor.shape[-3], tensor.shape[-1]
    rows, columns = (1, 1, *tensor.shape)[-2:]
    return rows, columns


def _sizes(row: list[int]) -> dict[str, list[int]]:
    """The rows and columns of a rank's options, by the words that it sent; none of those that are not given."""
    return {name: [size for size in row[3 + 2 * i : 5 + 2 * i] if size >= 0] for i, name in enumerate(OWN_ROWS)}


def _by_row(rows: list[list[int]]) -> frozenset[str]:
    """The options that have each rank's own rows, not one row for all."""
    return frozenset(name for name in OWN_ROWS if all(_sizes(row)[name][:1] == row[:1] for row in rows))


def _check(function: Callable[..., Any], tensors: tuple[Tensor, ...], dims: tuple[str, ...]) -> None:
    if autograd.transforming():
        raise NotImplementedError(
            f"pyattn: {function.__name__} has no rule for transforms of torch.func or forward mode"
        )
    q = tensors[0]
    for name, tensor in zip("qkv", tensors, strict=True):
        check_tensor(name, tensor)
        if tensor.dim() != len(dims):
            raise ValueError(f"pyattn: {name} must be ({', '.join(dims)}), got shape {tuple(tensor.shape)}")
        if (tensor.dtype, tensor.device) != (q.dtype, q.device):
            raise TypeError(
                f"pyattn: {name} must be {q.dtype} on {q.device} like q, got {tensor.dtype} on {tensor.device}"
            )
    heads = dims.index("heads")
    num_q, num_k, num_v = (tensor.shape[heads] for tensor in tensors)
    if num_k != num_v or (num_q % num_k if num_k else num_q):
        raise ValueError(
            f"pyattn: num_heads_q must be a multiple of num_heads_kv, got {num_q}, {num_k} of k and {num_v} of v"
        )


def _check_rows(options: Options, dims: int) -> None:
    ranges = options.key_ranges
    if ranges is not None and ranges.dim() not in (dims - 1, dims):
        raise ValueError(f"pyattn: key_ranges must have {dims - 1} or {dims} dimensions, got {tuple(ranges.shape)}")
    for name in ("mask", "bias"):
        if dims == 3 and getattr(options, name) is not None:
            raise ValueError(f"pyattn: {name} is not implemented for packed sequences")


def _facts(tensors: tuple[Tensor, ...], at: int, options: Options) -> dict[str, Any]:
    """The properties of the arguments that all ranks must have in common, by name."""
    facts: dict[str, Any] = {"dtype": str(tensors[0].dtype)}
    for name, tensor in zip("qkv", tensors, strict=True):
        facts[f"shape of {name} without its positions"] = [n for dim, n in enumerate(tensor.shape) if dim != at]
    if options.key_ranges is not None:
        facts["intervals of key_ranges"] = options.key_ranges.shape[-2]
    return facts | facts_of(options)


def facts_of(options: Options) -> dict[str, Any]:
    """The facts that options must have in common on all ranks, by name; of masks and biases by row, only the kind."""
    facts: dict[str, Any] = {}
    for name, value in options._asdict().items():
        if not isinstance(value, Tensor):
            facts[name] = value
        elif name in OWN_ROWS:
            facts[name] = f"{value.dtype} of {value.dim()} dimensions"
        elif name == "q_offsets":
            facts[name] = value.tolist()
        elif name != "dropout_seed":
            facts[name] = f"{value.dtype} of shape {list(value.shape)}"
    return facts


def _held(name: str, lengths: list[int], layout: str, inner: int) -> Chunks:
    """Each rank's chunks, given the lengths of their parts."""
    chunks = chunks_of(sum(lengths), len(lengths), layout, inner)
    expected = [sum(map(len, parts)) for parts in chunks]
    if lengths != expected:
        raise ValueError(
            f"pyattn: {name} of {sum(lengths)} positions must be cut into parts of {expected} for layout {layout}, "
            f"got {lengths}"
        )
    return chunks
