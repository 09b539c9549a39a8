"""Attention over a cache whose keys several ranks hold."""
