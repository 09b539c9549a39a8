"""A cache that the caller owns: checks, where it holds its sequences, and 8 bits."""
