"""Attention's derivatives: the first by native operators, the others by torch operations over blocks of rows."""
