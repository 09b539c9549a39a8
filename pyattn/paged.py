"""Keys and values in pages, which a block table lists for each sequence: attention over them.

The CPU's kernels of forward read pages where they lie. On a GPU, where a gradient is wanted, and in transforms of
torch.func, the pages of all sequences are copied behind each other once, by operations that have gradients, and from
there on they are like any other keys: the gradient of a page that sequences share is the sum of theirs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyattn import ops
from pyattn.autocast import cast
from pyattn.derivatives import autograd
from pyattn.derivatives.tangents import DENSE
from pyattn.ops.schema import Options
from pyattn.parse import parse


def attention(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, lengths: Tensor, seqlen_k: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of :func:`pyattn.attention` over a cache of pages, all positions of ``options`` in [0, seqlen_k).

    Args:
        q: (B, Hq, Sq, D).
        k, v: (pages, page_size, Hkv, D) and (pages, page_size, Hkv, Dv).
        block_table: (B, pages of a sequence), each entry a page.
        lengths: (B,), how many positions of each sequence hold something.
        seqlen_k: how many positions there are.
        options: those of :func:`pyattn.attention`.
    """
    known = Options(*parse(attention, options, q.device))
    if torch._C._is_any_autocast_enabled():
        q, k, v = cast(q), cast(k), cast(v)
    if needs_copy(q, known.bias, known.alibi_slopes, known.sinks):
        starts = seqlen_k * torch.arange(len(lengths) + 1, device=lengths.device)
        k, v, _ = gathered(k, v, block_table, starts, seqlen_k, lengths)
        keys, values = (t.narrow(1, 0, seqlen_k).transpose(1, 2) for t in (k, v))
        return autograd.attend(DENSE, q, keys, values, known)
    results = ops.attention_paged_forward(q, k, v, block_table, seqlen_k, *known)
    return results[0], results[1]


def needs_copy(q: Tensor, *tensors: Tensor | None) -> bool:
    """Whether one of these is on a GPU or may need a gradient, or a transform is active."""
    if q.is_cuda or (not torch.compiler.is_compiling() and autograd.transforming()):
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, *tensors))


def gathered(
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_k: int,
    seqused_k: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """k and v (B, room of a sequence, Hkv, D or Dv), and how many keys each sequence has."""
    if k.dim() != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            "pyattn: k and v in pages must have 4 dimensions (pages, page_size, num_heads, head_dim), all but the last "
            f"the same, got {list(k.shape)} and {list(v.shape)}"
        )
    table, lengths = ops.pages_in_use(block_table, cu_seqlens_k, max_seqlen_k, seqused_k, k.shape[0], k.shape[1])
    batch, count = table.shape
    if k.shape[0] == 0:  # a table without pages in use holds zeros, and index_select wants a page 0
        k, v = (pad(t, (0, 0, 0, 0, 0, 0, 0, 1)) for t in (k, v))
    rows = (t.index_select(0, table.flatten()).unflatten(0, (batch, count)).flatten(1, 2) for t in (k, v))
    return *rows, lengths
