"""Checks of tensors, and the position of each sequence's queries among its keys."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pyattn.options.autocast import cast, cast_rows
from pyattn.options.checks import check_64_bits, check_between, check_integers, check_tensor, check_type

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_dense(name: str, tensor: Tensor, dims: str, dtypes: Sequence[torch.dtype] = FLOATS) -> None:
    """Errors unless it is a dense tensor of one of the dtypes, with the dimensions ``dims``, such as "(batch, n)"."""
    check_tensor(name, tensor)
    if tensor.layout is not torch.strided:
        raise NotImplementedError(f"pyattn: {name} must be a dense tensor, got layout {tensor.layout}")
    if tensor.dtype not in dtypes:
        known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
        raise TypeError(f"pyattn: {name} must have dtype {known}, got {tensor.dtype}")
    if tensor.dim() != dims.count(",") + 1:
        raise ValueError(f"pyattn: {name} must be {dims}, got shape {tuple(tensor.shape)}")


def check_device(name: str, tensor: Tensor, first: str, like: Tensor) -> None:
    """ValueError unless the tensor is on the device of ``like``, which is called ``first``."""
    if tensor.device != like.device:
        raise ValueError(f"pyattn: {name} must be on {first}'s device, got {tensor.device} and {like.device}")


def checked_indexer(q: Tensor, k: Tensor, weights: Tensor, prefix: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """An indexer's q (B, Hi, Sq, Di), k (B, Sk, Di) and weights (B, Hi, Sq), checked, in autocast's dtypes.

    Errors put ``prefix`` before their names. The weights may be float32 beside 16-bit q and k.
    """
    first, keys, factors = f"{prefix}q", f"{prefix}k", f"{prefix}weights"
    for name, tensor in ((first, q), (keys, k), (factors, weights)):
        check_tensor(name, tensor)
    q, k, weights = cast(q), cast(k), cast_rows(weights)
    check_dense(first, q, "(batch, indexer_heads, seqlen_q, indexer_dim)")
    check_dense(keys, k, "(batch, seqlen_k, indexer_dim)", [q.dtype])
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    check_dense(factors, weights, "(batch, indexer_heads, seqlen_q)", [q.dtype, wide])
    check_device(keys, k, first, q)
    check_device(factors, weights, first, q)
    if (k.shape[0], k.shape[2]) != (q.shape[0], q.shape[3]):
        raise ValueError(
            f"pyattn: {keys} must have {first}'s batch and indexer_dim, got {tuple(k.shape)} and {tuple(q.shape)}"
        )
    if weights.shape != q.shape[:3]:
        raise ValueError(f"pyattn: {factors} must have shape {tuple(q.shape[:3])}, got {tuple(weights.shape)}")
    return q, k, weights


def checked_heads(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Attention's q (B, Hq, Sq, D) and k (B, Hkv, Sk, D), checked, in the dtype that autocast gives."""
    check_tensor("q", q)
    check_tensor("k", k)
    q, k = cast(q), cast(k)
    check_dense("q", q, "(batch, num_heads_q, seqlen_q, head_dim)")
    check_dense("k", k, "(batch, num_heads_kv, seqlen_k, head_dim)", [q.dtype])
    check_device("k", k, "q", q)
    if (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]):
        raise ValueError(f"pyattn: k must have q's batch and head_dim, got {tuple(k.shape)} and {tuple(q.shape)}")
    if q.shape[1] % max(1, k.shape[1]) or (q.shape[1] and not k.shape[1]):
        raise ValueError(f"pyattn: num_heads_q must be a multiple of num_heads_kv, got {q.shape[1]} and {k.shape[1]}")
    return q, k


def constant(name: str, tensor: Tensor) -> Tensor:
    """The tensor without gradients and tangents, for a function that has integer results; not inside vmap."""
    inner, functorch = tensor, torch._C._functorch
    while not torch.compiler.is_compiling() and functorch.is_functorch_wrapped_tensor(inner):
        if functorch.is_batchedtensor(inner):
            raise NotImplementedError(
                f"pyattn: {name} must hold the batch as its first dimension, got a tensor that torch.func.vmap maps"
            )
        inner = functorch.get_unwrapped(inner)
    plain = tensor.detach()
    return forward_ad.unpack_dual(plain).primal if forward_ad._current_level >= 0 else plain


def lengths_of(k_lengths: Sequence[int] | Tensor | None, batch: int, seqlen_k: int) -> list[int]:
    """How many keys each sequence has; all of them by default."""
    if k_lengths is None:
        return [seqlen_k] * batch
    lengths = check_integers("k_lengths", k_lengths)
    if len(lengths) != batch:
        raise ValueError(f"pyattn: k_lengths must have shape ({batch},), got {tuple(lengths.shape)}")
    check_between("k_lengths", lengths, 0, seqlen_k)
    found: list[int] = lengths.tolist()
    return found


def offsets_of(q_offset: int | Tensor | None, seqlen_q: int, lengths: Sequence[int], beyond: int = 0) -> list[int]:
    """The key position of each sequence's query 0, by default that of the last ``seqlen_q`` keys.

    Offsets so small that no query sees a key, and so large that each sees every key and is ``beyond`` keys past the
    last one, are clamped: sums stay small.
    """
    if q_offset is None:
        return [length - seqlen_q for length in lengths]
    check_type("q_offset", q_offset, int, Tensor)
    if isinstance(q_offset, Tensor):
        given = check_integers("q_offset", q_offset)
        if len(given) != len(lengths):
            raise ValueError(f"pyattn: q_offset must have shape ({len(lengths)},), got {tuple(given.shape)}")
        offsets = given.tolist()
    else:
        check_64_bits("q_offset", q_offset)
        offsets = [q_offset] * len(lengths)
    return [max(-seqlen_q, min(length + beyond, offset)) for offset, length in zip(offsets, lengths, strict=True)]
