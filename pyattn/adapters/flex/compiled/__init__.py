"""mask_mods and score_mods in compiled graphs."""
