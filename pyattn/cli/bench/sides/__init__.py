"""The sides of each kind of comparison in ``pyattn bench``."""
