"""Attention's derivatives: first derivatives by native operators, the others by torch operations over row blocks."""
