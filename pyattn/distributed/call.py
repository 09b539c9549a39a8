"""The arguments of a call on several ranks: parsed, and those that all ranks must have in common."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from pyattn.arguments import check_tensor
from pyattn.autocast import cast
from pyattn.derivatives import autograd
from pyattn.ops.schema import Options
from pyattn.options import AttentionOptions
from pyattn.parse import parse

OWN_ROWS = ("key_ranges", "mask", "bias")
"""Options of which each rank has the rows of its own queries."""


class Inputs(NamedTuple):
    """A rank's tensors and options."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: Options

    @property
    def seed(self) -> int:
        """Dropout's seed on this rank, 0 without dropout."""
        return int(self.options.dropout_seed) if self.options.dropout_p else 0


def prepared(
    function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, dims: tuple[str, ...]
) -> Inputs:
    """The arguments checked, parsed and cast."""
    if autograd.transforming():
        raise NotImplementedError(f"pyattn: {function.__name__} has no rule for transforms of torch.func or forward mode")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
        if tensor.dim() != len(dims):
            raise ValueError(f"pyattn: {name} must be ({', '.join(dims)}), got shape {tuple(tensor.shape)}")
        if (tensor.dtype, tensor.device) != (q.dtype, q.device):
            raise TypeError(f"pyattn: {name} must be {q.dtype} on {q.device} like q, got {tensor.dtype} on {tensor.device}")
    known = Options(*parse(function, options, q.device))
    return Inputs(cast(q), cast(k), cast(v), known)


def with_seed(options: Options, seed: int) -> Options:
    """The options with rank 0's seed."""
    if not options.dropout_p:
        return options
    return options._replace(dropout_seed=options.dropout_seed.new_tensor(seed))


def facts_of(inputs: Inputs, dim: int, seeded: bool) -> dict[str, Any]:
    """The properties of the arguments that all ranks must have in common, by name."""
    options = inputs.options
    facts: dict[str, Any] = {"dtype": str(inputs.q.dtype)}
    for name, tensor in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
        facts[f"shape of {name} without its positions"] = [size for at, size in enumerate(tensor.shape) if at != dim]
    for name, value in options._asdict().items():
        if name in OWN_ROWS or not isinstance(value, Tensor):
            facts[name] = value if not isinstance(value, Tensor) else "given"
        elif name == "q_offsets":
            facts[name] = value.tolist()
        elif name != "dropout_seed":
            facts[name] = f"{value.dtype} of shape {list(value.shape)}"
    facts["dropout_seed"] = inputs.seed if seeded else None
    return facts
