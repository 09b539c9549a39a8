"""Other people's signatures over :func:`pyattn.attention` and :func:`pyattn.attention_varlen`.

There is one module per library. Each renames and checks: an argument is honoured or refused, never ignored. ``import
pyattn`` imports none of them, and none changes another library unless told to.

.. include:: README.md
"""
