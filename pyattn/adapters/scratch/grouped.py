"""Keys and values that the code repeats for groups of heads, taken back to one head a group, with their gradients.

Native code reads the first head of each group. The repeated tensors stay in the gradient's path: their gradients are
:class:`~pyattn.adapters.scratch.recording.shares.Shares`, computed from all heads where something reads them, and in
full where they are differentiated themselves.
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyattn.adapters.scratch import native
from pyattn.adapters.scratch.recording.chain import Chain
from pyattn.adapters.scratch.recording.expressions import Expression
from pyattn.adapters.scratch.recording.leading import fine_shape_of
from pyattn.adapters.scratch.recording.repeats import Repeats
from pyattn.adapters.scratch.recording.shares import Shares
from pyattn.adapters.scratch.recording.terms import Read


def heads_in_a_group(chain: Chain, v: Tensor, repeats: Repeats) -> int:
    """How many heads after one another have the same keys and values, both with a gradient; 1 if none."""
    k = chain.k.tensor
    wanted = torch.is_grad_enabled() and k.requires_grad and v.requires_grad
    if not repeats or not wanted or chain.cleared or any(read.state.version is None for read in chain.reads()):
        return 1
    return proved(chain, v, repeats)


def proved(chain: Chain, v: Tensor, repeats: Repeats) -> int:
    """How many heads after one another have the same keys and values, whoever wants their gradients; 1 if none."""
    size = repeats.heads(chain.k.tensor, chain.leads[0])
    if size == 1 or repeats.heads(v, chain.leads[-1]) != size:
        return 1
    return 1 if fine_shape_of(chain.leads, size) is None else size


def attend(chain: Chain, v: Tensor, dtype: torch.dtype, size: int) -> Tensor:
    """:func:`.native.attend` of heads of which ``size`` after one another have the same keys and values."""
    whole = Whole(chain, dtype)
    k, values = _Firsts.apply(chain.k.tensor, v, size, whole)  # type: ignore[no-untyped-call]
    out = native.attend(chain._replace(k=Read.of(k)), values, dtype, size=size)
    seen: Tensor = _Result.apply(out, whole, chain.q.tensor, chain.k.tensor, v, *_rest(chain))  # type: ignore[no-untyped-call]
    return seen


def _rest(chain: Chain) -> list[Tensor]:
    return [read.tensor for read in chain.reads()[2:]]


class Whole:
    """The attention of all heads, without its tensors, and during a backward pass what its gradients depend on."""

    def __init__(self, chain: Chain, dtype: torch.dtype) -> None:
        none = torch.empty(0)
        self.chain: Chain = chain.of(none, none, [none] * len(_rest(chain)))
        self.dtype: torch.dtype = dtype
        self.passes: dict[int, _OfAllHeads] = {}

    def remember(self, tensors: Sequence[Tensor], gradient: Tensor) -> None:
        """Keeps q, k, v and the rest, and the gradient of the result, until :meth:`taken` or the end of this pass."""
        running = torch._C._current_graph_task_id()
        self.passes[running] = _OfAllHeads(self, tensors, gradient)
        _at_the_end(partial(self.passes.pop, running, None))

    def taken(self) -> "_OfAllHeads":
        """The repetitions that this pass remembered."""
        return self.passes.pop(torch._C._current_graph_task_id())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def gradients(self, tensors: Sequence[Tensor], gradient: Tensor, *, again: bool = False) -> list[Tensor | None]:
        """The gradients of those ``tensors`` that require one, to be differentiated ``again`` or not."""
        with _autograd(), torch.enable_grad(), torch.autocast(gradient.device.type, enabled=False):
            own = [x.view_as(x) if again else x.detach().requires_grad_(x.requires_grad) for x in tensors]
            out = native.attend(self.chain.of(own[0], own[1], own[3:]), own[2], self.dtype)
            wanted = [x for x in own if x.requires_grad]
            found = iter(torch.autograd.grad(out, wanted, gradient, create_graph=again))
        return [next(found) if x.requires_grad else None for x in own]


def _autograd() -> contextlib.AbstractContextManager[None]:
    """Torch's autograd, also where a tensor's dispatch has switched it off."""
    off = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)
    return torch.overrides.enable_reentrant_dispatch() if off else contextlib.nullcontext()


class _OfAllHeads:
    """The gradients of repeated keys and values, all heads of them, computed where one of them is read."""

    def __init__(self, whole: Whole, tensors: Sequence[Tensor], gradient: Tensor) -> None:
        self.whole: Whole = whole
        self.tensors: Sequence[Tensor] = tensors
        self.gradient: Tensor = gradient
        self.versions: list[int] = self._versions()
        self.computed: list[Tensor | None] | None = None

    def _versions(self) -> list[int]:
        return [x._version for x in (*self.tensors, self.gradient)]

    def shares(self, at: int, sums: Tensor, size: int) -> Tensor:
        """The gradient of input ``at`` with its sums over groups. If it outlives the pass, its end computes it."""
        expression = Expression(partial(self._gradient, at))
        kept = weakref.ref(expression)
        _at_the_end(lambda: None if (left := kept()) is None else left.compute())
        return Shares.of(expression, sums, size, sums.dim() - 3)

    def _gradient(self, at: int) -> Tensor:
        if self.versions != self._versions():
            raise RuntimeError(
                "pyattn: queries, keys, values and masks must not change in place before the gradient of repeated keys "
                f"or values is read, got versions {self._versions()}, at first {self.versions}"
            )
        if self.computed is None:
            self.computed = self.whole.gradients(self.tensors, self.gradient)
        found = self.computed[at]
        assert found is not None
        return found.contiguous()


def _at_the_end(call: Callable[[], object]) -> None:
    """Has ``call`` called as the backward pass that is running ends."""

    def end() -> None:
        call()

    torch.autograd.Variable._execution_engine.queue_callback(end)


class _Firsts(torch.autograd.Function):
    """k and v (..., groups * size, S, D) to the first heads of their groups: (..., groups, 1, S, D)."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, size: int, whole: Whole) -> tuple[Tensor, Tensor]:
        ctx.size, ctx.whole = size, whole
        ctx.set_materialize_grads(False)
        first, second = (x[..., ::size, :, :].unsqueeze(-3) for x in (k, v))
        return first, second

    @staticmethod
    def backward(ctx: Any, *sums: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(x is None for x in sums):
            return None, None, None, None
        of_heads = [None if x is None else x.squeeze(-3) for x in sums]
        if torch.compiler.is_compiling():  # they are 0: see _Result
            return *(None if x is None else x.repeat_interleave(ctx.size, -3) for x in of_heads), None, None
        of_all: _OfAllHeads = ctx.whole.taken()
        return *(None if x is None else of_all.shares(at, x, ctx.size) for at, x in enumerate(of_heads, 1)), None, None


class _Result(torch.autograd.Function):
    """The result as it is. Backward sees its gradient before the attention does.

    A backward that will be differentiated itself, vectorized or compiled goes past the attention of groups: all
    gradients are those of all heads.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, whole: Whole, *tensors: Tensor) -> Tensor:
        ctx.whole = whole
        ctx.save_for_backward(*tensors)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        whole, tensors = ctx.whole, ctx.saved_tensors
        if torch.compiler.is_compiling():  # whose graphs have no missing gradients
            return torch.zeros_like(gradient), None, *whole.gradients(tensors, gradient)
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(gradient):
            return None, None, *whole.gradients(tensors, gradient, again=torch.is_grad_enabled())
        whole.remember(tensors, gradient)
        return gradient, None, *(None for _ in tensors)
