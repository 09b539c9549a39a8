"""Jagged nested tensors, and the formula's results for their sequences one by one."""

from collections.abc import Sequence
from typing import Any

import torch
from support.packed import starts
from torch import Tensor

from pyattn import reference

LENGTHS = 3, 17, 0, 5
"""Lengths of the sequences; one is empty."""


def jagged(values: Tensor, offsets: Tensor) -> Any:
    """(tokens, heads, D) -> (B, heads, j, D)."""
    return torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)


def drawn(
    lengths: Sequence[int] = LENGTHS, keys: Sequence[int] | None = None, dtype: torch.dtype = torch.float64
) -> tuple[Any, Any, Any]:
    """q with 4 heads, k and v with 2, values that require gradients."""
    offsets = starts(lengths)
    others = offsets if keys is None else starts(keys)
    sizes = ((sum(lengths), 4, 8, offsets), *((sum(keys or lengths), 2, dim, others) for dim in (8, 6)))
    q, k, v = (jagged(torch.randn(*size, dtype=dtype).requires_grad_(), at) for *size, at in sizes)
    return q, k, v


def ranges(lengths: Sequence[int], keys: Sequence[int], count: int = 1) -> Tensor:
    """Random ranges (tokens, 2), or (tokens, count, 2), counted within each sequence."""
    rows = [torch.randint(n + 1, (m, 2 * count)).sort(-1).values for m, n in zip(lengths, keys, strict=True)]
    return torch.cat(rows) if count == 1 else torch.cat(rows).unflatten(-1, (count, 2))


OWN_DIMS = {"alibi_slopes": 2, "relative_bias": 3, "q_offset": 1}
"""How many dimensions these have if each sequence has its own."""


def each(q: Any, k: Any, v: Any, **options: Any) -> list[tuple[Tensor, ...]]:
    """out, lse, max_score and weights of the formula, a batch of one for each sequence."""
    begins, found = q.offsets().tolist(), []
    # torch's unbind has no second derivative.
    split = (t.values().split(t.offsets().diff().tolist(), 1) for t in (q, k, v))
    for b, qkv in enumerate(zip(*split, strict=True)):
        own = dict(options)
        for name, dims in OWN_DIMS.items():
            if isinstance(own.get(name), Tensor) and own[name].dim() == dims:
                own[name] = own[name][b, None]
        if "key_ranges" in own:
            own["key_ranges"] = own["key_ranges"][None, begins[b] : begins[b + 1]]
        returned = {"return_lse": True, "return_max_score": True, "return_weights": True}
        found.append(reference.attention(*(t[None] for t in qkv), **returned, **own))
    return found


def one_by_one(q: Any, k: Any, v: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """out (tokens, Hq, Dv), lse (Hq, tokens) and max_score (B, Hq) of the formula, sequence by sequence."""
    out, lse, most, _ = zip(*each(q, k, v, **options), strict=True)
    return torch.cat([t[0].transpose(0, 1) for t in out]), torch.cat([t[0] for t in lse], 1), torch.cat(most)


KEYS = 4, 9, 2, 5
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"causal": False, "window": (3, 1), "softmax_scale": 0.2},
    "scores": {"softcap": 1.5, "alibi_slopes": torch.rand(4, 4), "sinks": torch.randn(4)},
    "offset": {"q_offset": torch.tensor([0, 2, 0, -1]), "alibi_slopes": torch.rand(4)},
    "ranges": {"causal": False, "key_ranges": ranges(LENGTHS, KEYS)},
    "intervals": {"key_ranges": ranges(LENGTHS, KEYS, 3)},
    "all": {
        "q_offset": torch.tensor([1, 0, 2, 0]),
        "window": (6, 2),
        "key_ranges": ranges(LENGTHS, KEYS),
        "softcap": 2.0,
        "alibi_slopes": torch.rand(4, 4),
        "relative_bias": torch.randn(4, 4, 7),
        "sinks": torch.randn(4),
    },
}
