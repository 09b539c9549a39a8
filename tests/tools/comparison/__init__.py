"""Comparison of pyattn with other ways to compute attention: measurement and page."""
