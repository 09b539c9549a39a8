"""Recordings of mask_mods and score_mods, and what these tell of their meaning."""
