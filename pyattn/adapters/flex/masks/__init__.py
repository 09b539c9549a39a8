"""Masks of FlexAttention: mask_mods, and the key ranges or bool masks that they mean."""
