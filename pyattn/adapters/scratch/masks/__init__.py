"""Masks, fills and sums of recorded scores as the mask and the bias of :func:`pyattn.attention`."""
