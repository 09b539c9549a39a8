"""Jagged nested tensors, which the public functions compute as packed sequences once this package is imported."""

from pyattn.jagged import attention, weights

__all__ = ["attention", "weights"]
