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
        window: how many keys before and behind its own position a query sees; -1: all.
        key_ranges: int32 or int64 (B or 1, Sq, 2), the keys [begin, end) of each query.
        softcap: bound on the scaled scores; 0: none.
        bias: up to 4 dimensions, each 1 or full; bool, True = takes part, or added to the scores.
        alibi_slopes: (Hq,) or (B, Hq).
        sinks: (Hq,), the score of one more key without a value.
        dropout_p: probability of dropping a weight.
        dropout_seed: int64 scalar; may be None where dropout_p is 0.
    """

    softmax_scale: float | None = None
    causal: bool = True
    q_offset: int | None = None
    q_offsets: Tensor | None = None
    window: tuple[int, int] = (-1, -1)
    key_ranges: Tensor | None = None
    softcap: float = 0.0
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The options that are tensors: what autograd saves apart."""
        return self.q_offsets, self.key_ranges, self.bias, self.alibi_slopes, self.sinks, self.dropout_seed

    def with_tensors(
        self,
        q_offsets: Tensor | None = None,
        key_ranges: Tensor | None = None,
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        dropout_seed: Tensor | None = None,
    ) -> "Options":
        """The same options with these in place of :attr:`tensors`. ``_replace`` takes 1 us."""
        scale, causal, q_offset, _, window, _, softcap, _, _, _, dropout_p, _ = self
        mask = scale, causal, q_offset, q_offsets, window, key_ranges
        return Options(*mask, softcap, bias, alibi_slopes, sinks, dropout_p, dropout_seed)
