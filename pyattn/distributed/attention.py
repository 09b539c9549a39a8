"""Ring attention over batches and over packed sequences whose parts lie on several ranks."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from pyattn.arguments import check_tensor, refuse_positional
from pyattn.distributed.call import Inputs, facts_of, prepared, with_seed
from pyattn.distributed.layout import check_layout, chunks_of
from pyattn.distributed.ranks import agree, ranks_of
from pyattn.distributed.ring import Chunks, Ring, RingAttention
from pyattn.distributed.shares import Dense, Packed
from pyattn.ops.schema import Options
from pyattn.options import AttentionOptions
from pyattn.parse import takes_options

Group = dist.ProcessGroup | DeviceMesh | None


@takes_options
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group = None,
    *positional: object,
    layout: str = "zigzag",
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`pyattn.attention` over a sequence of which each rank has a part.

    The result is this rank's rows of what one process would compute. Chunks of keys travel between neighbours, as far
    as causal and window let a rank see them, while the rank computes with those that it has.

    Args:
        q: (B, Hq, Sq of this rank, D).
        k: (B, Hkv, Sk of this rank, D).
        v: (B, Hkv, Sk of this rank, Dv).
        group: the ranks: a process group or a mesh of one dimension; None: all.
        layout: which positions each rank has, as :func:`shard` cuts them: ``"zigzag"`` or ``"contiguous"``.
        options: as for :func:`pyattn.attention`, with positions of the whole sequence and these differences.
            key_ranges, mask, bias: the rows of this rank's queries, and all keys. dropout_seed: default: drawn by rank
            0.
        return_lse: also return lse.

    Returns:
        ``out`` (B, Hq, Sq of this rank, Dv) or ``(out, lse)``, differentiable once. The loss is the sum of the ranks'
        losses: gradients of q, k, v and of a bias's own rows are complete; those of alibi_slopes, sinks and a bias that
        all rows share are this rank's share, and the sum over the ranks is the whole, as in data-parallel training.

    Raises:
        ValueError, TypeError, NotImplementedError: as for :func:`pyattn.attention`; parts that are not those of the
            layout. If the arguments of ranks differ, or one rank's are wrong, every rank raises before any waits for
            another's keys.

    Besides its own part, a rank needs memory for two chunks that travel, and in backward for their gradients in
    float32. Results are merged in float32 or more, in a fixed order: they have the same bits in every run.

    Source: Liu et al. 2023 (Ring Attention).
    """
    if positional:
        refuse_positional(ring_attention, positional)

    def shares(known: Options, lengths: list[int]) -> Dense:
        return Dense(known, *lengths)

    return _run(ring_attention, q, k, v, group, layout, return_lse, options, Dense, shares, {})


@takes_options
def ring_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    group: Group = None,
    *positional: object,
    layout: str = "zigzag",
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`pyattn.attention_varlen` over packed sequences of which each rank has a part of the tokens.

    The layout cuts the tokens, wherever sequences begin and end.

    Args:
        q: (total_q of this rank, Hq, D).
        k: (total_k of this rank, Hkv, D).
        v: (total_k of this rank, Hkv, Dv).
        cu_seqlens_q: (sequences + 1,), int32 or int64: where each sequence begins among the tokens of all ranks.
        cu_seqlens_k: the same for the keys.
        group, layout, return_lse: as for :func:`ring_attention`.
        options: as for :func:`pyattn.attention_varlen`; key_ranges: the rows of this rank's queries.

    Returns:
        ``out`` (total_q of this rank, Hq, Dv) or ``(out, lse)``, lse (Hq, total_q of this rank); differentiable once,
        as for :func:`ring_attention`.

    Raises:
        ValueError, TypeError, NotImplementedError: as for :func:`ring_attention` and :func:`pyattn.attention_varlen`.
    """
    if positional:
        refuse_positional(ring_attention_varlen, positional)
    begins = {}
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensor(name, tensor)
        begins[name] = tensor.tolist()

    def shares(known: Options, lengths: list[int]) -> Dense:
        return Packed(known, *begins.values(), *lengths)

    return _run(ring_attention_varlen, q, k, v, group, layout, return_lse, options, Packed, shares, begins)


def _run(
    function: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    layout: str,
    return_lse: bool,
    options: AttentionOptions,
    kind: type[Dense],
    shares: Callable[[Options, list[int]], Dense],
    facts: dict[str, Any],
) -> Any:
    """The call once its arguments are known; all ranks agree on them first."""
    ranks = ranks_of(group)
    inputs, error = Inputs(q, k, v, Options()), None
    words = [0, 0, 0]
    try:
        check_layout(layout)
        inputs = prepared(function, q, k, v, options, kind.dims)
        words = [inputs.q.shape[kind.dim], inputs.k.shape[kind.dim], inputs.seed]
        facts = facts | {"layout": layout} | facts_of(inputs, kind.dim, options.get("dropout_seed") is not None)
    except (TypeError, ValueError, NotImplementedError) as problem:  # all ranks must hear of it
        error = problem
    rows = agree(function.__name__, ranks, facts, words, error)
    lengths = [[row[at] for row in rows] for at in (0, 1)]
    queries, keys = (_held(name, own, layout) for name, own in zip("qk", lengths, strict=True))
    known = with_seed(inputs.options, rows[0][2])
    ring = Ring(ranks, shares(known, [sum(own) for own in lengths]), queries, keys)
    ring.shares.check(words[0])
    learned = known.bias, known.alibi_slopes, known.sinks
    out, lse = RingAttention.apply(ring, inputs.q, inputs.k, inputs.v, *learned)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


def _held(name: str, lengths: list[int], layout: str) -> Chunks:
    """Each rank's chunks, given the lengths of their parts."""
    chunks = chunks_of(sum(lengths), len(lengths), layout)
    expected = [sum(map(len, parts)) for parts in chunks]
    if lengths != expected:
        raise ValueError(
            f"pyattn: {name} of {sum(lengths)} positions must be cut into parts of {expected} for layout {layout}, got {lengths}"
        )
    return chunks
