"""The agreement of the ranks of a call on all that must be equal, before the first message."""
