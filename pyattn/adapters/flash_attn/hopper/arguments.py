"""FlashAttention 3's arguments that version 2 does not have: values in float8, qv, chunks, and hints for the GPU."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyattn.adapters.flash_attn.arguments import WrongValueError, check_int32
from pyattn.options.checks import check_size, check_tensor, check_type

FLOAT8 = torch.float8_e4m3fn
"""The only dtype that q_descale, k_descale and v_descale belong to; out is then bfloat16."""


class Descales(NamedTuple):
    """q_descale, k_descale and v_descale, each (B, Hkv) float32, the factors of values in float8; default 1."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None


class Inputs(NamedTuple):
    """The arguments of attention, and the factor of its result.

    Attributes:
        q, k, v: in a dtype that attention takes. With qv, q is (.., D + Dv) and k (.., D + Dv).
        factor: of out, (.., Hq, 1); None: 1.
        dtype: of out.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    factor: Tensor | None
    dtype: torch.dtype

    def result(self, out: Tensor) -> Tensor:
        """``out`` (.., Hq, Dv) times the factor."""
        return out if self.factor is None else (out * self.factor).to(self.dtype)


def check_hints(num_splits: int, pack_gqa: bool | None, sm_margin: int) -> None:
    """Checks what steers a GPU alone: results do not depend on it. num_splits below 1 lets the GPU choose."""
    check_type("num_splits", num_splits, int)
    check_size("sm_margin", sm_margin)
    if pack_gqa is not None:
        check_type("pack_gqa", pack_gqa, bool)


def prepared(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, descales: Descales, batch: int, rows: Tensor | None = None
) -> Inputs:
    """The inputs of attention: scores are ``softmax_scale * (<q, k> + <qv, v>)``, and float8 becomes float32.

    The factors of k are folded into q and those of v into out, so cached keys and values have none.

    Args:
        q: (B, Sq, Hq, D), or (total_q, Hq, D) with ``rows``.
        k, v: (.., Hkv, D) and (.., Hkv, Dv).
        qv: (.., Hq, Dv) like q, or None.
        descales: the factors.
        batch: B.
        rows: (total_q,), the sequence of each query.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
        if tensor.dtype != q.dtype:
            raise TypeError(f"pyattn: {name} must have q's dtype, {q.dtype}, got {tensor.dtype}")
    if q.dtype == FLOAT8:
        return _of_float8(q, k, v, qv, descales, batch, rows)
    for name, factors in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if factors is not None and not (check_factors(name, factors, batch, k.shape[-2]) == 1).all():
            raise WrongValueError(
                f"pyattn: {name} other than 1 needs q, k and v in {FLOAT8}, got {factors.flatten()[:4].tolist()} and "
                f"{q.dtype}"
            )
    if qv is not None:
        check_tensor("qv", qv)
        if qv.dtype != q.dtype:
            raise TypeError(f"pyattn: qv must have q's dtype, {q.dtype}, got {qv.dtype}")
        shape = (*q.shape[:-1], v.shape[-1])
        if qv.shape != shape:
            raise WrongValueError(f"pyattn: qv must have shape {shape}, q's and v's head_dim, got {tuple(qv.shape)}")
        if k.shape[:-1] != v.shape[:-1]:
            raise WrongValueError(
                f"pyattn: with qv, k and v must differ in head_dim alone, got {tuple(k.shape)} and {tuple(v.shape)}"
            )
        q, k = torch.cat([q, qv], -1), torch.cat([k, v], -1)
    return Inputs(q, k, v, None, q.dtype)


def _of_float8(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, descales: Descales, batch: int, rows: Tensor | None
) -> Inputs:
    if qv is not None:
        raise NotImplementedError(f"pyattn: qv must be float16, bfloat16, float32 or float64, got q in {q.dtype}")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise NotImplementedError(
            f"pyattn: gradients of {q.dtype} are not implemented, got q, k or v that requires one"
        )
    num_heads, num_heads_kv = q.shape[-2], k.shape[-2]
    if num_heads_kv == 0 or num_heads % num_heads_kv:
        raise WrongValueError(
            f"pyattn: num_heads_q must be a multiple of num_heads_kv, got {num_heads} and {num_heads_kv}"
        )

    def of_queries(factors: Tensor) -> Tensor:
        each = factors.repeat_interleave(num_heads // num_heads_kv, 1)
        return each[:, None, :, None] if rows is None else each[rows][..., None]

    one = q.new_ones(batch, num_heads_kv, dtype=torch.float32)
    of_q, of_k, of_v = (
        one if factors is None else check_factors(name, factors, batch, num_heads_kv)
        for name, factors in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True)
    )
    return Inputs(q.float() * of_queries(of_q * of_k), k.float(), v.float(), of_queries(of_v), torch.bfloat16)


def check_factors(name: str, factors: object, batch: int, num_heads_kv: int) -> Tensor:
    """The factors, if they are (B, Hkv) float32."""
    check_tensor(name, factors)
    assert isinstance(factors, Tensor)
    if factors.dtype != torch.float32:
        raise TypeError(f"pyattn: {name} must be float32, got {factors.dtype}")
    if factors.shape != (batch, num_heads_kv):
        raise WrongValueError(
            f"pyattn: {name} must have shape (batch, num_heads_kv), {(batch, num_heads_kv)}, got {tuple(factors.shape)}"
        )
    return factors


def chunk_of(position: Tensor, attention_chunk: int, end: Tensor | int, most: int) -> Tensor:
    """The keys [begin, end) that are in the chunk of each query, (.., 2) int64; all keys if attention_chunk is 0.

    Args:
        position: (..), the key position of each query. It is negative for a query before the first key.
        attention_chunk: keys of a chunk; the first one begins at key 0.
        end: how many keys there are.
        most: no position or end is further from 0 than this.
    """
    first = torch.zeros_like(position)
    last = first + end
    if attention_chunk:
        # A chunk longer than this has the same borders, 0 and a negative one, but could overflow int64.
        size = min(attention_chunk, most + 1)
        start = position - position % size
        first, last = start.clamp(min=0), torch.minimum(last, start + size).clamp(min=0)
    return torch.stack([torch.minimum(first, last), last], -1)


def check_lengths(name: str, lengths: object, room: Tensor) -> Tensor:
    """Lengths (B,) int32 as int64; ValueError unless each is between 0 and its sequence's ``room``."""
    check_int32(name, lengths, tuple(room.shape))
    assert isinstance(lengths, Tensor)
    found = lengths.long()
    if ((found < 0) | (found > room)).any():
        raise WrongValueError(
            f"pyattn: each of {name} must be between 0 and its sequence's room, {room.tolist()}, got {found.tolist()}"
        )
    return found
