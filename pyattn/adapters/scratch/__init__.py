"""Attention written out by hand, computed by pyattn: models stay as they are.

Scores by ``@``, ``matmul``, ``bmm``, ``baddbmm`` or ``einsum``, then scale, softcap, biases and masks, softmax, dropout
and the product with the values are recorded while the model's own code runs, and become one call of
:func:`pyattn.attention`. Whatever else happens to scores or weights is computed as it is written::

    from pyattn.adapters import scratch

    scratch.convert(model)      # in place; gradients, checkpoints, autocast, DDP and torch.compile work as before
    train(model)
    print(scratch.counts())     # products of queries and keys that were taken, and those left, by reason
    scratch.revert(model)
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from torch import nn
from typing_extensions import ParamSpec

from pyattn.adapters.scratch.call_counts import Counts, counts, reset_counts
from pyattn.adapters.scratch.modules import add_hooks, remove_hooks
from pyattn.adapters.scratch.recognition import Recognition, recognized, running
from pyattn.adapters.scratch.recording.session import Session

__all__ = ["Counts", "convert", "counts", "disable", "enable", "enabled", "explain", "reset_counts", "revert"]

Model = TypeVar("Model", bound=nn.Module)
P = ParamSpec("P")
T = TypeVar("T")


def convert(model: Model) -> Model:
    """Switches recognition on within the forward of ``model``, in place, and returns it.

    A product of queries and keys that becomes attention::

        scores   q @ k.transpose(-2, -1), torch.matmul, bmm, baddbmm, einsum of two operands with any letters; 2 to 5
                 dimensions; leading dimensions may broadcast (grouped heads) and be folded by views; in training and
                 in compiled graphs, heads repeated by repeat_interleave or expand and reshape are taken back to groups
        then     * and / by numbers, and by tensors that are the same for all pairs of a head (a learned temperature);
                 c * tanh(scores / c); + and - of masks and biases, with their gradients, also in views that split or
                 join queries and keys; masked_fill, where, tril,
                 triu and scores[..., mask] = number; casts; also in place; last, less the maximum of each row, or a
                 column of sinks by cat
        weights  softmax over keys, in every spelling, also exp(scores - maximum) over its sums, exp(scores) over its
                 sums where it can't overflow, with masks of the exponentials, and exp of log_softmax; without the
                 column of sinks; nan_to_num to 0; casts; dropout (drawn like ``attention``'s ``dropout_seed``); * and /
                 by numbers, and by tensors that are the same for all keys (a head mask, a gate)
        out      weights @ v, torch.matmul, bmm, einsum; v.mT @ weights.mT
        order    dimensions of scores and weights permuted, keys first as in k @ q.mT with softmax over dimension -2

    Everything else, such as ReLU, top-k, another normalization or a product without a softmax, is computed by torch,
    with the same bits and gradients. Weights that are read as well (printed, returned, pooled) are computed when
    they are read. The result of attention differs from the plain code's by rounding, with three exceptions: dropout
    draws other weights under the same seed, NaN or infinite values at masked keys never reach the result, and
    products that overflow before their scale, above all in 16 bits, do not.

    Masks of -inf hide keys. Fills and sums of finite numbers (``-1e9``, ``finfo.min``) hide them where the numbers in
    q and k prove that their weights are 0; otherwise a sum is a bias, and a fill stays plain code, as do rows in
    which no key is visible. Products of fewer than 524,288 scores stay plain code, which is as fast.

    The first forward finds the modules that hold an attention; later ones watch only these. Call ``convert`` again
    if the model's code then takes other ways. Copies and pickles of a converted model are converted, too. Tensors that
    change between the product with the keys and that with the values are noticed if torch changes them, or hands out
    their memory meanwhile. Arrays, storages and pointers taken before must not change them there.

    ``torch.compile`` takes the attention of a converted model, compiled whole or in parts, into its graphs, under any
    backend. Fills with finite numbers find out there at run time which keys have weights, also beside sums, for 128
    queries or more. After ``nan_to_num``, NaN in q or k also reaches the gradient of v there. ``torch.export``,
    ``torch.jit.trace`` and transforms of ``torch.func`` see the plain code.

    Args:
        model: any module. Its modules get forward hooks; nothing else changes, and nothing outside of it.

    Returns:
        ``model``.

    >>> import torch
    >>> class Attention(nn.Module):
    ...     def forward(self, q, k, v):
    ...         scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    ...         hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    ...         return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
    >>> reset_counts()
    >>> out = convert(Attention())(*torch.randn(3, 2, 4, 256, 64).unbind())
    >>> counts()
    Counts(taken=1, left={})
    """
    revert(model)
    add_hooks(model)
    return model


def revert(model: Model) -> Model:
    """Undoes :func:`convert`, in place, and returns ``model``."""
    for module in model.modules():
        remove_hooks(module)
    return model


def enabled() -> AbstractContextManager[None]:
    """Recognition within a block of code, in this thread, for functions that are not in a module's forward.

    Weights that are still alive at the end of the block are computed there.
    """
    return recognized()


def enable() -> None:
    """Switches recognition on in this thread until :func:`disable`. Enabling it twice is harmless."""
    if not running.sessions:
        running.enabled = Recognition(Session())
        running.enabled.__enter__()


def disable() -> None:
    """Undoes :func:`enable`. Modes of torch entered since stay on."""
    mode, running.enabled = running.enabled, None
    if mode is not None:
        mode.__exit__(None, None, None)
        mode.session.end()


def explain(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls ``function`` with recognition on and prints what became of each product of queries and keys.

    Args:
        function: a function or a module; its products of three or more dimensions are listed.
        args: its arguments.
        kwargs: its arguments by name.

    Returns:
        The result of ``function``.

    >>> import torch
    >>> x = torch.randn(2, 4, 256, 64)
    >>> _ = explain(lambda: (x @ x.transpose(-2, -1)).softmax(-1) @ x)
    (2, 4, 256, 64) x (2, 4, 256, 64), float32: attention
    >>> _ = explain(lambda: (x @ x.transpose(-2, -1)).clamp(-1, 1).softmax(-1) @ x)
    (2, 4, 256, 64) x (2, 4, 256, 64), float32: left (clamp)
    """
    session = Session(learning=True)
    try:
        with Recognition(session):
            out = function(*args, **kwargs)
    finally:
        session.end()
    for product in session.history:
        print(product)
    return out
