"""Attention of many answers to one prompt, whose keys and values are given once and never repeated."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from typing_extensions import Unpack

from pyattn.derivatives import autograd
from pyattn.derivatives.merge import merge
from pyattn.derivatives.tangents import DENSE
from pyattn.options.attention_options import AttentionOptions
from pyattn.options.autocast import cast
from pyattn.options.axes import AXES, dims_of, take
from pyattn.options.checks import check_tensor, refuse_positional
from pyattn.options.parse import parse, takes_options
from pyattn.options.polarity import warn_if_all_hidden
from pyattn.options.positions import explicit, shift
from pyattn.options.schema import Options
from pyattn.options.tensor_types import TAKERS, check_outside
from pyattn.prefix.answers import Answers, as_heads
from pyattn.weights.checks import check_call
from pyattn.weights.max_score import of_heads, with_largest_scores

__all__ = ["attention_with_prefix"]


@takes_options
def attention_with_prefix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    *positional: object,
    return_lse: bool = False,
    return_max_score: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, ...]:
    """:func:`pyattn.attention` of answers that share prompts: a prompt's keys precede those of each of its answers.

    With G prompts and B = G * n answers, answer ``b`` belongs to prompt ``b // n``. With the same options, the result
    equals, up to rounding, the following; but neither the prompt nor its gradient is ever repeated in memory::

        attention(q, cat([prefix_k.repeat_interleave(n, 0), k], 2), cat([prefix_v.repeat_interleave(n, 0), v], 2))

        prompt of 3, two answers of 2     prompt   answer 0     prompt   answer 1
                                          1 1 1    1 0          1 1 1    1 0
                                          1 1 1    1 1          1 1 1    1 1

    Use it to train on many answers to a prompt (GRPO), to score a beam, or to decode n samples. The queries of the
    prompt itself need one call of :func:`pyattn.attention` over the prompt alone.

    Args:
        q: (B, Hq, Sq, D), the answers' queries, with dtype and strides as for :func:`pyattn.attention`.
        k: (B, Hkv, Sk, D), the answers' own keys.
        v: (B, Hkv, Sk, Dv).
        prefix_k: (G, Hkv, P, D), the prompts' keys; B is a multiple of G.
        prefix_v: (G, Hkv, P, Dv).
        return_lse: also return lse.
        return_max_score: also return max_score, after lse.
        options: as for :func:`pyattn.attention` over P + Sk keys, those of the prompt first. So q_offset counts from
            the prompt's first key and is ``P + Sk - Sq`` by default, key_ranges and selected count the prompt's keys,
            and mask and bias have P + Sk columns. Answers of different lengths are padded on the right, prompts on the
            left, with key_ranges or mask. With the same seed, dropout drops the weights that it drops in the call over
            the repeated prompt.

    Returns:
        As for :func:`pyattn.attention`, differentiable also in prefix_k and prefix_v, whose gradients are summed over
        the answers.

    Raises:
        ValueError, TypeError, NotImplementedError: as for :func:`pyattn.attention`; prefix_k and prefix_v that do not
            fit k and v, a B that is not a multiple of G, q with other than 4 dimensions; nested tensors and DTensors.

    Attention over the prompt and over the own keys is computed apart and merged. Over the prompt, all its answers are
    heads of one sequence: a block of keys is read once for all of them. In these cases, the answers are computed one
    after another, and the prompt's gradient is summed in prefix_k's dtype: with dropout; if a bias differs between
    heads or answers; if a mask or selected keys differ between heads or, in their part over the prompt, between answers
    to one prompt; if key_ranges, in this part, or q_offset differ between answers to one prompt. Values are compared on
    a CPU alone: on a GPU, in transforms and in compiled graphs, whatever has a dimension B counts as different.
    The result has the same bits in every run and for any number of threads.

    Sources: Juravsky et al. 2024 (Hydragen), section 3.1; the merge as in :func:`pyattn.parts.merge`.

    >>> q, k, v = torch.randn(3, 16, 8, 20, 64)
    >>> prefix_k, prefix_v = torch.randn(2, 1, 8, 100, 64)
    >>> attention_with_prefix(q, k, v, prefix_k, prefix_v).shape
    torch.Size([16, 8, 20, 64])
    """
    if positional:
        refuse_positional(attention_with_prefix, positional)
    check_outside("attention_with_prefix")
    _check(q=q, k=k, v=v, prefix_k=prefix_k, prefix_v=prefix_v)
    known = Options(*parse(attention_with_prefix, options, q.device))
    if torch._C._is_any_autocast_enabled():
        q, k, v, prefix_k, prefix_v = (cast(t) for t in (q, k, v, prefix_k, prefix_v))
    length, own_length = prefix_k.shape[2], k.shape[2]
    _check_options(q, k, length + own_length, known)
    known = explicit(known, q.shape[0], q.shape[1], length + own_length - q.shape[2], q.device)
    over_own = shift(take(known, keys=slice(length, length + own_length)), 0, length, own_length)
    over_prefix = shift(take(known._replace(sinks=None), keys=slice(length)), 0, 0, length)
    compute = _with_max_score if return_max_score else _attend
    own = compute(q, k, v, over_own)
    shared = _over_prefix(compute, q, prefix_k, prefix_v, over_prefix)
    out, lse = merge(*shared[:2], *own[:2])
    if return_max_score:
        most = torch.maximum(shared[2], own[2])
        return (out, lse, most) if return_lse else (out, most)
    if return_lse:
        return out, lse
    if known.mask is not None:
        warn_if_all_hidden(lse, length + own_length)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, ...]:
    out, lse, _, _ = autograd.attend(DENSE, q, k, v, tuple(options))
    return out, lse


def _with_max_score(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, ...]:
    out, lse, largest = with_largest_scores(partial(autograd.attend, DENSE, q, k, v), options)
    return out, lse, of_heads(largest)


def _over_prefix(
    compute: Callable[..., tuple[Tensor, ...]], q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, ...]:
    """The results of ``compute`` for all answers over the prompts' k (G, Hkv, P, D) and v (G, Hkv, P, Dv)."""
    answers = Answers.of(q, len(k), k.shape[1])
    if answers.each <= 1:  # prompts without answers take no part
        return compute(q, k[: len(q)], v[: len(q)], options)
    if (together := as_heads(options, answers, k.shape[2])) is not None:
        return tuple(answers.unstacked(t) for t in compute(answers.stacked(q), k, v, together))
    parts = {}
    for name in AXES:
        tensor = getattr(options, name)
        if isinstance(tensor, Tensor) and "b" in (dims := dims_of(AXES[name], tensor)):
            parts[name] = answers.split(tensor, dims["b"])
    calls = []
    for number, one in enumerate(answers.split(q, -4)):
        own = options._replace(**{name: some[number] for name, some in parts.items()})
        calls.append(compute(one, k, v, own))
    return tuple(torch.stack(some, 1).flatten(0, 1) for some in zip(*calls, strict=True))


