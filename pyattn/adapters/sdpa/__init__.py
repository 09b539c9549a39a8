"""``torch.nn.functional.scaled_dot_product_attention`` by the native kernels, under torch's rules.

Use the function of this module, or the switch, after which torch's own function computes natively on the CPU::

    from pyattn.adapters import sdpa

    sdpa.enable()  # or: with sdpa.enabled(): ...
    train(model)
    print(sdpa.counts())  # calls taken, calls traced, and calls left to torch, by reason
    sdpa.disable()
"""

from torch import Tensor

from pyattn.adapters.sdpa.arguments import SdpaError, attend
from pyattn.adapters.sdpa.call_counts import Counts, counts, reset_counts
from pyattn.adapters.sdpa.switch import disable, enable, enabled, is_enabled

__all__ = [
    "Counts",
    "SdpaError",
    "counts",
    "disable",
    "enable",
    "enabled",
    "is_enabled",
    "reset_counts",
    "scaled_dot_product_attention",
]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """:func:`torch.nn.functional.scaled_dot_product_attention`, with its documented meaning of every argument.

    It differs from :func:`pyattn.attention` in its defaults and in ``is_causal``, whose mask is upper-left: query ``i``
    sees the keys up to ``i``, even if the lengths differ. 1 = takes part::

        is_causal, L 2, S 4     1 0 0 0      is_causal, L 4, S 2     1 0
                                1 1 0 0                              1 1
                                                                     1 1
                                                                     1 1

    Args:
        query: (..., Hq, L, E), float64, float32, bfloat16 or float16, at least 2 dimensions, any strides.
        key: (..., H, S, E). The dimensions before the last two broadcast among query, key and value.
        value: (..., H, S, Ev).
        attn_mask: broadcasts to (..., Hq, L, S). bool: True = takes part (the opposite of ``nn.MultiheadAttention``'s
            masks). query's dtype or float32: added to the scores; -inf hides the key. A bool mask whose rows are
            intervals costs only the pairs it leaves visible. ``torch.nn.attention.bias.causal_upper_left(L, S)`` and
            ``causal_lower_right(L, S)`` are taken without making a mask, and not together with ``is_causal``. Also, in
            this function only, ``pyattn.masks.KeyRanges`` (batches or 1, L, 2) or (batches or 1, L, n, 2), with
            ``is_causal`` unless they are the whole mask.
        dropout_p: probability of dropping a weight, 0 to 1, applied whenever it is above 0. The draws come from torch's
            generator, so ``torch.manual_seed`` repeats them; they are not those of torch's own function.
        is_causal: whether query ``i`` sees only the keys up to ``i``. Together with attn_mask, a key is visible if both
            show it.
        scale: finite factor on the scores; default ``1 / sqrt(E)``. In this function only, it may be a floating-point
            tensor of 0 dimensions, with a gradient: a learned temperature. It multiplies query, rounded to its dtype.
        enable_gqa: whether Hq may be a multiple of H: query head ``h`` reads KV head ``h // (Hq // H)``.

    Returns:
        (..., Hq, L, Ev) in query's dtype, differentiable in query, key, value, a float attn_mask and a tensor as scale.
        A query that sees no key, as in a row of False or -inf, gives 0 and gradients of 0, as in torch 2.13 on a CPU.

    Raises:
        SdpaError: shapes that don't fit, a CausalBias together with ``is_causal``, a dropout_p outside [0, 1], a number
            scale that is not finite, heads that enable_gqa does not group. It is both a ValueError and torch's
            RuntimeError.
        TypeError: other dtypes, dtypes that differ, types other than those listed.
        NotImplementedError: nested tensors, layouts and devices without kernels.

    >>> import torch
    >>> query, key, value = torch.randn(3, 2, 8, 100, 64)
    >>> scaled_dot_product_attention(query, key, value, is_causal=True).shape
    torch.Size([2, 8, 100, 64])
    >>> scaled_dot_product_attention(query, key[:, :2], value[:, :2], torch.rand(100, 100) < 0.5, enable_gqa=True).shape
    torch.Size([2, 8, 100, 64])
    """
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
