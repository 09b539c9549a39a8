"""The keyword-only extras that multi-head modules share: changes to the plain formula for scores."""

from typing import Any

import torch
from torch import Tensor, nn

from pyattn.nn.rotary import alibi_slopes
from pyattn.options.checks import check_finite, check_type, check_window
from pyattn.options.schema import UNBOUNDED


class ScoreOptions(nn.Module):
    """A module whose constructor takes ``window``, ``softcap``, ``alibi``, ``sinks`` and ``rotary``.

    With all of them, head h computes, over the keys j that are visible to query i::

        s_ij = softcap tanh(<turn(q_i), turn(k_j)> / sqrt(head_dim) / softcap) - slope_h |i - j|
        out_i = sum_j exp(s_ij) v_j / (sum_j exp(s_ij) + exp(sinks_h))

    - ``window=(left, right)``: a query's own key, ``left`` keys before it and ``right`` keys after it are visible; -1
      or None: all.
    - ``softcap=c``: each scaled score s becomes ``c tanh(s / c)``; 0 or None: no cap.
    - ``alibi=True``: ``slope_h |i - j|`` is subtracted from each score, with the slopes of
      :func:`pyattn.nn.rotary.alibi_slopes`. They are computed in each call and are not in the state dict.
    - ``sinks=True``: the softmax has an extra column without a value: the parameter ``sinks`` (num_heads,), initially
      zeros (Xiao et al. 2024; learned as in gpt-oss).
    - ``rotary=base``: q and k rotate by their positions, see :func:`pyattn.nn.rotary.rotate`; head_dim must be even.
    """

    sinks: nn.Parameter | None

    def set_score_options(
        self,
        num_heads: int,
        head_dim: int,
        window: tuple[int, int] | None,
        softcap: float | None,
        alibi: bool,
        sinks: bool,
        rotary: float | None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Checks and stores the extras; the parameter ``sinks`` comes after those that already exist."""
        window = UNBOUNDED if window is None else window
        softcap = 0.0 if softcap is None else softcap
        check_window(window)
        check_finite("softcap", softcap)
        check_type("alibi", alibi, bool)
        check_type("sinks", sinks, bool)
        if rotary is not None:
            check_finite("rotary", rotary)
            if rotary == 0 or head_dim % 2:
                raise ValueError(
                    f"pyattn: rotary must be a base above 0, with an even head_dim, got {rotary} and {head_dim}"
                )
        self.window: tuple[int, ...] = tuple(window)
        self.softcap: float = softcap
        self.alibi = alibi
        self.rotary = rotary
        self.register_parameter("sinks", nn.Parameter(torch.zeros(num_heads, dtype=dtype)) if sinks else None)

    def described_options(self) -> dict[str, object]:
        """The extras for :func:`pyattn.nn.repr.described`; None stands for a default."""
        return {
            "window": None if self.window == UNBOUNDED else self.window,
            "softcap": self.softcap or None,
            "alibi": self.alibi or None,
            "sinks": None if self.sinks is None else True,
            "rotary": self.rotary,
        }

    def score_options(self, num_heads: int, x: Tensor) -> dict[str, Any]:
        """The extras as :func:`pyattn.nn.heads.attend_heads` takes them, for the input ``x``; None: the default."""
        slopes = None
        if self.alibi:
            dtype = torch.promote_types(x.dtype, torch.float32)
            slopes = alibi_slopes(num_heads, dtype=dtype, device=x.device)
        return {
            "window": None if self.window == UNBOUNDED else self.window,
            "softcap": self.softcap or None,
            "alibi_slopes": slopes,
            "sinks": self.sinks,
            "rotary": self.rotary,
        }
