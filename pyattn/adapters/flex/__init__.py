"""FlexAttention on a CPU, with gradients, by the native kernels, and on a GPU by torch's own.

``torch.nn.attention.flex_attention`` has no backward on a CPU. A script that imports its functions from here runs on
both: the functions below return mask_mods and score_mods that torch's own functions also take::

    from pyattn.adapters.flex import and_masks, causal, create_block_mask, document, flex_attention

    block_mask = create_block_mask(and_masks(causal(), document(ids)), None, None, 1024, 1024, device=device)
    out = flex_attention(query, key, value, block_mask=block_mask)

Any other mask_mod or score_mod works, too: masks are evaluated (:mod:`pyattn.adapters.flex.masks.mask_scan`),
score_mods are taken apart into a mask (:mod:`pyattn.adapters.flex.scores.score_masks`) and native options
(:mod:`pyattn.adapters.flex.scores.score_terms`), or else computed block by block
(:mod:`pyattn.adapters.flex.scores.score_blocks`).
"""

from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from pyattn.adapters.flex.attention import create_block_mask, flex_attention
from pyattn.adapters.flex.masks.mask_mods import and_masks, causal, document, or_masks, prefix_lm, sliding_window
from pyattn.adapters.flex.scores.score_mods import alibi, softcap

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
