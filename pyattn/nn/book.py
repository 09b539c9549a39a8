"""Attention of the bonus material of S. Raschka, "Build a Large Language Model (From Scratch)", under its names.

Chapter 3, "Comparing Efficient Multi-Head Attention Implementations", has nine ways to write the same thing. The first
two are the chapter's own classes, under other names; the others differ in where they keep their weights. Chapter 4 adds
:class:`MultiHeadLatentAttention`, :class:`MultiHeadAttentionWithSWA`, :class:`MultiHeadAttentionWithDSA` with its
:class:`LightningIndexer`, and :class:`GatedMultiHeadAttention`; its grouped-query attention and its multi-head
attention with a cache are those of :mod:`pyattn.nn`. Here all compute natively, and share what :mod:`pyattn.nn` says of
its modules. Chapter 4's ``GatedDeltaNet``, like every linear attention, has no softmax over keys, so nothing here
computes it.
"""

from torch import Tensor, nn
from typing_extensions import Unpack

from pyattn.nn.classes.book_latent import MultiHeadLatentAttention
from pyattn.nn.classes.causal import MultiHeadAttentionWrapper
from pyattn.nn.classes.combined_qkv import (
    MHAPyTorchFlexAttention,
    MHAPyTorchScaledDotProduct,
    MHAPyTorchSDPAWithoutFlash,
    MultiHeadAttentionCombinedQKV,
)
from pyattn.nn.classes.einsum import MHAEinsum
from pyattn.nn.classes.multi_head import MultiHeadAttention
from pyattn.nn.classes.multi_head_variants import (
    GatedMultiHeadAttention,
    MultiHeadAttentionWithDSA,
    MultiHeadAttentionWithSWA,
)
from pyattn.nn.classes.torch_mha import MHAPyTorchClass
from pyattn.nn.forward_options import Masked, takes
from pyattn.nn.heads import Output, out_and_weights, output_of
from pyattn.nn.repr import PublicNames
from pyattn.options.checks import check_names
from pyattn.selection.indexer import LightningIndexer

__all__ = [
    "Ch03_MHA",
    "Ch03_MHA_Wrapper",
    "GatedMultiHeadAttention",
    "LightningIndexer",
    "MHAEinsum",
    "MHAPyTorchClass",
    "MHAPyTorchFlexAttention",
    "MHAPyTorchSDPAWithoutFlash",
    "MHAPyTorchScaledDotProduct",
    "MultiHeadAttentionCombinedQKV",
    "MultiHeadAttentionWithDSA",
    "MultiHeadAttentionWithSWA",
    "MultiHeadLatentAttention",
]

Ch03_MHA = MultiHeadAttention


class Ch03_MHA_Wrapper(MultiHeadAttentionWrapper):
    """:class:`MultiHeadAttentionWrapper` with a Linear ``out_proj`` over the concatenated heads.

    >>> Ch03_MHA_Wrapper(3, 2, context_length=6, dropout=0.0, num_heads=2)(torch.rand(8, 6, 3)).shape
    torch.Size([8, 6, 4])
    """

    @check_names
    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        *,
        persistent_mask: bool | None = None,
    ) -> None:
        super().__init__(d_in, d_out, context_length, dropout, num_heads, qkv_bias, persistent_mask=persistent_mask)
        self.out_proj: nn.Linear = nn.Linear(d_out * num_heads, d_out * num_heads)

    @check_names
    @takes(Masked)
    def forward(self, x: Tensor, **options: Unpack[Masked]) -> Output:
        """``x`` (batch, seqlen, d_in), out (batch, seqlen, num_heads * d_out)."""
        out, weights = out_and_weights(super().forward(x, **options))
        return output_of(self.project(self.out_proj, out), weights)


globals()["__all__"] = PublicNames(globals())
