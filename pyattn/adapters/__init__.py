"""Other people's signatures over :func:`pyattn.attention` and :func:`pyattn.attention_varlen`.

A module for each library. Each renames and checks: an argument is honoured or refused, never ignored. None is imported
by ``import pyattn``, and none changes another library unless it is told to.
"""
