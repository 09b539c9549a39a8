"""Drop-in modules: the attention classes people write from scratch, under the same names, native inside.

Import them in place of your own. Constructors, attribute names, initial values under a seed and state dicts are those
of the plain modules in :mod:`pyattn.reference` (S. Raschka, "Build a Large Language Model (From Scratch)", chapters 3
and 4, and the tutorials based on it). :mod:`pyattn.nn.book` has the efficient variants of the book's bonus material.
``load_state_dict(strict=True)`` works both ways, the ``mask`` buffer's key included; above a context of 2,048 this
takes ``persistent_mask=True``: see :class:`pyattn.nn.mask_buffer.CausalMask`. Memory is linear in seqlen, unless
weights are returned or a mask is given. Each head computes (Vaswani et al. 2017, equation 1) ::

    out = dropout(softmax(mask(q k^T / sqrt(head_dim)))) v        causal mask, seqlen 4:    1 0 0 0
                                                                  query i down, key j       1 1 0 0
    q = W_query(x), k = W_key(x), v = W_value(x)                  across, 1 = takes part    1 1 1 0
                                                                                            1 1 1 1
The classes: :class:`SimplifiedSelfAttention`, :class:`SelfAttention_v1`, :class:`SelfAttention_v2`,
:class:`CausalAttention`, :class:`MultiHeadAttentionWrapper` and :class:`MultiHeadAttention` of the book's chapter 3,
:class:`GroupedQueryAttention` of chapter 4, :class:`SingleHeadSelfAttention` and :class:`Attention` of tutorials,
:class:`MultiHeadLatentAttention` of DeepSeek's models. Gated DeltaNet and linear attention have no softmax over keys,
so no class computes them. Common to all modules:

- ``x`` is (batch, seqlen, d_in), in the weights' dtype, any strides; modules that say so also take (seqlen, d_in).
- ``dropout`` is the probability, 0 to 1, of dropping a weight in training; the module of that name may be replaced by
  ``nn.Identity``. ``qkv_bias`` gives the projections a bias.
- ``need_weights=True`` returns ``(out, weights)`` with the weights that multiplied ``v``, after dropout: (batch,
  num_heads, seqlen, seqlen), without num_heads in one-head modules, without batch if ``x`` has none. The default is
  False, except in :class:`SingleHeadSelfAttention`, whose plain module always returns them.
- ``key_ranges`` (batch or 1, seqlen or 1, 2), or (batch or 1, seqlen or 1, n, 2) for several intervals, as for
  :func:`pyattn.attention`: only the keys [begin, end) are visible to query i, on top of the module's own mask.
  :mod:`pyattn.masks` builds them for padded and packed batches. Ranges that are the whole mask, as from
  ``masks.prefix_lm``, are for :class:`Attention`: the other modules are causal and refuse them. Every module with
  several heads takes ranges, except ``book.MultiHeadAttentionWithDSA``, and so does :class:`CausalAttention`.
- ``mask``, bool, True = takes part, and ``bias``, in the weights' dtype or float32 and added to the scores, as for
  :func:`pyattn.attention`, also on top of the module's own mask, in the modules that take ``key_ranges``. The shape of
  each broadcasts to (batch, num_heads, seqlen, seqlen). In :class:`Attention`, ``mask`` keeps its tutorials' meaning,
  **True = masked out**.
- Hooks on ``dropout`` run, over weights (batch, num_heads, seqlen, seqlen) that otherwise never exist; over a cache
  or a jagged x they raise NotImplementedError.
- ``window``, ``softcap``, ``alibi``, ``sinks`` and ``rotary`` are keyword-only extras of :class:`MultiHeadAttention`,
  :class:`Attention` and :class:`GroupedQueryAttention`: see :class:`pyattn.nn.score_options.ScoreOptions`. One-head
  modules and the wrapper around them, the book's steps towards these, have none.
- ``head_dim``, ``qk_norm``, ``softmax_scale`` and ``rotary_interleaved``, and in a call ``position_embeddings`` and
  ``kv_from``, are for layers of newer models, in :class:`MultiHeadAttention` and :class:`GroupedQueryAttention`: see
  :class:`pyattn.nn.classes.projected.ProjectedHeads` and :class:`pyattn.nn.forward_options.Turned`.
- ``use_cache=True``, in these two and the book's latent, sliding-window and DSA classes, continues the tokens of
  earlier calls over the module's own cache: see :class:`pyattn.nn.growing_cache.SelfCaching`.
- ``kv_cache``, a :class:`pyattn.KVCache` with the batch size, KV heads, head_dim and dtype of the module's keys,
  continues the tokens of earlier calls in these two, :class:`Attention`, :class:`MultiHeadLatentAttention`, and of the
  book's classes in ``MHAEinsum``, those with one ``qkv``, the latent, the sliding-window and the gated one. Rotary
  positions count these tokens. They are constants for gradients; a call's own keys and values have theirs. One cache
  serves one module, and remembers it. ``key_ranges`` count positions, up to the cache's max_seqlen, and ``mask`` and
  ``bias`` have max_seqlen keys; a ring buffer takes none of the three. Weights are (batch, num_heads, seqlen, length of
  the longest sequence so far). An error leaves the cache unchanged.
- ``lengths``, with a cache: ints or an int32 or int64 tensor (batch,). ``x`` is padded on the right: in sequence b,
  only the first lengths[b] tokens are real. The others are not cached, their weights are 0, and their rows of out hold
  the bias of the last projection, or 0 if it has no bias.
- TypeError for a wrong dtype or an argument that does not exist, ValueError for a wrong shape or value; each message
  says what was given.

.. include:: README.md
"""

from pyattn.nn import book
from pyattn.nn.classes.causal import CausalAttention, MultiHeadAttentionWrapper, SingleHeadSelfAttention
from pyattn.nn.classes.grouped_query import GroupedQueryAttention
from pyattn.nn.classes.latent import MultiHeadLatentAttention
from pyattn.nn.classes.multi_head import Attention, MultiHeadAttention
from pyattn.nn.classes.self_attention import SelfAttention, SelfAttention_v1, SelfAttention_v2, SimplifiedSelfAttention
from pyattn.nn.gpt2 import (
    GPT2_CONFIGS,
    create_gpt2_large_attention,
    create_gpt2_medium_attention,
    create_gpt2_small_attention,
    create_gpt2_xl_attention,
)
from pyattn.nn.mask_buffer import causal_mask
from pyattn.nn.repr import PublicNames

__all__ = [
    "GPT2_CONFIGS",
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
    "book",
    "causal_mask",
    "create_gpt2_large_attention",
    "create_gpt2_medium_attention",
    "create_gpt2_small_attention",
    "create_gpt2_xl_attention",
]

MODULES = [cls for home in (globals(), vars(book)) for cls in map(home.get, home["__all__"]) if isinstance(cls, type)]
"""The module classes of this package, :mod:`pyattn.nn.book` included."""

globals()["__all__"] = PublicNames(globals())
