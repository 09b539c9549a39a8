"""``pyattn bench``: its command, its comparisons, and the sides of each."""
