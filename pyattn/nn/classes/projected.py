"""Heads over three Linears and a fourth: what the book's multi-head and grouped-query attention share."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from pyattn.nn.checks import check_alone, check_input, quotient
from pyattn.nn.replace import Norms
from pyattn.nn.rotary import check_positions, check_tables, turn_heads
from pyattn.nn.score_options import ScoreOptions
from pyattn.options.checks import check_finite, check_sizes, check_type, shown

QKNorm = bool | Literal["all_heads"]


def window_of(window_size: int) -> tuple[int, int]:
    """(left, right) of a window of that many keys, the last one the query's own; TypeError or ValueError if below 1."""
    check_sizes(1, window_size=window_size)
    return window_size - 1, 0


def check_unshared(use_cache: bool) -> None:
    """ValueError if a module is to append to its own cache what another one computed."""
    if use_cache:
        raise ValueError("pyattn: use_cache must be False with kv_from, whose module has the cache, got True")


class ProjectedHeads(ScoreOptions):
    """A module with Linears ``W_query``, ``W_key``, ``W_value`` and ``out_proj``, and what newer models add to them.

    All four are keyword-only arguments of the constructor:

    - ``head_dim``: columns of a head, also if num_heads * head_dim is not d_in, as in Qwen3 and Gemma; ``out_proj``
      then maps back to d_in, and ``d_out`` is either of the two. Default: d_out / num_heads.
    - ``qk_norm=True``: the modules ``q_norm`` and ``k_norm``, RMS norms (eps 1e-6) over the columns of each head,
      before a rotation, as in Qwen3; ``"all_heads"``: over all heads at once, as in Olmo. Any module may replace them.
    - ``softmax_scale``: multiplies the scores. Default: 1 / sqrt(head_dim).
    - ``rotary_interleaved``: rotations turn columns 2t and 2t + 1 together, not t and t + half of them.
    """

    W_key: nn.Linear
    W_value: nn.Linear
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def set_heads(self, d_in: int, d_out: int, num_heads: int, head_dim: int | None) -> tuple[int, int]:
        """Checks and stores the sizes; returns the width of all heads and that of out."""
        check_sizes(1, d_in=d_in)
        check_sizes(1, d_out=d_out)
        self.d_in: int = d_in
        self.d_out: int = d_out
        self.num_heads: int = num_heads
        self._given_head_dim = head_dim
        if head_dim is None:
            self.head_dim: int = quotient("d_out", d_out, "num_heads", num_heads)
            return d_out, d_out
        check_sizes(1, num_heads=num_heads, head_dim=head_dim)
        self.head_dim, width = head_dim, num_heads * head_dim
        if d_out not in (d_in, width):
            raise ValueError(
                f"pyattn: d_out must be d_in or num_heads * head_dim if head_dim is given, got {d_out}, {d_in} and "
                f"{num_heads} * {head_dim}"
            )
        return width, d_in

    def set_score_changes(
        self,
        num_heads_kv: int,
        qk_norm: QKNorm,
        softmax_scale: float | None,
        rotary_interleaved: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Checks and stores the arguments that :class:`ProjectedHeads` describes; the norms come last."""
        if softmax_scale is not None:
            check_finite("softmax_scale", softmax_scale)
        check_type("rotary_interleaved", rotary_interleaved, bool)
        if not isinstance(qk_norm, bool) and qk_norm != "all_heads":
            raise ValueError(f"pyattn: qk_norm must be a bool or 'all_heads', got {shown(qk_norm)}")
        self.softmax_scale = softmax_scale
        self.rotary_interleaved = rotary_interleaved
        self.qk_norm: QKNorm = qk_norm
        for name, heads in (("q_norm", self.num_heads), ("k_norm", num_heads_kv)):
            columns = self.head_dim * heads if qk_norm == "all_heads" else self.head_dim
            setattr(self, name, nn.RMSNorm(columns, eps=1e-6, dtype=dtype) if qk_norm else None)

    def described_changes(self) -> dict[str, object]:
        """The arguments for :func:`pyattn.nn.repr.described`; None stands for a default."""
        return {
            "head_dim": self._given_head_dim,
            "qk_norm": self.qk_norm or None,
            "softmax_scale": self.softmax_scale,
            "rotary_interleaved": self.rotary_interleaved or None,
        }

    def score_options(self, num_heads: int, x: Tensor) -> dict[str, Any]:
        """The extras and changes as :func:`pyattn.nn.heads.attend_heads` takes them; None: the default."""
        norms = None
        if self.q_norm is not None or self.k_norm is not None:
            norms = Norms(self.q_norm, self.k_norm, self.qk_norm == "all_heads")
        changes = {"softmax_scale": self.softmax_scale, "interleaved": self.rotary_interleaved, "norms": norms}
        return super().score_options(num_heads, x) | changes

    def keys_and_values(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """k and v of all tokens of ``x``, normed and turned, each (batch, num_heads_kv, seqlen, head_dim).

        They are for the ``kv_from`` of this module and of others, so that several layers share them.
        """
        check_input(x, self.d_in, self.W_key)
        check_alone(x, kv_from=True)
        check_positions(positions, self.rotary, None, x, position_embeddings is not None)
        check_tables(position_embeddings, x, self.head_dim, self.rotary, positions, False)
        k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.W_key, self.W_value))
        if self.k_norm is not None:
            k = Norms(None, self.k_norm, self.qk_norm == "all_heads").of(self.k_norm, k)
        tables = position_embeddings, None, positions, self.rotary_interleaved
        k, _ = turn_heads(k, k[:, :, :0], self.rotary, *tables)
        return k.transpose(1, 2), v.transpose(1, 2)
