"""Attention in plain PyTorch: the specification that the native functions and modules are tested against.

Everything here materialises the (seqlen_q, seqlen_k) scores and takes any floating dtype. Nothing here imports the code
it specifies. The only import from elsewhere in pyattn is :mod:`pyattn.options.dropout`: its draws are a definition, not
a computation to be checked.
"""

from pyattn.reference import book, selection
from pyattn.reference.formula import attention, default_scale, distances, visible
from pyattn.reference.latent import MultiHeadLatentAttention
from pyattn.reference.modules import (
    Attention,
    CausalAttention,
    MultiHeadAttentionWrapper,
    SelfAttention,
    SelfAttention_v1,
    SelfAttention_v2,
    SimplifiedSelfAttention,
    SingleHeadSelfAttention,
)
from pyattn.reference.packed import attention_varlen
from pyattn.reference.projected import GroupedQueryAttention, MultiHeadAttention
from pyattn.reference.shared_prefix import attention_with_prefix

__all__ = [
    "Attention",
    "CausalAttention",
    "GroupedQueryAttention",
    "MultiHeadAttention",
    "MultiHeadAttentionWrapper",
    "MultiHeadLatentAttention",
    "SelfAttention",
    "SelfAttention_v1",
    "SelfAttention_v2",
    "SimplifiedSelfAttention",
    "SingleHeadSelfAttention",
    "attention",
    "attention_varlen",
    "attention_with_prefix",
    "book",
    "default_scale",
    "distances",
    "selection",
    "visible",
]
