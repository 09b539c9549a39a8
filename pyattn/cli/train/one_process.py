"""The ranks of a training: one process here, which is all of them; :mod:`pyattn.cli.train.mesh` has several."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from pyattn.cli.gpt import GPT

AXES = ("data", "context", "tensor")
"""The dimensions of a mesh of ranks. Ranks of the last one, which exchange most, are neighbours."""

OPTIONS = tuple(f"{axis}_parallel" for axis in AXES)
"""The options that say how many ranks share each axis."""

BOUND = 1.0
"""GPT-3's bound on the norm of all gradients (Brown et al. 2020, appendix B)."""


class Alone:
    """A training in one process.

    Attributes:
        first: whether this process prints, and writes the files that one writes for all.
        many: whether there may be others.
    """

    first: bool = True
    many: bool = False

    def part(self, model: "GPT") -> "GPT":
        """This rank's part of a whole model, which it takes over."""
        return model

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of the weight ``name``, or of its moments."""
        return whole

    def total(self, share: Tensor) -> Tensor:
        """The sum of the ranks' shares of a number."""
        return share

    def sum_gradients(self, model: "GPT", loss: Tensor) -> Tensor:
        """Sums the gradients of ``model`` over the ranks, and returns the sum of their losses."""
        return loss

    def clip(self, model: "GPT") -> None:
        """Scales the gradients if the norm of all of them together is above ``BOUND``."""
        nn.utils.clip_grad_norm_(model.parameters(), BOUND)

    def write(self, run: Path, steps: int, tensors: dict[str, Tensor]) -> dict[str, str]:
        """Takes those ``tensors`` out that ranks write to a separate folder, and returns its name."""
        return {}

    def same(self, value: Any) -> Any:
        """The first rank's value."""
        return value

    @contextmanager
    def agreement(self, facts: Mapping[str, Any]) -> Iterator[None]:
        """An error of one rank within is raised on every rank, and so is a difference in ``facts``, read at the end."""
        yield
