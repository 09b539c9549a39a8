"""Options that one rank has parsed, and the properties of these that all ranks must have in common."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyattn.distributed.agreement.checks import check_dense
from pyattn.options.attention_options import AttentionOptions
from pyattn.options.axes import AXES, PACKED_AXES, having, words_of
from pyattn.options.parse import parse
from pyattn.options.schema import LEARNED, Options

OWN_ROWS = having("q")
"""Options of which each rank has only the rows of its queries."""


class ParsedOptions(NamedTuple):
    """Options that have been parsed.

    Attributes:
        chosen: whether the caller chose the dropout seed.
        wanted: which of the tensors and LEARNED need a gradient.
        in_graph: whether the call is an operator of a compiled graph.
    """

    options: Options
    chosen: bool
    wanted: list[bool]
    in_graph: bool = False

    @classmethod
    def of(
        cls, function: Callable[..., Any], tensors: tuple[Tensor, ...], options: AttentionOptions
    ) -> "ParsedOptions":
        """The options given to a public function with its tensors."""
        device = tensors[0].device
        known = Options(*parse(function, options, device))
        for name, value in known._asdict().items():
            if isinstance(value, Tensor):
                named = "q_offset" if name == "q_offsets" else name
                check_dense(named, value)
                if value.device != device:
                    raise ValueError(f"pyattn: {named} must be on q's device, got {value.device} and {device}")
        given = *tensors, *(getattr(known, name) for name in LEARNED)
        wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in given]
        return cls(known, options.get("dropout_seed") is not None, wanted)

    @classmethod
    def nothing(cls, tensors: int) -> "ParsedOptions":
        """No options, of a call of that many tensors."""
        return cls(Options(), False, [False] * (tensors + len(LEARNED)))

    def facts(self, tensors: Iterable[str], axis: str, packed: bool = False) -> dict[str, Any]:
        """The properties that all ranks must have in common, by name, given the names of the tensors.

        Along ``axis``, "q" or "k", each rank has its own rows or columns: their number is not among the facts.
        Backward is a call of all ranks too, so all want the same gradients, and all or none send the messages of a
        compiled graph's backward, which are others.
        """
        facts: dict[str, Any] = {}
        own, table = having(axis), PACKED_AXES if packed else AXES
        for name, value in self.options._asdict().items():
            if not isinstance(value, Tensor):
                facts[name] = tuple(value) if isinstance(value, list) else value  # a graph has windows as lists
            elif name in own:
                words = words_of(table[name], value.dim()) or [""] * value.dim()
                sizes = [size for word, size in zip(words, value.shape, strict=True) if word[:1] != axis]
                facts[name] = f"{value.dtype} of {value.dim()} dimensions"
                facts[f"shape of {name} without its {'columns' if axis == 'k' else 'rows'}"] = sizes
            elif name == "q_offsets":
                facts[name] = value.tolist()
            elif name != "dropout_seed":
                facts[name] = f"{value.dtype} of shape {list(value.shape)}"
        facts["dropout_seed"] = seed_of(self.options) if self.chosen else None
        facts[f"requires_grad of {', '.join((*tensors, *LEARNED))}"] = self.wanted
        facts["torch.compile of a call with gradients"] = self.in_graph and any(self.wanted)
        return facts


def seed_of(options: Options) -> int:
    """The seed as a number, 0 without dropout."""
    seed = options.dropout_seed
    if not options.dropout_p:
        return 0
    if seed.dim() or seed.dtype != torch.int64:
        raise ValueError(f"pyattn: dropout_seed must be an int64 scalar, got {seed.dtype} of shape {tuple(seed.shape)}")
    return int(seed)


def with_rows(options: Options, rows: int) -> Options:
    """The options of batches with a row of key_ranges for each query where they have one row for all."""
    ranges = options.key_ranges
    if ranges is None or ranges.dim() < 3 or ranges.shape[1] != 1:
        return options
    return options._replace(key_ranges=ranges.expand(-1, rows, *ranges.shape[2:]))


def summed_wide(options: Options, dtype: torch.dtype, own_bias: bool) -> Options:
    """The options with those of LEARNED whose gradients are sums over calls of kernels in float32, or float64 like q.

    A kernel rounds its gradients to the dtypes of the options, and terms that cancel may be larger than their sum, so
    the sum is rounded instead.

    Args:
        options: of a call.
        dtype: of q.
        own_bias: whether each number of the bias has its gradient from one call.
    """
    given = {name: getattr(options, name) for name in LEARNED if not (own_bias and name == "bias")}
    wide, taken = torch.promote_types(dtype, torch.float32), (dtype, torch.float32)  # others are refused later
    return options._replace(**{name: t.to(wide) for name, t in given.items() if t is not None and t.dtype in taken})
