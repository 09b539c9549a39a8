"""Promise: leading dimensions that do not broadcast are refused with an error that names the shapes."""

import pytest
import torch
from support.assertions import refused

from pyattn import attention


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": (2, 2, 2, 7, 2)}, "q and k and v must have dimensions before the last three that broadcast, got q (2, "),
        (
            {"v": (2, 7, 2)},
            "q and k and v must have at least 4 dimensions (..., num_heads, seqlen, head_dim), got q (2",
        ),
        (
            {"bias": (3, 1, 4, 5, 7)},
            "leading dimensions of bias must broadcast to (2, 3), those of q, k and v, got (3, ",
        ),
        ({"bias": (1, 2, 3, 4, 5, 7)}, "bias must have at most 5 dimensions beside leading dimensions (2, 3) of q, k "),
        (
            {"alibi_slopes": (2, 4)},
            "leading dimensions of alibi_slopes must broadcast to (2, 3), those of q, k and v, ",
        ),
        ({"sinks": (2, 3, 4)}, "sinks must have"),
        ({"q_offset": (2,)}, "leading dimensions of q_offset must broadcast to (2, 3), those of q, k and v, got (2,) "),
        (
            {"key_ranges": (1, 5, 2, 2)},
            "leading dimensions of key_ranges must broadcast to (2, 3), those of q, k and v",
        ),
    ],
)
def test_refusals(changes: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = {"q": (2, 3, 4, 5, 2), "k": (2, 3, 2, 7, 2), "v": (2, 3, 2, 7, 2)} | changes
    whole = ("q_offset", "key_ranges")
    given = {name: torch.zeros(shape, dtype=torch.int64 if name in whole else None) for name, shape in shapes.items()}
    with refused(ValueError, message):
        attention(**given)


def test_three_dimensions_are_refused() -> None:
    q = torch.randn(4, 5, 2)
    with refused(ValueError, "q, k and v must have 4 dimensions (batch, num_heads, seqlen, head_dim), got q [4, 5, 2]"):
        attention(q, q, q)


def test_operators_take_four_dimensions() -> None:
    q, k, v = torch.randn(2, 4, 5, 2), torch.randn(2, 2, 7, 2), torch.randn(2, 2, 7, 2, 1)
    for changes in ({"q": q[None]}, {"k": k[None]}, {"v": v}):
        with refused(ValueError, "must have 4 dimensions", inside=True):
            torch.ops.pyattn.attention_forward(**{"q": q, "k": k, "v": k} | changes)
    with refused(ValueError, "v must have shape [4, 2, 7, 1], got [4, 7, 2, 1]"):
        attention(q, k, v)
