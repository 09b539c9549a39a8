"""The block table of a cache in pages: where each sequence's pages lie."""

from torch import Tensor

from pyattn.arguments import check_size

LEAST = 16
"""Positions of a page, at least: as csrc/ops/pages.h has it."""


def table_for(lengths: Tensor, max_seqlen: int, page_size: int) -> Tensor:
    """The block table (B, pages of a sequence), all zeros, of a cache for sequences of up to ``max_seqlen``."""
    check_size("page_size", page_size, least=LEAST)
    return lengths.new_zeros(len(lengths), -(-max_seqlen // page_size))
