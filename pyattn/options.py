"""The operators' arguments after their tensors, as one value from the public functions down to the schema."""

from typing import NamedTuple

from torch import Tensor


class Options(NamedTuple):
    """``attention_forward(q, k, v, *options)``: the fields stand in the schema's order.

    Attributes:
        softmax_scale: factor on the scores; None: 1 / sqrt(head_dim).
        causal: whether query i sees the keys up to i + q_offset only.
        q_offset: key position of query 0; None: the last query stands at the last key.
        q_offsets: int64 (B,), one for each sequence, in place of q_offset.
        dropout_p: probability of dropping a weight.
        dropout_seed: int64 scalar; may be None where dropout_p is 0.
    """

    softmax_scale: float | None = None
    causal: bool = True
    q_offset: int | None = None
    q_offsets: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None

    def with_tensors(self, q_offsets: Tensor | None, dropout_seed: Tensor | None) -> "Options":
        """The same options with other tensors, because autograd saves tensors apart. ``_replace`` takes 1 us."""
        if q_offsets is self.q_offsets and dropout_seed is self.dropout_seed:
            return self
        return Options(self.softmax_scale, self.causal, self.q_offset, q_offsets, self.dropout_p, dropout_seed)
