"""``torch.nn.attention.varlen.varlen_attn`` on the CPU, where torch has no kernel for it.

torch lets a library provide the kernels (``torch.nn.attention.register_flash_attention_impl``). :func:`register` enters
this library under the name PYATTN, and it works from :func:`activate` to :func:`remove`::

    from pyattn.adapters import torch_varlen
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    torch_varlen.activate()
    lengths = cu_seqlens, cu_seqlens, 54, 54
    out, lse = varlen_attn(q, k, v, *lengths, window_size=(-1, 0), return_aux=AuxRequest(lse=True))

q (total_q, Hq, D), k and v (total_k, Hkv, D) in float32, bfloat16 or float16; out like q; lse (Hq,
total_q) in float32. ``window_size`` is as in flash-attention, the last query being at the last key,
and (-1, 0) is causal. ``scale``, ``enable_gqa``, ``seqused_k`` and ``block_table`` are honoured, as
far as the version of torch has them. Any ``num_splits`` gives what torch promises for 1: out and
lse of a sequence have the same bits whatever else is in the batch. Backward starts from lse, so
each weight has a relative error of 2 eps |lse|, and torch passes on no gradient of lse itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention as torch_attention

from pyattn import attention_varlen, ops
from pyattn.adapters.dispatcher import Kernels
from pyattn.locks import Lock
from pyattn.options import LEARNED, UNBOUNDED, Options, Packing
from pyattn.options.autocast import without

__all__ = ["NAME", "activate", "register", "remove"]

NAME = "PYATTN"
"""The implementation's name in torch's table."""


_lock = Lock()


def register() -> None:
    """Enters :data:`NAME` in torch's table, so ``torch.nn.attention.activate_flash_attention_impl(NAME)`` works.

    Raises:
        ImportError: a torch that has no such table.
    """
    if not hasattr(torch_attention, "register_flash_attention_impl"):
        raise ImportError(
            "pyattn: torch must have torch.nn.attention.register_flash_attention_impl for varlen_attn on the CPU, "
            f"got torch {torch.__version__}"
        )
    torch_attention.register_flash_attention_impl(NAME, register_fn=_kernels)


def activate() -> None:
    """Makes ``varlen_attn`` and ``varlen_attn_out`` work on the CPU, in the whole process; twice is harmless.

    torch has one active implementation, so activating this one resets another, such as FA4 for GPUs, to the default.

    Raises:
        ImportError: as for :func:`register`.
    """
    with _lock:  # one activates it, the others find it active
        register()
        if torch_attention.current_flash_attention_impl() != NAME:
            torch_attention.activate_flash_attention_impl(NAME)


def remove() -> None:
    """Undoes :func:`activate`. Another active implementation stays."""
    with _lock:
        register()
        if torch_attention.current_flash_attention_impl() == NAME:
            torch_attention.restore_flash_attention_impl()


def _kernels() -> Kernels:
    """The registered kernels; torch calls ``remove()`` on them."""
    functions: dict[tuple[str, str], Callable[..., Any]] = {
        ("aten::_flash_attention_forward", "CPU"): _forward,
        ("aten::_flash_attention_backward", "CPU"): _backward,
    }
    if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):
        functions["aten::_flash_attention_forward_no_dropout_inplace", "CPU"] = _forward_into
    return Kernels(functions, {})


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``aten::_flash_attention_forward``: out, lse, and three tensors that only dropout uses."""
    _check(query, value, dropout_p, return_debug_mask)
    if cum_seq_q is None:
        raise NotImplementedError("pyattn: cu_seq_q must be given (pyattn.attention takes dense batches), got None")
    if block_table is not None:
        if seqused_k is None:
            raise ValueError("pyattn: block_table must come with seqused_k, got None")
        cum_seq_k, seqused_k = torch.nn.functional.pad(seqused_k.cumsum(0), (1, 0)), None
    if cum_seq_k is None:
        raise ValueError("pyattn: cu_seq_k must be given unless block_table and seqused_k are, got None")
    causal, window = _mask(is_causal, window_size_left, window_size_right)
    options: dict[str, Any] = {"alibi_slopes": alibi_slopes, "block_table": block_table, "seqused_k": seqused_k}
    options |= {"causal": causal, "window": window, "softmax_scale": scale}
    packing = cum_seq_q, cum_seq_k, max_q, max_k
    with without(query.device):  # torch's operator has no autocast: out has query's dtype, as backward expects
        out, lse = attention_varlen(query, key, value, *packing, return_lse=True, **options)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), query.new_empty(0)


def _forward_into(out: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """``aten::_flash_attention_forward_no_dropout_inplace``: fills ``out`` and returns lse."""
    result, lse, *_ = _forward(*arguments, **named)
    if out.shape != result.shape or out.dtype != result.dtype:
        raise ValueError(
            f"pyattn: out must be {result.dtype} of shape {tuple(result.shape)}, "
            f"got {out.dtype} of shape {tuple(out.shape)}"
        )
    out.copy_(result)
    return lse


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::_flash_attention_backward``: dq, dk, dv. lse takes the place of row_max, with row_sum 1."""
    _check(query, value, dropout_p, False)
    causal, window = _mask(is_causal, window_size_left, window_size_right)
    packing = Packing(cum_seq_q, cum_seq_k, max_q, max_k)
    options = Options(softmax_scale=scale, causal=causal, window=window)
    rows = grad_out, None, query, key, value, out, logsumexp, torch.ones_like(logsumexp)
    wanted = (False,) * len(LEARNED)
    dq, dk, dv, *_ = ops.attention_varlen_backward(*rows, *packing, *options, True, wanted, True)
    return dq, dk, dv


def _check(query: Tensor, value: Tensor, dropout_p: float, return_debug_mask: bool) -> None:
    """Refuses what torch's shapes and dtypes, declared for GPUs, can't represent."""
    if query.dtype == torch.float64:
        raise TypeError(
            "pyattn: query must be float32, bfloat16 or float16, as torch's lse is float32 (attention_varlen takes "
            f"float64), got {query.dtype}"
        )
    if value.shape[-1] != query.shape[-1]:
        raise NotImplementedError(
            "pyattn: value must have query's head dimension in torch's varlen_attn (not in attention_varlen), "
            f"got {value.shape[-1]} and {query.shape[-1]}"
        )
    if dropout_p:
        raise NotImplementedError(f"pyattn: dropout_p must be 0 in torch's varlen_attn, got {dropout_p}")
    if return_debug_mask:
        raise NotImplementedError(f"pyattn: return_debug_mask must be False, got {return_debug_mask}")


def _mask(is_causal: bool, left: int | None, right: int | None) -> tuple[bool, tuple[int, int]]:
    """torch's mask as ``causal`` and ``window``: None and -1 mean no bound, and (-1, 0) is causal."""
    left, right = -1 if left is None else left, -1 if right is None else right
    causal = is_causal or (left, right) == (-1, 0)
    return causal, UNBOUNDED if causal and left == -1 else (left, right)
