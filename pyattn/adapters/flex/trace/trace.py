"""One run of a mask_mod or score_mod for a single pair: what it computes, and copies of the values that it reads."""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from pyattn.adapters.flex.trace.expressions import ARGUMENTS, Argument, Node, form_of
from pyattn.adapters.flex.trace.recording import Program, RecordedCall, Recording
from pyattn.options.checks import has_values

MOST_BYTES = 2**22
"""Most bytes of a mod's tensors that are copied: ids of 64 x 8,192 tokens, or a bool for each of 2,048 x 2,048 pairs.

Each call copies them, compares them with the last call's, and keeps them until backward. For 64 KB a comparison takes
6 us, where evaluating 8,192 x 8,192 pairs again takes 360 ms. Without a bound, each layer would keep a copy of a bias
as large as its scores.
"""


class Trace:
    """One run of a mod for a single pair: which functions of torch it calls, with which constants and tensors.

    A mod can't branch on the values of its arguments, so the calls decide its meaning. Tensors may change in ways that
    no version counts, such as ``x.data``, NumPy or a compiled graph, so runs are compared by the values that they read.

    Args:
        what: the mod's name in errors.
        mod: a mask_mod, or a score_mod with ``dtype``.
        dtype: the scores'.

    Attributes:
        captured: the tensors that the mod reads from outside its arguments.
        read: the same, with a copy in place of each that is copied, differentiable for a score_mod.
        large: those that are not copied. Plain dense tensors are, up to MOST_BYTES.
        dtype: the result's.

    Raises:
        TypeError: a mod that returns no tensor.
        ValueError: a mod that returns a tensor with dimensions.
    """

    captured: list[Tensor]
    read: list[Tensor]
    large: list[Tensor]
    dtype: torch.dtype

    def __init__(
        self, what: str, mod: Callable[..., Tensor], device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        copies = _Copies(dtype is not None and torch.is_grad_enabled())
        scores = [] if dtype is None else [torch.zeros(1, dtype=dtype, device=device)]
        indices = [torch.zeros(1, dtype=torch.int64, device=device)] * 4

        def single(*inputs: Tensor) -> Tensor:
            self._recording = recording = Recording(inputs, copies)
            with recording:
                result: object = mod(*inputs)
            if not isinstance(result, Tensor):
                raise TypeError(f"pyattn: {what} must return a tensor, got {result!r}")
            if result.dim():
                raise ValueError(f"pyattn: {what} must return one value for a pair, got shape {tuple(result.shape)}")
            self.dtype, self._returned = result.dtype, recording.named(result)
            recording.names.clear()  # tensors of the run
            return result

        with torch.no_grad():  # so only captured tensors can require a gradient
            torch.vmap(single)(*scores, *indices)
        run, dtypes = self._recording, [x.dtype for x in (*scores, *indices)]
        self._arguments = [Argument(number, x) for number, x in enumerate(dtypes, len(ARGUMENTS) - len(dtypes))]
        self.captured, self.read = run.captured, run.read
        self.large = [x for x, y in zip(self.captured, self.read, strict=True) if x is y]
        self._is_seen = not any(map(torch._C._functorch.is_batchedtensor, self.large))
        made = run.calls, self._returned, [(type(x), repr(x)) for x in run.numbers]  # 1 is not 1.0, and NaN is itself
        self._made = made if run.is_known else repr(made)
        changes = any(map(_changes_a_tensor, run.calls)) or run.switches
        gives_several = any(isinstance(x, tuple) and any(x) for x in run.dtypes)
        self._is_expression = run.is_known and self._is_seen and not (changes or gives_several)
        self._what, self._again = what, None if self._is_expression else partial(Trace, what, mod, device, dtype)

    @cached_property
    def result(self) -> Any:
        """The mod's result as an expression of ``read``.

        None if a function that it calls gives several tensors, changes one, perhaps through a view, takes other objects
        than tensors and constants, switches gradients off, or computes a tensor unseen, as in TorchScript.
        """
        return self._nodes[-1] if self._is_expression else None

    @cached_property
    def reads(self) -> frozenset[str]:
        """The names of :class:`Form` on which the result depends; all ARGUMENTS if a tensor is computed unseen.

        A change may reach any tensor, through a view.
        """
        if not self._is_seen:
            return frozenset(ARGUMENTS)
        *nodes, returned = self._nodes
        calls = zip(nodes, self._recording.calls, strict=True)
        changes = [node for node, call in calls if _changes_a_tensor(call)]
        return frozenset[str]().union(*(form_of(x).depends_on() for x in (returned, *changes)))

    @cached_property
    def _nodes(self) -> list[Any]:
        """The calls, then the mod's result."""
        nodes, run = list[Any](), self._recording

        def node(function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            dtype = run.dtypes[len(nodes)]
            nodes.append(Node(function, arguments, named, dtype))
            return (nodes[-1],) * len(dtype) if isinstance(dtype, tuple) else nodes[-1]

        returned = Program(run.calls, self._returned).replayed(self._arguments, self.read, run.numbers, node)
        return [*nodes, returned]

    def repeats(self, other: "Trace") -> bool:
        """Whether both runs certainly computed the same function of the same values."""
        return self._recording.is_known and not self.large and self.agrees(other)

    def agrees(self, other: "Trace") -> bool:
        """Whether both runs made the same calls, and read the same values as far as these are copied."""
        return self._made == other._made and all(
            (mine is own) == (theirs is its) and (mine is own or have_same_bits(mine, theirs))
            for mine, own, theirs, its in zip(self.read, self.captured, other.read, other.captured, strict=True)
        )

    def check(self) -> None:
        """RuntimeError if the mod computes something else now; where it is an expression, nothing calls it again."""
        if self._again is not None and not self._again().agrees(self):
            rule = "must read the same in backward as in forward, unless it is an expression of functions of torch"
            raise RuntimeError(f"pyattn: a {self._what} {rule}, got one that has changed in between")

    def saved(self) -> list[Tensor]:
        """The tensors of ``large`` that autograd can save, to raise where one has changed in place."""
        return [x for x in self.large if has_values(x) and not x.is_inference()]


class _Copies:
    """Copies tensors of up to MOST_BYTES together, linked to them for gradients if these are wanted."""

    def __init__(self, differentiable: bool) -> None:
        self._room, self._differentiable = MOST_BYTES, differentiable

    def __call__(self, x: Tensor) -> Tensor:
        """A copy of ``x``; ``x`` itself if it is no plain dense tensor, or too large."""
        if type(x) not in (Tensor, torch.nn.Parameter) or x.layout != torch.strided or not has_values(x):
            return x
        size = x.numel() * x.itemsize
        if size > self._room or x.is_conj() or x.is_neg() or x.is_quantized:
            return x
        self._room -= size
        with torch.inference_mode(False), torch.set_grad_enabled(self._differentiable):
            return x.clone()


def _changes_a_tensor(call: RecordedCall) -> bool:
    """Whether the function of a call changes a tensor."""
    function, _, named = call
    name = getattr(function, "__name__", "")
    in_place = name.startswith(("__i", "__set")) if name.startswith("__") else name.endswith("_")
    # torch.nn.functional.relu takes inplace.
    return (in_place and name != "__invert__") or "out" in named or bool(named.get("inplace"))


def have_same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are alike: NaN is itself, and 0 is not -0."""
    if x.dtype != y.dtype or x.shape != y.shape or x.device != y.device:
        return False
    if x.is_complex():
        x, y = torch.view_as_real(x), torch.view_as_real(y)
    if x.is_floating_point():
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
        x, y = x.view(bits), y.view(bits)
    return torch.equal(x, y)