def _check(**tensors: Tensor) -> None:
    """Checks types, dtypes, devices and shapes but for those that the operator compares."""
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        if type(tensor) in TAKERS:
            raise NotImplementedError(
                f"pyattn: {name} must be a plain tensor in attention_with_prefix, got {type(tensor).__name__}"
            )
        if tensor.dim() != 4:
            raise ValueError(
                f"pyattn: {name} must have 4 dimensions (batch, num_heads, seqlen, head_dim), got shape "
                f"{tuple(tensor.shape)}"
            )
    q = tensors["q"]
    groups, _, length, _ = tensors["prefix_k"].shape
    for name in ("k", "v"):
        own, prefix = tensors[name], tensors[f"prefix_{name}"]
        shape = groups, own.shape[1], length, own.shape[3]
        if prefix.shape != shape:
            raise ValueError(f"pyattn: prefix_{name} must have shape {shape}, got {tuple(prefix.shape)}")
        if prefix.dtype != own.dtype and not torch._C._is_any_autocast_enabled():
            raise TypeError(f"pyattn: prefix_{name} must have {name}'s dtype, got {prefix.dtype} and {own.dtype}")
        if prefix.device != own.device:
            raise ValueError(f"pyattn: prefix_{name} must be on {name}'s device, got {prefix.device} and {own.device}")
    if len(q) % groups if groups else len(q):
        raise ValueError(
            f"pyattn: q's batch must be a multiple of that of prefix_k, got {len(q)} answers and {groups} prompts"
        )


def _check_options(q: Tensor, k: Tensor, seqlen_k: int, options: Options) -> None:
    """Checks the options against all keys: their parts would fit where the whole does not."""
    for name in ("mask", "bias"):
        tensor = getattr(options, name)
        if tensor is not None and tensor.dim() and tensor.shape[-1] not in (1, seqlen_k):
            raise ValueError(
                f"pyattn: the last dimension of {name} must be 1 or {seqlen_k}, the prefix and the own keys, got shape "
                f"{tuple(tensor.shape)}"
            )
    batch, heads, _, columns = k.shape
    check_call(q, k.new_empty(()).expand(batch, heads, seqlen_k, columns), None, options)
