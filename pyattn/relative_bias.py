"""Tables for the option ``relative_bias`` of :func:`pyattn.attention`: a value for each distance, in the models' forms.

Every function returns (H, 2 reach + 1): row ``h`` holds the values that are added to the scores of query head ``h``, in
the order of the distance ``d = j - i`` from query position i to key position j, from ``-reach`` (the key is before the
query) to ``reach``. Distances beyond the reach have the value at its end. They are differentiable in their tensors, so
a table that is computed from a parameter trains it; a parameter of that shape is a table itself.
"""

import math

import torch
from torch import Tensor

from pyattn.options.checks import check_names, check_size, check_tensor, check_type

__all__ = ["alibi", "buckets", "t5"]


@check_names
def t5(embedding: Tensor, *, bidirectional: bool, max_distance: int = 128) -> Tensor:
    """The relative bias of T5, whose distances share buckets that widen with the distance.

    ::

        table[h, d + max_distance] = embedding[buckets(d), h]

    Args:
        embedding: (num_buckets, H), the weight of T5's ``relative_attention_bias``, of any floating-point dtype.
        bidirectional: True for encoders: half of the buckets are for keys after the query. False for causal decoders:
            all keys after the query have the bucket of distance 0.
        max_distance: the last bucket begins at most here; T5's ``relative_attention_max_distance``. Default: 128.

    Returns:
        (H, 2 max_distance + 1) in the embedding's dtype, differentiable in it.

    Raises:
        ValueError: an embedding without 2 dimensions; sizes for which :func:`buckets` raises.
        TypeError: an argument of another type.

    Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer".

    >>> t5(torch.arange(8.0)[:, None], bidirectional=True, max_distance=6)[0].tolist()
    [3.0, 3.0, 3.0, 2.0, 2.0, 1.0, 0.0, 5.0, 6.0, 6.0, 7.0, 7.0, 7.0]
    """
    check_tensor("embedding", embedding)
    if embedding.dim() != 2:
        raise ValueError(f"pyattn: embedding must be (num_buckets, num_heads), got shape {tuple(embedding.shape)}")
    own = buckets(embedding.shape[0], bidirectional=bidirectional, max_distance=max_distance)
    return embedding[own.to(embedding.device)].mT


@check_names
def buckets(num_buckets: int, *, bidirectional: bool, max_distance: int = 128) -> Tensor:
    """The bucket of T5 for each distance from ``-max_distance`` to ``max_distance``.

    Per direction there are n buckets, ``num_buckets // 2`` if bidirectional. The distances below n / 2 have one each;
    from there on, bucket ``n / 2 + floor(log(d / (n / 2)) / log(max_distance / (n / 2)) n / 2)``, at most n - 1.

    Args:
        num_buckets: at least 2, bidirectional at least 4.
        bidirectional, max_distance: as for :func:`t5`; max_distance is above ``n / 2``.

    Returns:
        int64 (2 max_distance + 1,).

    Raises:
        ValueError: sizes that are too small.
        TypeError: an argument of another type.

    >>> buckets(4, bidirectional=False, max_distance=4).tolist()
    [3, 3, 2, 1, 0, 0, 0, 0, 0]
    """
    check_type("bidirectional", bidirectional, bool)
    check_size("num_buckets", num_buckets, least=4 if bidirectional else 2)
    each = num_buckets // 2 if bidirectional else num_buckets
    exact = each // 2
    check_size("max_distance", max_distance, least=exact + 1)
    ahead = torch.arange(-max_distance, max_distance + 1)
    far = ahead.abs() if bidirectional else -ahead.clamp(max=0)
    # As in T5's code, in float32: other dtypes put some distances into the bucket before.
    logarithm = torch.log(far.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (each - exact)
    wide = (exact + logarithm.long()).clamp(max=each - 1)
    found = torch.where(far < exact, far, wide)
    return found + each * (ahead > 0) if bidirectional else found


@check_names
def alibi(slopes: Tensor, reach: int) -> Tensor:
    """ALiBi as a table, ``-slope |d|``; the option ``alibi_slopes`` needs no reach and is as fast.

    Args:
        slopes: (H,), of any floating-point dtype.
        reach: at least 0; use the largest distance that occurs.

    Returns:
        (H, 2 reach + 1) in the slopes' dtype, differentiable in them.

    Raises:
        ValueError: a reach below 0, slopes without 1 dimension.
        TypeError: an argument of another type.

    Source: Press et al. 2022, "Train Short, Test Long".

    >>> alibi(torch.tensor([0.5]), reach=2).tolist()
    [[-1.0, -0.5, -0.0, -0.5, -1.0]]
    """
    check_tensor("slopes", slopes)
    if slopes.dim() != 1:
        raise ValueError(f"pyattn: slopes must have 1 dimension, got shape {tuple(slopes.shape)}")
    check_size("reach", reach, least=0)
    return -slopes[:, None] * torch.arange(-reach, reach + 1, device=slopes.device).abs()
