"""Recordings of mask_mods and score_mods, and what they show."""
