"""One run of a mask_mod or score_mod for a single pair: what it computes, and copies of the values that it reads."""

from collections.abc import Callable, Sequence
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyattn.adapters.flex.trace.evaluation import Lookups
from pyattn.adapters.flex.trace.expressions import ARGUMENTS, READS_NO_VALUES, Argument, Node, flattened, unflattened
from pyattn.options.checks import has_values

MOST_BYTES = 2**22
"""Most bytes of a mod's tensors that are copied: ids of 64 x 8,192 tokens, or a bool for each of 2,048 x 2,048 pairs.

Each call copies them, compares them with the last call's, and keeps them until backward. For 64 KB a comparison takes
6 us, where evaluating 8,192 x 8,192 pairs again takes 360 ms. Without a bound, each layer would keep a copy of a bias
as large as its scores.
"""

PLAIN = (
    Number,
    str,
    type,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    type(None),
    type(...),
)
"""Types of constants, which their repr describes in full."""


class Trace(Lookups):
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
        reads: the arguments on which the result depends, by number.
        dtype: the result's.
        result: the mod's result as an expression of ``read``; None if a function that it calls gives several tensors,
            changes one, perhaps through a view, takes other objects than tensors and constants, switches gradients off,
            or computes a tensor unseen, as in TorchScript: there ``reads`` has all arguments.

    Raises:
        TypeError: a mod that returns no tensor.
        ValueError: a mod that returns a tensor with dimensions.
    """

    captured: list[Tensor]
    read: list[Tensor]
    large: list[Tensor]
    reads: frozenset[int]
    dtype: torch.dtype
    result: Any

    def __init__(
        self, what: str, mod: Callable[..., Tensor], device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self._calls: list[tuple[Any, ...]] = []
        self._made: dict[int, tuple[Tensor, tuple[Any, ...], frozenset[int]]] = {}
        self._nodes: dict[int, Any] = {}
        self._is_expression = self._is_known = True
        self._room, self._differentiable = MOST_BYTES, dtype is not None and torch.is_grad_enabled()
        self.captured, self.read, self.large = [], [], []
        indices = [torch.zeros(1, dtype=torch.int64, device=device)] * 4

        def single(*inputs: Tensor) -> Tensor:
            for number, x in enumerate(inputs):
                self._made[id(x)] = x, ("argument", number), frozenset({number})
                self._nodes[id(x)] = Argument(number + len(ARGUMENTS) - len(inputs), x.dtype)
            with self:
                result: object = mod(*inputs)
            if not isinstance(result, Tensor):
                raise TypeError(f"pyattn: {what} must return a tensor, got {result!r}")
            if result.dim():
                raise ValueError(f"pyattn: {what} must return one value for a pair, got shape {tuple(result.shape)}")
            self._calls.append(("return", self._name(result)))
            self.large = [x for x, y in zip(self.captured, self.read, strict=True) if x is y]
            unseen = any(torch._C._functorch.is_batchedtensor(x) for x in self.large)
            self._is_expression &= self._is_known and not unseen
            self.dtype, self.reads = result.dtype, frozenset(range(len(inputs))) if unseen else self._reads(result)
            self.result = self._nodes.get(id(result), result) if self._is_expression else None
            return result

        with torch.no_grad():  # so only captured tensors can require a gradient
            torch.vmap(single)(*(() if dtype is None else [torch.zeros(1, dtype=dtype, device=device)]), *indices)
        self._made.clear()
        self._nodes.clear()
        self._what, self._again = what, None if self.result is not None else partial(Trace, what, mod, device, dtype)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs, structure = flattened(args, kwargs or {})
        if not (any(isinstance(x, Tensor) for x in inputs) or all(map(_is_constant, inputs))):
            return super().__torch_function__(func, types, args, kwargs)  # as_tensor(array): the result is captured
        names = [self._name(x) for x in inputs]
        given, named = unflattened([self._nodes.get(id(x), x) for x in inputs], structure)
        result = super().__torch_function__(func, types, args, kwargs)
        known = frozenset().union(*[self._reads(x) for x in inputs][func in READS_NO_VALUES :])
        written = args[0] if func is Tensor.__setitem__ else result
        leaves = [written] if isinstance(written, Tensor) else tree_leaves(written)
        for place, x in enumerate(leaves):
            if isinstance(x, Tensor):
                self._made[id(x)] = x, ("result", len(self._calls), place), known
        if isinstance(written, Tensor):
            self._nodes[id(written)] = node = Node(func, given, named, written.dtype)
            self._is_expression &= node.pure
        elif any(isinstance(x, Tensor) for x in leaves) or func is torch._C._set_grad_enabled:
            self._is_expression = False
        self._calls.append((func, structure, names))
        return result

    def repeats(self, other: "Trace") -> bool:
        """Whether both runs certainly computed the same function of the same values."""
        return self._is_known and not self.large and self.agrees(other)

    def agrees(self, other: "Trace") -> bool:
        """Whether both runs made the same calls, and read the same values as far as these are copied."""
        return self._calls == other._calls and all(
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

    def _name(self, x: object) -> tuple[Any, ...]:
        if not isinstance(x, Tensor):
            self._is_known &= _is_constant(x)
            return type(x), repr(x)
        if id(x) not in self._made:
            self._made[id(x)] = x, ("captured", len(self.captured)), frozenset()
            self._nodes[id(x)] = read = self._copied(x)
            self.captured.append(x)
            self.read.append(read)
        return self._made[id(x)][1]

    def _copied(self, x: Tensor) -> Tensor:
        """A copy of ``x``, linked to it for gradients; ``x`` itself if it is no plain dense tensor, or too large."""
        if type(x) not in (Tensor, torch.nn.Parameter) or x.layout != torch.strided or not has_values(x):
            return x
        size = x.numel() * x.itemsize
        if size > self._room or x.is_conj() or x.is_neg() or x.is_quantized:
            return x
        self._room -= size
        with torch.inference_mode(False), torch.set_grad_enabled(self._differentiable):
            return x.clone()

    def _reads(self, x: object) -> frozenset[int]:
        return self._made[id(x)][2] if id(x) in self._made else frozenset()


def _is_constant(x: object) -> bool:
    return all(map(_is_constant, (x.start, x.stop, x.step))) if isinstance(x, slice) else isinstance(x, PLAIN)


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
