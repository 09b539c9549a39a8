"""The public attention function over batches, a thin layer over :mod:`pyattn.derivatives.autograd`."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from pyattn.derivatives import autograd
from pyattn.derivatives.tangents import DENSE
from pyattn.derivatives.transforms import check_not_nested, transforming
from pyattn.leading_dimensions import by_batches
from pyattn.options.attention_options import AttentionOptions
from pyattn.options.autocast import cast
from pyattn.options.checks import check_tensor, refuse_positional
from pyattn.options.dropout import dropout_mask
from pyattn.options.parse import parse, takes_options
from pyattn.options.polarity import warn_if_all_hidden
from pyattn.options.schema import Options
from pyattn.options.tensor_types import CONTEXTS, taken
from pyattn.weights.max_score import of_heads, with_largest_scores

__all__ = ["attention", "dropout_mask"]


@takes_options
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *positional: object,
    return_lse: bool = False,
    return_max_score: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, ...]:
    """Exact scaled dot-product attention, causal by default.

    For each batch, query head ``h`` and query ``i``, with ``j`` running over the keys that query ``i`` sees::

        score_ij = softmax_scale * <q_i, k_j>
        score_ij = softcap * tanh(score_ij / softcap)                                   if softcap > 0
        score_ij = score_ij + bias_ij + relative_bias_h(d) - alibi_slopes_h |d|         d = j - (i + q_offset)
        lse_i = log(sum_j exp(score_ij) + exp(sinks_h))                                 second term only with sinks
        out_i = sum_j dropout(exp(score_ij - lse_i)) v_j

    Query ``i`` is at key position ``i + q_offset``. It sees key ``j`` if every mask that you pass lets it:
    ``causal`` (``j <= i + q_offset``), ``window``, ``key_ranges``, ``mask`` and ``bias``. 1 = takes part::

        seqlen_q 2, seqlen_k 4     q_offset = 2 (default)     q_offset = 0 (upper left)
                                   1 1 1 0                    1 0 0 0
                                   1 1 1 1                    1 1 0 0

        seqlen 5       window=(1, -1)     causal=False,        causal=False, key_ranges=
                                          window=(1, 2)        [[0, 2], [0, 2], [2, 5], [2, 5], [3, 3]]
                       1 0 0 0 0          1 1 1 0 0            1 1 0 0 0
                       1 1 0 0 0          1 1 1 1 0            1 1 0 0 0
                       0 1 1 0 0          0 1 1 1 1            0 0 1 1 1
                       0 0 1 1 0          0 0 1 1 1            0 0 1 1 1
                       0 0 0 1 1          0 0 0 1 1            0 0 0 0 0

    Args:
        q: (B, Hq, Sq, D), float64, float32, bfloat16 or float16. It may have any strides; it is copied only if its
            last dimension is not contiguous. A ``(B, S, H, D).transpose(1, 2)`` view is as fast as a contiguous tensor.
            More than one leading dimension: see below.
        k: (B, Hkv, Sk, D), Hq a multiple of Hkv: query head ``h`` reads KV head ``h // (Hq // Hkv)``.
        v: (B, Hkv, Sk, Dv).
        options: each one is described below.
        return_lse: also return lse.
        return_max_score: also return max_score, after lse.

    Returns:
        ``out`` (B, Hq, Sq, Dv) in q's dtype. It is dense in memory: columns are innermost, and the other dimensions are
        in q's order; leading dimensions over which the kernels run one after another (see below) are outermost. With
        ``return_lse``, ``(out, lse)``: lse (B, Hq, Sq) is float32, or float64 for float64 inputs. Both are
        differentiable in q, k, v, bias, alibi_slopes, sinks and relative_bias; each gradient has its tensor's dtype and
        shape. A query that sees no key has out 0, lse -inf (with sinks, its head's sink) and gradient 0.
        Masked keys never affect the result, even if they hold NaN; NaN and infinities in visible keys propagate. 16-bit
        inputs are accumulated in float32 and rounded once.

        With ``return_max_score``, ``(out, max_score)`` or ``(out, lse, max_score)``: max_score (B, Hq), in lse's dtype,
        is the largest ``score_ij`` of a visible key of each head, sinks and dropout apart; -inf if no key is visible,
        NaN if a visible score is NaN or inf. It is not differentiable. It comes from the kernels' row maxima, with the
        rounding error of lse, without another pass over the keys. With sinks, these are merged into out and lse
        afterwards: the two then agree with a call without max_score up to rounding, otherwise in all bits.

    A call with a ``mask`` in which no query sees a key, although there are keys, warns once in a process: masks of
    other libraries are often True where a key is hidden. Parts of a call, which ask for lse, and GPUs don't warn.

    Raises:
        ValueError: shapes that don't fit together, a softmax_scale or softcap that is not finite, a window bound below
            -1, key_ranges out of bounds or unsorted (a GPU clamps them unless PYATTN_CHECK=1 is in the environment),
            an int beyond 64 bits, a dropout_p outside [0, 1); at the first call, an instruction set in the environment
            variable PYATTN_ISA that this CPU or build does not have.
        TypeError: an unsupported dtype; dtypes that differ; an argument of another type than listed, for example a bool
            for a number; an argument that does not exist, for example ``is_causal``. The message names the right one.
        NotImplementedError: tensors that are not dense or are on a device for which this build has no kernels; a head
            dimension above 256 on a GPU; third derivatives, when you compute them.

    q, k and v may have more leading dimensions, (..., H, S, D), which broadcast among them; out, lse and max_score have
    all of these in place of B. An option with a B has any that broadcast to them: a bias that N sequences share is
    (B, 1, H, S, S) beside q (B, N, H, S, D). It is read in place, its gradient has its own shape, and memory stays
    linear; the kernels then run B times. ``key_ranges`` with n intervals need all leading dimensions. Dropout draws as
    for one batch that holds all sequences in their order.

    q, k and v may all be jagged nested tensors (B, heads, j, head_dim). They are computed as packed sequences, with the
    options of :func:`pyattn.attention_varlen`; k and v share their offsets, which need not be q's, and key_ranges are
    jagged (B, j, 2) with q's offsets, or (tokens, 2). out (B, Hq, j, Dv) and lse (B, Hq, j) have the offsets of q.
    Transforms of torch.func refuse them.

    Under autocast, q, k, v and bias are cast first unless they are float64. The result has the same bits in every run
    and for any number of threads; on a GPU, :func:`pyattn.set_deterministic` can waive this for dq.
    :func:`pyattn.set_row_invariant` makes the bits of a row independent of the rows and sequences beside it. Forward
    and backward need extra memory that is linear in the sequence lengths. If no query of a block sees any key of
    another block, the pair of blocks is skipped.

    ``torch.onnx.export`` exports attention as ONNX operators, without dropout: see :mod:`pyattn.ops.onnx`.
    ``torch.jit.trace`` records it without gradients; ``torch.jit.script`` raises NotImplementedError.

    First derivatives run in native code. Second derivatives and forward mode run as torch operations over blocks of
    query rows (:mod:`pyattn.derivatives.tangents`). They also need only linear memory, but they compute all keys,
    including masked ones.

    Sources: Vaswani et al. 2017, equation 1; blocks as in Dao et al. 2022 (FlashAttention), algorithms 1 and 4; windows
    as in Beltagy et al. 2020 (Longformer), softcap as in Gemma Team 2024 (Gemma 2), relative_bias as in Raffel et al.
    2020 (T5), ALiBi as in Press et al. 2022, sinks as in Xiao et al. 2024 and OpenAI 2025 (gpt-oss).

    >>> q = torch.randn(2, 8, 100, 64, requires_grad=True)
    >>> k, v = torch.randn(2, 2, 2, 100, 64)
    >>> attention(q, k, v).shape
    torch.Size([2, 8, 100, 64])
    >>> attention(q, k, v, window=(15, 0), softcap=50.0, sinks=torch.zeros(8)).shape
    torch.Size([2, 8, 100, 64])
    >>> q, k, v = torch.randn(3, 2, 16, 4, 20, 32)  # triangle attention: a bias for the 16 rows of each batch
    >>> attention(q, k, v, causal=False, bias=torch.randn(2, 1, 4, 20, 20)).shape
    torch.Size([2, 16, 4, 20, 32])
    """
    if positional:
        refuse_positional(attention, positional)
    if CONTEXTS:
        return CONTEXTS[-1](q, k, v, return_lse=return_lse, return_max_score=return_max_score, **options)
    if not (type(q) is type(k) is type(v) is Tensor):
        if not torch.compiler.is_compiling() and transforming():
            check_not_nested(q=q, k=k, v=v)
        returned = {"return_lse": return_lse, "return_max_score": return_max_score}
        if (result := taken("attention", q, k, v, **returned, **options)) is not None:
            return result
        check_tensor("q", q)
        check_tensor("k", k)
        check_tensor("v", v)
    known = parse(attention, options, q.device) if options else ()
    if torch._C._is_any_autocast_enabled():
        q, k, v = cast(q), cast(k), cast(v)
    leading = q.dim() > 4 or k.dim() > 4 or v.dim() > 4
    if return_max_score or leading:
        call = _with_max_score if return_max_score else _attend
        if leading:
            out, lse, *max_score = by_batches(call, {"q": q, "k": k, "v": v}, Options(*known))
        else:
            out, lse, *max_score = call(q, k, v, known)
        if return_max_score:
            return (out, lse, *max_score) if return_lse else (out, *max_score)
    elif return_lse or (known and options.get("mask") is not None):
        out, lse, _, _ = autograd.attend(DENSE, q, k, v, known)
    else:
        return autograd.attend_for_out(DENSE, q, k, v, known)
    if return_lse:  # a part of a call, which may be empty
        return out, lse
    if known and options.get("mask") is not None:
        warn_if_all_hidden(lse, k.shape[-2])
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> tuple[Tensor, ...]:
    out, lse, _, _ = autograd.attend(DENSE, q, k, v, options)
    return out, lse


def _with_max_score(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> tuple[Tensor, ...]:
    out, lse, largest = with_largest_scores(partial(autograd.attend, DENSE, q, k, v), options)
    return out, lse, of_heads(largest)
