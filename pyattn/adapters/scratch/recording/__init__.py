"""Scores and weights that are recorded: their expressions, their meaning, and the tensors that stand for them."""
