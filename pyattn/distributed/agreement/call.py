"""A call on several ranks: its arguments, checked and parsed, once all ranks have agreed on them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyattn.distributed.agreement.checks import DIMS, DIMS_PACKED, check_options, check_parts
from pyattn.distributed.agreement.local_options import OWN_ROWS, ParsedOptions, seed_of, summed_wide, with_rows
from pyattn.distributed.agreement.ranks import Group, Ranks, agree, ranks_of
from pyattn.distributed.layout import Chunks, check_layout, chunks_of, sequence_layout_of, slices
from pyattn.distributed.sequence_layout import SequenceLayout, begins_of
from pyattn.masks.key_ranges import by_interval, rule_for, wrong_rows
from pyattn.options.attention_options import AttentionOptions
from pyattn.options.autocast import cast
from pyattn.options.schema import Options

CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k")


class AgreedCall(NamedTuple):
    """A rank's arguments, and what it knows of the others'.

    Attributes:
        ranks: the ranks of the call.
        q, k, v: this rank's tensors.
        options: its options, with rank 0's dropout seed.
        queries, keys: the positions that each rank has; of packed sequences, in the order of the layout.
        by_row: the names of masks and biases of which each rank has its own rows, in the order of messages.
        max_score: whether all want max_score.
        sequences: of queries and of keys, if these are packed.
    """

    ranks: Ranks
    q: Tensor
    k: Tensor
    v: Tensor
    options: Options
    queries: Chunks
    keys: Chunks
    by_row: tuple[str, ...]
    max_score: bool
    sequences: tuple[SequenceLayout, ...] = ()

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of queries and keys of all ranks."""
        return sum(len(c) for held in self.queries for c in held), sum(len(c) for held in self.keys for c in held)


class Request(NamedTuple):
    """A call as one rank got it.

    Attributes:
        function: the public one.
        tensors: q, k and v.
        layout: the name of the layout.
        options: as given, or parsed where a graph calls.
        max_score: whether max_score is wanted.
        cu_seqlens: where packed sequences begin, among all queries and among all keys; empty for batches.
        known_error: one that this rank had while it compiled the call.
    """

    function: Callable[..., Any]
    tensors: tuple[Tensor, Tensor, Tensor]
    layout: str
    options: AttentionOptions | ParsedOptions
    max_score: bool
    cu_seqlens: Sequence[Tensor] = ()
    known_error: Exception | None = None

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of the dimensions of q, k and v."""
        return DIMS_PACKED if self.cu_seqlens else DIMS


class _Vote(NamedTuple):
    """A rank's part of the agreement: numbers in which the ranks may differ, facts in which they may not.

    Attributes:
        words: the numbers of queries and keys, the seed, and the rows and columns of options by row.
        begins: where the packed sequences of queries and of keys begin.
    """

    options: Options
    words: list[int]
    facts: dict[str, Any]
    begins: list[list[int]]


def agreed(request: Request, group: Group | Ranks) -> AgreedCall:
    """The call, once all ranks have the same arguments: see :func:`pyattn.distributed.agreement.ranks.agree`."""
    ranks, error, name = ranks_of(group), None, request.function.__name__
    vote = _Vote(Options(), [], {}, [])
    try:
        vote = _vote(request)
    except Exception as problem:  # whatever it is, the others must not wait for this rank
        error = problem
    rows = agree(name, ranks, vote.facts, vote.words, error)
    lengths = [[row[i] for row in rows] for i in (0, 1)]
    sequences = _sequences(request, vote.begins, lengths, ranks)
    cut = zip("qk", lengths, sequences or (None, None), strict=True)
    queries, keys = (_held(of, held, ranks, request.layout, order) for of, held, order in cut)
    _check_rows(rows, sum(lengths[1]))
    q, k, v = map(cast, request.tensors)
    by_row = _by_row(rows)
    known = _settled(vote.options, rows, ranks.own, by_row, q.dtype)
    call = AgreedCall(ranks, q, k, v, known, queries, keys, by_row, request.max_score, sequences)
    if known.key_ranges is not None:
        agree(name, ranks, {}, [], _misplaced(call))
    return call


def _vote(request: Request) -> _Vote:
    """Checks and parses a rank's arguments."""
    if request.known_error is not None:
        raise request.known_error
    packed, dims = bool(request.cu_seqlens), request.dims
    begins = [begins_of(*named) for named in zip(CU_SEQLENS, request.cu_seqlens, strict=False)]
    check_layout(request.layout, packed=packed)
    check_parts(request.function, request.tensors, dims)
    parsed = request.options
    if not isinstance(parsed, ParsedOptions):
        parsed = ParsedOptions.of(request.function, request.tensors, parsed)
    q, k, v = map(cast, request.tensors)
    at = dims.index("positions")
    known = parsed.options if packed else with_rows(parsed.options, q.shape[at])
    if packed and known.selected is not None:
        raise NotImplementedError("pyattn: packed sequences over ranks take no selected; pass a batch")
    seed = seed_of(known)
    check_options((q, k, v), known, begins[0] if packed else None)
    if known.key_ranges is not None:
        known = known._replace(key_ranges=by_interval(known.key_ranges, len(dims) - 2))
    sizes = [size for name in OWN_ROWS for size in _size(name, getattr(known, name))]
    facts = dict(zip(CU_SEQLENS, begins, strict=False)) | {"return_max_score": bool(request.max_score)}
    facts |= {"layout": request.layout} | _facts((q, k, v), at, known)
    facts |= parsed._replace(options=known).facts("qkv", "q", packed)
    return _Vote(known, [q.shape[at], k.shape[at], seed, *sizes], facts, begins)


