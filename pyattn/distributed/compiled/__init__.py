"""Calls of several ranks as operators of compiled graphs."""
