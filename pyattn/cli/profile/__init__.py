"""``pyattn profile``: its command, and the report of what it measured."""
