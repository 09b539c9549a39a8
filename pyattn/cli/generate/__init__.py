"""``pyattn generate``: its command, sampling over caches, and drafts."""
