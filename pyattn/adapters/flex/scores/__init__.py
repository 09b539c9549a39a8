"""Scores of FlexAttention: score_mods with a native form, and any other in blocks."""
