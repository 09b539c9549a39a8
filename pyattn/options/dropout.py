"""Dropout's random draws: Philox4x32-10 of a seed and a weight's position, the same bits as in the kernels.

Source: Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3".
"""

import torch
from torch import Tensor

from pyattn.options.checks import check_64_bits, check_names, check_probability, check_sizes, check_type


def _multiply_wide(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low words of the products of 32-bit words, all in int64."""
    low, high = a % 2**16 * b, (a >> 16) * b
    high = high + (low >> 16)
    return high >> 16, high % 2**16 * 2**16 + low % 2**16


def philox(seed: int | Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: a 64-bit key and a counter of four 32-bit words give four random 32-bit words, all in int64."""
    key0, key1 = seed % 2**32, (seed >> 32) % 2**32
    x0, x1, x2, x3 = counter
    for _ in range(10):
        (high0, low0), (high2, low2) = _multiply_wide(x0, 0xD2511F53), _multiply_wide(x2, 0xCD9E8D57)
        x0, x1, x2, x3 = high2 ^ x1 ^ key0, low2, high0 ^ x3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) % 2**32, (key1 + 0xBB67AE85) % 2**32
    return x0, x1, x2, x3


def dropout_threshold(dropout_p: float) -> int:
    """The smallest 16-bit draw whose weight is kept: dropout_p in units of 1/65536, at most 65535."""
    return min(round(65536 * dropout_p), 65535)


def dropout_factor(dropout_p: float) -> float:
    """The factor by which kept weights are scaled."""
    return 65536 / (65536 - dropout_threshold(dropout_p))


@check_names
def dropout_mask(
    seed: int | Tensor, batch: int, num_heads_q: int, seqlen_q: int, seqlen_k: int, dropout_p: float
) -> Tensor:
    """The weights that :func:`pyattn.attention` keeps when called with this ``dropout_seed`` and ``dropout_p``.

    Key ``j``, query ``i``, head ``h`` and sequence ``b`` draw 16 bits of :func:`philox` under ``seed`` at the counter
    ``(j // 8, i, low word, high word of b * num_heads_q + h)``: word ``(j % 8) // 2``, its low half for even ``j``. The
    weight is kept, and scaled by ``65536 / (65536 - t)``, if the draw is at least ``t = min(round(65536 dropout_p),
    65535)``.

    Args:
        seed: a 64-bit int or an int64 scalar tensor.
        batch, num_heads_q, seqlen_q, seqlen_k: the sizes of the weights.
        dropout_p: probability of dropping a weight, at least 0 and below 1.

    Returns:
        bool (batch, num_heads_q, seqlen_q, seqlen_k), True = kept, on the seed's device.

    Raises:
        ValueError: a dropout_p outside [0, 1), a seed past 64 bits or with dimensions, a size below 0, more weights
            than any memory holds.
        TypeError: any other type, a seed of another dtype.

    >>> dropout_mask(7, batch=1, num_heads_q=1, seqlen_q=2, seqlen_k=4, dropout_p=0.5).int().tolist()
    [[[[0, 1, 1, 1], [1, 0, 1, 0]]]]
    """
    check_type("seed", seed, int, Tensor)
    check_64_bits("seed", seed)
    if isinstance(seed, Tensor) and seed.dtype != torch.int64:
        raise TypeError(f"pyattn: seed must be int64, got {seed.dtype}")
    if isinstance(seed, Tensor) and seed.dim():
        raise ValueError(f"pyattn: seed must be a scalar, got shape {tuple(seed.shape)}")
    check_probability("dropout_p", dropout_p)
    check_sizes(batch=batch, num_heads_q=num_heads_q, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    device = seed.device if isinstance(seed, Tensor) else None
    head = torch.arange(batch * num_heads_q, device=device).view(batch, num_heads_q, 1)
    query = torch.arange(seqlen_q, device=device)
    return kept_weights(seed, head, query, torch.zeros_like(head), seqlen_k, dropout_p)


def kept_weights(
    seed: int | Tensor, head: Tensor, query: Tensor, key: Tensor, seqlen_k: int, dropout_p: float
) -> Tensor:
    """(..., seqlen_k): :func:`dropout_mask` of rows, from ``key`` on; head is ``b * num_heads_q + h``.

    head, query and key broadcast to (...); head and key have as many dimensions.
    """
    head, query, key = head.unsqueeze(-1), query.unsqueeze(-1), key.unsqueeze(-1)
    group = key // 8 + torch.arange(-(-(seqlen_k + 7) // 8), device=head.device)
    words = philox(seed, (group, query, head % 2**32, head >> 32))
    draws = torch.stack([half for word in words for half in (word % 2**16, word >> 16)], -1)
    place = key % 8 + torch.arange(seqlen_k, device=head.device)
    return draws.flatten(-2).take_along_dim(place, -1) >= dropout_threshold(dropout_p)


def kept_pairs(seed: int | Tensor, head: Tensor, query: Tensor, key: Tensor, dropout_p: float) -> Tensor:
    """The elements of :func:`dropout_mask` for pairs of a query and a key; head is ``b * num_heads_q + h``.

    All three broadcast to the shape of the result.
    """
    words = philox(seed, (key // 8, query, head % 2**32, head >> 32))
    place = key % 8
    word = torch.stack(words, -1).take_along_dim((place // 2).unsqueeze(-1), -1).squeeze(-1)
    return (word >> 16 * (place % 2)) % 2**16 >= dropout_threshold(dropout_p)


def draw_seed(device: torch.device | None = None) -> Tensor:
    """An int64 scalar drawn from the device's default generator, which ``torch.manual_seed`` seeds."""
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)
