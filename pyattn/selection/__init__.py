"""Selection of keys for sparse attention: the keys or blocks of keys that each query attends to, and an indexer's loss.

:func:`top_keys` is DeepSeek's lightning indexer, :func:`indexer_loss` trains it, and :func:`top_blocks` selects blocks
by their means, as MoBA and NSA do.

.. include:: README.md
"""

from pyattn.selection.blocks import top_blocks
from pyattn.selection.keys import top_keys
from pyattn.selection.loss import indexer_loss

__all__ = ["indexer_loss", "top_blocks", "top_keys"]
