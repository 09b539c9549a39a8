"""``pyattn train``: its command, its loop, several ranks, and all that a run stores."""
