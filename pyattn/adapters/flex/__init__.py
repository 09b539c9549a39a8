"""FlexAttention's common masks and scores by the native kernels on a CPU, by torch's own kernels on a GPU.

``torch.nn.attention.flex_attention`` has no backward on a CPU. A script that takes its functions from here runs on
both: mask_mods and score_mods come from the functions below, which torch's own functions take too::

    from pyattn.adapters.flex import and_masks, causal, create_block_mask, document, flex_attention

    block_mask = create_block_mask(and_masks(causal(), document(ids)), None, None, 1024, 1024, device=device)
    out = flex_attention(query, key, value, block_mask=block_mask)

On a CPU any other Python function raises NotImplementedError with its name; elsewhere torch takes it.
"""

from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from pyattn.adapters.flex.attention import create_block_mask, flex_attention
from pyattn.adapters.flex.masks import and_masks, causal, document, or_masks, prefix_lm, sliding_window
from pyattn.adapters.flex.scores import alibi, softcap

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "alibi",
    "and_masks",
    "causal",
    "create_block_mask",
    "document",
    "flex_attention",
    "or_masks",
    "prefix_lm",
    "sliding_window",
    "softcap",
]
