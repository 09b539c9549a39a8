"""The options of attention: their types, checks and meanings, and the operators' tuples of them."""

from pyattn.options.attention_options import AttentionOptions
from pyattn.options.schema import LEARNED, UNBOUNDED, Options, Packing

__all__ = ["LEARNED", "UNBOUNDED", "AttentionOptions", "Options", "Packing"]