def _sequences(
    request: Request, begins: list[list[int]], lengths: list[list[int]], ranks: Ranks
) -> tuple[SequenceLayout, ...]:
    """The packed sequences of queries and of keys among the tokens of all ranks; none of batches."""
    sequences = tuple(
        sequence_layout_of(name, of, sum(held), ranks.size, request.layout, ranks.inner)
        for name, of, held in zip(CU_SEQLENS, begins, lengths, strict=False)
    )
    if len({len(of.lengths) for of in sequences}) > 1:
        counts = " and ".join(str(len(of)) for of in begins)
        raise ValueError(f"pyattn: cu_seqlens_q and cu_seqlens_k must have one length, got {counts}")
    return sequences


def _check_rows(rows: list[list[int]], seqlen_k: int) -> None:
    """Every rank checks the rows and columns of options by row on all ranks, so all raise."""
    for rank, row in enumerate(rows):
        for name, sizes in _sizes(row).items():
            of_lists = name in ("key_ranges", "selected")  # each query has its own, a list of any length
            columns = 2 if name == "key_ranges" else sizes[-1] if of_lists and sizes else seqlen_k
            ends, least = (row[0], columns), -1 if of_lists else 1
            if sizes and any(size not in (least, end) for size, end in zip(sizes, ends, strict=True)):
                raise ValueError(
                    f"pyattn: {name} must have {ends[0]} rows, those of the rank's queries, and {ends[1]} columns on "
                    f"rank {rank}, got {sizes[0]} and {sizes[1]}"
                )


def _settled(options: Options, rows: list[list[int]], own: int, by_row: tuple[str, ...], dtype: torch.dtype) -> Options:
    """A rank's options with rank 0's seed, a row for each query, and sums of gradients in float32 or more."""
    if options.dropout_p:
        options = options._replace(dropout_seed=options.dropout_seed.new_tensor(rows[0][2]))
    bias = options.bias
    own_bias = "bias" in by_row and bias.shape[-1] > 1 and _size("bias", bias)[0] == rows[own][0]
    return _with_own_rows(summed_wide(options, dtype, own_bias), by_row, rows[own][0])


def chosen(
    out: Tensor, lse: Tensor, max_score: Tensor, return_lse: bool, return_max_score: bool
) -> Tensor | tuple[Tensor, ...]:
    """The results that the caller wants."""
    results = out, *([lse] if return_lse else []), *([max_score] if return_max_score else [])
    return results if len(results) > 1 else out


def _misplaced(call: AgreedCall) -> ValueError | None:
    """The error of this rank's key_ranges if one lies beyond the keys; as in one process, a GPU's are not read."""
    ranges = call.options.key_ranges
    chunks = call.queries[call.ranks.own]
    rows = sum(map(len, chunks))
    if ranges is None or ranges.is_cuda or _size("key_ranges", ranges) != (rows, 2):
        return None
    seqlen_k = torch.full((rows,), call.lengths[1])
    if call.sequences:  # no key is visible to tokens after the last sequence anyway
        queries, keys = call.sequences
        seqlen_k.fill_(torch.iinfo(torch.int64).max)
        for own, chunk in zip(slices(chunks), chunks, strict=True):
            found = keys.lengths.repeat_interleave(queries.local(chunk)[0].diff())
            seqlen_k[own][: len(found)] = found
    wrong = wrong_rows(ranges, seqlen_k)
    if not wrong.any():
        return None
    at = int(wrong.flatten().to(torch.uint8).argmax())
    rule = rule_for(ranges.flatten(0, -3)[at], int(seqlen_k[at % rows]))
    return ValueError(f"{rule} for query {at % rows} of rank {call.ranks.own}")


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


def _by_row(rows: list[list[int]]) -> tuple[str, ...]:
    """The options that have each rank's own rows, not one row for all."""
    counts = {name: [_sizes(row)[name][:1] for row in rows] for name in OWN_ROWS}
    return tuple(
        name
        for name, held in counts.items()
        if held[0] and (any(count != [1] for count in held) or all(row[0] == 1 for row in rows))
    )


def _with_own_rows(options: Options, by_row: tuple[str, ...], rows: int) -> Options:
    """Masks and biases by row of which this rank gave one row for all its queries, with a row for each."""
    given = {name: getattr(options, name) for name in by_row if name != "key_ranges"}
    return options._replace(**{name: t.expand(*t.shape[:-2], rows, t.shape[-1]) for name, t in given.items()})


def _facts(tensors: tuple[Tensor, ...], at: int, options: Options) -> dict[str, Any]:
    """The properties of the tensors that all ranks must have in common, by name."""
    facts: dict[str, Any] = {"dtype": str(tensors[0].dtype), "device": tensors[0].device.type}
    for name, tensor in zip("qkv", tensors, strict=True):
        facts[f"shape of {name} without its positions"] = [n for dim, n in enumerate(tensor.shape) if dim != at]
    if options.key_ranges is not None:
        facts["intervals of key_ranges"] = options.key_ranges.shape[-2]
    return facts


def _held(name: str, lengths: list[int], ranks: Ranks, layout: str, sequences: SequenceLayout | None) -> Chunks:
    """Each rank's chunks, given the lengths of their parts."""
    chunks = chunks_of(sum(lengths), ranks.size, layout, ranks.inner, sequences)
    expected = [sum(map(len, parts)) for parts in chunks]
    if lengths != expected:
        raise ValueError(
            f"pyattn: {name} of {sum(lengths)} positions must be cut into parts of {expected} for layout {layout}, "
            f"got {lengths}"
        )
    return chunks
