"""A tensor for every option, made from its axes: one for each form that they allow."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from pyattn.options.axes import AXES

PUBLIC = [name for name in AXES if name not in ("q_offsets", "dropout_origins")]
"""The tensor options of the public functions: the operators' own are made from these."""


def of_axes(name: str, sizes: Mapping[str, int], broadcast: str = "", left_out: int = 0) -> Tensor:
    """A tensor for an option: of size 1 along ``broadcast`` where it may be, without ``left_out`` optional axes."""
    words = AXES[name].split()
    for word in [word for word in words if word.startswith("(")][:left_out]:
        words.remove(word)
    words = [word.strip("()") for word in words]
    shape = [1 if word.endswith("?") and word[0] in broadcast else sizes[word[0]] for word in words]
    if name == "key_ranges":
        ends = torch.randint(sizes["k"] + 1, (*shape[:2], 2 * (shape[2] if len(shape) == 4 else 1)))
        return ends.sort(-1).values.view(shape)
    if name == "mask":
        return torch.rand(shape) < 0.7
    if name in ("q_offset", "q_offsets"):
        return torch.randint(-1, 3, shape)
    if name == "dropout_origins":
        return torch.tensor([[2 * b, sizes["h"] + 2, 1, 5, 9] for b in range(shape[0])])
    if name == "dropout_seed":
        return torch.tensor(7)
    if name == "selected":
        return torch.randint(-1, sizes["k"], (*shape[:-1], 4))
    return torch.randn(shape, dtype=torch.float64)


def forms(name: str) -> Iterator[tuple[str, int]]:
    """``(broadcast, left_out)`` of every form of an option."""
    words = AXES[name].split()
    shared = "".join(word.strip("()")[0] for word in words if "?" in word)
    for left_out in range(sum(word.startswith("(") for word in words) + 1):
        yield from ((broadcast, left_out) for broadcast in dict.fromkeys(("", *shared, shared)))


def with_seed(name: str, tensor: Tensor) -> dict[str, object]:
    """The option by name, with dropout if it needs that."""
    return {name: tensor} | ({"dropout_p": 0.3} if name == "dropout_seed" else {})
