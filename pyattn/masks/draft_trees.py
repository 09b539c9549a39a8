"""Trees of drafted tokens: the bool mask of one, and its place among the slots of a cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyattn.options.checks import check_integers, check_names, check_type, has_values


@check_names
def tree(parents: Sequence[int] | Tensor) -> Tensor:
    """The mask of a tree of drafted tokens: a token sees itself and its ancestors.

    ``attention_with_cache(..., mask=tree(parents))`` checks all branches in one call: the tokens see the cached text
    before them, and of each other as drawn. A token's position in the text is its depth, ``mask.sum(-1) - 1``, after
    the text before the tree: rotary embeddings need it, because the place in the cache is another one. ::

        parents [-1, 0, 0, 1, 1]     0 ┬ 1 ┬ 3         1 . . . .
                                       │   └ 4         1 1 . . .
                                       └ 2             1 . 1 . .
                                                       1 1 . 1 .
                                                       1 1 . . 1

    Args:
        parents: each token's parent, an earlier token, or -1 for a root: ints or an int32 or int64 tensor (n,), or
            (B, n) for a tree of each sequence.

    Returns:
        bool (n, n), or (B, 1, n, n): True = token j takes part for token i.

    Raises:
        ValueError: a parent that is not an earlier token, the wrong number of dimensions.
        TypeError: any other type.

    Source: Miao et al. 2024, "SpecInfer", section 4.2; Cai et al. 2024, "Medusa", section 2.1.2.

    >>> tree([-1, 0, 0]).int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    check_type("parents", parents, Sequence, Tensor)
    batched = isinstance(parents, Tensor) and parents.dim() == 2
    up = check_integers("parents", parents, dims=2 if batched else 1)
    count = up.shape[-1]
    _check_parents(up)
    seen = torch.eye(count + 1, dtype=torch.bool, device=up.device).expand(*up.shape[:-1], -1, -1)[..., :-1]
    up = torch.cat([torch.where(up < 0, count, up), torch.full_like(up[..., :1], count)], -1)
    for _ in range(count.bit_length()):  # after n steps, a token knows its nearest 2^n ancestors
        seen = seen | seen.gather(-2, up.unsqueeze(-1).expand_as(seen))
        up = up.gather(-1, up)
    mask = seen[..., :-1, :]
    return mask.unsqueeze(1) if batched else mask


def _check_parents(parents: Tensor) -> None:
    """ValueError naming the first of ``parents`` that is no earlier token; no check if they can't be read."""
    if not has_values(parents):
        return
    wrong = (parents < -1) | (parents >= torch.arange(parents.shape[-1], device=parents.device))
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"pyattn: each of parents must be -1 or an earlier token, got {int(parents[tuple(at)])} at {at}"
        )


def behind_cache(mask: Tensor, first: Tensor, slots: int) -> Tensor:
    """A mask over the queries' own keys as one over all slots of a cache; every other key takes part.

    Args:
        mask: 1 to 4 dimensions that broadcast to (B, Hq, Sq, Sq).
        first: int64 (B,), the slot of the first query's own key.
        slots: the number of slots.

    Returns:
        (B, Hq or 1, Sq or 1, slots).
    """
    wide = mask[(None,) * (4 - mask.dim())]
    slot = first.unsqueeze(1) + torch.arange(wide.shape[3], device=mask.device)
    slot = torch.where((slot >= 0) & (slot < slots), slot, slots)  # column `slots` takes what lies outside
    wide = wide.expand(len(first), -1, -1, -1)
    around = mask.new_ones(*wide.shape[:3], slots + 1)
    return around.scatter(-1, slot[:, None, None].expand_as(wide), wide)[..., :slots]
