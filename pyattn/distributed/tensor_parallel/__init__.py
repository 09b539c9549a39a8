"""Tensor parallelism: each rank computes some of a module's heads."""
