"""The functions over sequences, or packed sequences, of which each rank has a part."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from pyattn.distributed.agreement.call import AgreedCall, Request, agreed, chosen
from pyattn.distributed.agreement.ranks import Group, groups_of, ranks_of
from pyattn.distributed.agreement.signature import all_hear
from pyattn.distributed.compiled.operator import FUNCTIONS
from pyattn.distributed.compiled.sequence_operator import compiled
from pyattn.distributed.max_score import of_ranks
from pyattn.distributed.ring.ring_attention import ring
from pyattn.distributed.ulysses import by_heads
from pyattn.distributed.usp import by_mesh
from pyattn.options.attention_options import AttentionOptions
from pyattn.options.checks import positional_error
from pyattn.options.parse import takes_options


@all_hear
@takes_options
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group = None,
    *positional: object,
    layout: str = "zigzag",
    return_lse: bool = False,
    return_max_score: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, ...]:
    """:func:`pyattn.attention` over a sequence of which each rank has a part.

    The result is this rank's rows of what one process would compute. Chunks of keys travel between neighbours, as far
    as causal and window make them visible, while the rank computes with those that it has.

    Args:
        q: (B, Hq, Sq of this rank, D).
        k: (B, Hkv, Sk of this rank, D).
        v: (B, Hkv, Sk of this rank, Dv).
        group: the ranks: a process group or a mesh of one dimension; None: all.
        layout: which positions each rank has, as :func:`shard` cuts them: ``"zigzag"``, ``"contiguous"`` or
            ``"chunk"``.
        options: as for :func:`pyattn.attention`, with positions of the whole sequence and these differences.
            key_ranges, mask, bias: the rows of this rank's queries, or one row for all of them, and all keys.
            dropout_seed: default: drawn by rank 0; if the ranks have some sequences or heads of a larger call,
            :class:`pyattn.options.attention_options.Draws`.
        return_lse: also return lse.
        return_max_score: also return max_score, after lse.

    Returns:
        ``out`` (B, Hq, Sq of this rank, Dv), or a tuple with lse and max_score, as for :func:`pyattn.attention`;
        max_score (B, Hq) is that of all ranks' queries, on every rank. out and lse are differentiable once. The loss is
        the sum of the ranks' losses: gradients of q, k, v and of a bias's own rows are complete; those of alibi_slopes,
        sinks and a bias that all rows share are this rank's share, and the sum over the ranks is the whole, as in
        data-parallel training.

    Raises:
        ValueError, TypeError, NotImplementedError: as for :func:`pyattn.attention`; parts that are not those of the
            layout. If the arguments of ranks differ, or one rank's are wrong, every rank raises before any waits for
            another's keys.

    Besides its own part, a rank needs memory for two chunks that travel, and in backward for their gradients in
    float32. Results are merged in float32 or more, in a fixed order: they have the same bits in every run.

    Source: Liu et al. 2023 (Ring Attention).
    """
    request = Request(ring_attention, (q, k, v), layout, options, return_max_score)
    return _results(request, positional, group, return_lse, ring)


@all_hear
@takes_options
def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group = None,
    *positional: object,
    layout: str = "zigzag",
    return_lse: bool = False,
    return_max_score: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, ...]:
    """:func:`ring_attention` by another exchange: each rank computes all positions of some of the heads.

    Arguments, results and errors are those of :func:`ring_attention`. Query heads are divided as evenly as possible;
    a rank gets the KV heads that they read. A mask, bias or key_ranges is gathered: all rows, and the rank's heads if
    it has heads.

    Source: Jacobs et al. 2023 (DeepSpeed Ulysses).
    """
    request = Request(ulysses_attention, (q, k, v), layout, options, return_max_score)
    return _results(request, positional, group, return_lse, lambda call: by_heads(call, layout))


@all_hear
@takes_options
def usp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh,
    *positional: object,
    layout: str = "zigzag",
    return_lse: bool = False,
    return_max_score: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, ...]:
    """:func:`ring_attention` between the rows of a mesh of two dimensions, :func:`ulysses_attention` within each row.

    Arguments, results and errors are those of :func:`ring_attention`; ``shard(tensor, dim, mesh)`` cuts the sequence.
    The ranks of a row, the mesh's second dimension, exchange heads: let them be close to one another.

    Source: Fang and Zhao 2024 (USP).
    """
    wrong = None
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
        wrong = TypeError(f"pyattn: mesh must be a DeviceMesh of two dimensions, got {mesh!r}")
        if not isinstance(mesh, dist.ProcessGroup) and getattr(mesh, "ndim", None) != 1:  # without ranks to hear of it
            raise wrong
    request = Request(usp_attention, (q, k, v), layout, options, return_max_score, known_error=wrong)

    def compute(call: AgreedCall) -> tuple[Tensor, ...]:
        return by_mesh(call, layout, *map(ranks_of, groups_of(mesh)[1:]))

    return _results(request, positional, mesh, return_lse, compute)


@all_hear
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
    return_max_score: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, ...]:
    """:func:`pyattn.attention_varlen` over packed sequences of which each rank has a part of the tokens.

    The layouts of :func:`ring_attention` cut the tokens, wherever sequences begin and end. ``"zigzag_varlen"`` cuts
    each sequence zigzag: all ranks do the same work whatever the lengths are, and keys of every sequence travel.

    Args:
        q: (total_q of this rank, Hq, D).
        k: (total_k of this rank, Hkv, D).
        v: (total_k of this rank, Hkv, Dv).
        cu_seqlens_q: (sequences + 1,), int32 or int64: where each sequence begins among the tokens of all ranks.
        cu_seqlens_k: the same for the keys.
        group, return_lse, return_max_score: as for :func:`ring_attention`.
        layout: which tokens each rank has, as :func:`shard` cuts them: one of :func:`ring_attention`'s layouts or
            ``"zigzag_varlen"``; ``shard`` takes cu_seqlens_q for q, and cu_seqlens_k for k and v.
        options: as for :func:`pyattn.attention_varlen`; key_ranges: the rows of this rank's queries.

    Returns:
        ``out`` (total_q of this rank, Hq, Dv), or a tuple with lse (Hq, total_q of this rank) and max_score (sequences,
        Hq); differentiable once, as for :func:`ring_attention`.

    Raises:
        ValueError, TypeError, NotImplementedError: as for :func:`ring_attention` and :func:`pyattn.attention_varlen`.
    """
    cu_seqlens = cu_seqlens_q, cu_seqlens_k
    request = Request(ring_attention_varlen, (q, k, v), layout, options, return_max_score, cu_seqlens)
    return _results(request, positional, group, return_lse, ring)


def _results(
    request: Request,
    positional: tuple[object, ...],
    group: Group,
    return_lse: bool,
    compute: Callable[[AgreedCall], tuple[Tensor, ...]],
) -> Tensor | tuple[Tensor, ...]:
    """The results that the caller wants; ``positional`` are arguments beyond those that may go by position."""
    request = request._replace(known_error=request.known_error or positional_error(request.function, positional))
    if torch.compiler.is_compiling():
        out, lse, most = compiled(request, group)
    else:
        call = agreed(request, group)
        out, lse, largest = compute(call)
        most = of_ranks(call, largest) if request.max_score else largest
    return chosen(out, lse, most, return_lse, request.max_score)


for _function in (ring_attention, ring_attention_varlen, ulysses_attention, usp_attention):
    FUNCTIONS[_function.__name__] = _function
