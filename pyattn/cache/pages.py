"""Pages of keys and values: the block table, which lists each sequence's pages, and the rows it points to."""

from torch import Tensor
from torch.nn.functional import pad

from pyattn import ops
from pyattn.options.checks import check_size

LEAST = 16
"""The fewest positions of a page, the same as in csrc/ops/pages.h."""


def table_for(lengths: Tensor, max_seqlen: int, page_size: int) -> Tensor:
    """The block table (B, pages of a sequence), all zeros, of a cache for sequences of up to ``max_seqlen``."""
    check_size("page_size", page_size, least=LEAST)
    return lengths.new_zeros(len(lengths), -(-max_seqlen // page_size))


def gathered(
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_k: int,
    seqused_k: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous k and v (B, room of a sequence, Hkv, D or Dv), and how many keys each sequence has."""
    if k.dim() != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            "pyattn: k and v in pages must have 4 dimensions (pages, page_size, num_heads, head_dim), all but the last "
            f"the same, got {list(k.shape)} and {list(v.shape)}"
        )
    table, lengths = ops.pages_in_use(block_table, cu_seqlens_k, max_seqlen_k, seqused_k, k.shape[0], k.shape[1])
    batch, count = table.shape
    if k.shape[0] == 0:  # a table without pages in use holds zeros, and index_select needs a page 0
        k, v = (pad(t, (0, 0, 0, 0, 0, 0, 0, 1)) for t in (k, v))
    rows = (t.index_select(0, table.flatten()).unflatten(0, (batch, count)).flatten(1, 2) for t in (k, v))
    return *rows, lengths
