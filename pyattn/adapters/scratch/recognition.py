"""The mode that watches torch's functions, from a product of queries and keys to one of weights and values."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only

from pyattn.adapters.scratch import checkpoints, grouped, native
from pyattn.adapters.scratch.dropout import DROPOUTS, as_product
from pyattn.adapters.scratch.in_place import changes
from pyattn.adapters.scratch.products import (
    PRODUCTS,
    Operands,
    Values,
    positional,
    queries_and_keys,
    tensors_of,
    values,
)
from pyattn.adapters.scratch.recording.chain import Chain, LeftError
from pyattn.adapters.scratch.recording.deferred import Deferred, foreign, plain, prepared
from pyattn.adapters.scratch.recording.expressions import packer
from pyattn.adapters.scratch.recording.operators import Scores
from pyattn.adapters.scratch.recording.repeats import REPEATING
from pyattn.adapters.scratch.recording.session import HANDED_OUT, Product, Session
from pyattn.adapters.scratch.recording.terms import Read
from pyattn.adapters.scratch.scores import scores_of


class _Running(threading.local):
    """The sessions whose mode this thread has entered, and the converted modules whose forward is running."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.visits: list[Any] = []
        self.enabled: Recognition | None = None


running: _Running = _Running()


class Recognition(TorchFunctionMode):
    """Records what may be attention and replaces what is. It watches products of ``tensors``, no subclass of them.

    ``traced`` is called for each function of torch that dynamo traces where the mode is on: see :mod:`.compiling`.
    """

    tensors: type[Tensor] = Tensor
    traced: Callable[[], None]

    def __init__(self, session: Session, entered: FrameType | None = None) -> None:
        super().__init__()
        self.session = session
        self.entered = entered  # the call in which the mode is on, if it is one

    def __enter__(self) -> "Recognition":
        running.sessions.append(self.session)
        entered: Recognition = super().__enter__()  # type: ignore[no-untyped-call]
        return entered

    def __exit__(self, *error: Any) -> None:
        self.entered = None
        above = []
        while torch.overrides._get_current_function_mode() is not None:  # not the last one, after a misnested exit
            mode = torch.overrides._pop_mode()
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            torch.overrides._push_mode(mode)
        running.sessions.remove(self.session)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # code that is compiled where recognition is on
            Recognition.traced()
            return func(*args, **kwargs)
        if func in PRODUCTS:
            args, kwargs = positional(func, args, kwargs)
        if Scores in types or (func in PRODUCTS and any(type(x) is Scores for x in args)):  # perhaps in a list
            if foreign(types):
                args, kwargs = tree_map_only(Deferred, plain, (args, kwargs))
                return func(*args, **kwargs)
            return self.on_scores(func, args, kwargs)
        if func in PRODUCTS and self.may_record():
            operands = queries_and_keys(func, args, kwargs, self.tensors)
            if operands is not None and not operands.are_weights_and_values:
                return self._start(func, args, kwargs, operands)
        if func in REPEATING:
            out = func(*args, **kwargs)
            if self.may_record():
                self.session.repeats.note(func, args, kwargs, out)
            return out
        if self.session.products or self.session.repeats:
            self.session.before_change(*changes(func, args, kwargs))
        return func(*args, **kwargs)

    def _start(self, func: Any, args: Any, kwargs: Any, operands: Operands) -> Any:
        session = self.session
        product = session.begin(str(operands))
        if not native.enough(operands.q, operands.k, operands.lead):
            session.few = True
            product.leave(f"fewer than {native.MIN_SCORES} scores", again=True)
            return func(*args, **kwargs)
        if session.may_change_unnoticed(*tensors_of(func, args)):
            product.leave(HANDED_OUT, again=True)
            return func(*args, **kwargs)
        if not self.begun(product):
            product.leave("a Function that may compute it again")
            return func(*args, **kwargs)
        session.recorded = True
        session.starting = product
        try:
            out = scores_of(func, args, kwargs, operands, product)
        finally:
            session.starting = None
        if not isinstance(out, Deferred) or out.cell.expression.operator is None:
            product.leave("another product")
            return func(*args, **kwargs)
        product.read(*tensors_of(func, args))
        q, k = operands.q, operands.k
        sizes = (q.shape[-2], k.shape[-2])
        alpha, reads = operands.alpha, (Read.of(q), Read.of(k))
        growth = max(alpha, 1 / alpha)
        chain = Chain(product, *reads, (operands.lead,), sizes, out.dtype, out.dtype, scale=alpha, growth=growth)
        chain = chain._replace(order=operands.order)
        if operands.added is not None:
            chain = chain.plus(*operands.added)
        out.cell.chain = chain
        out.cell.edge = _edge(out)
        return out

    def on_scores(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function of torch some of whose arguments are scores or weights."""
        session = self.session
        session.before_change(*changes(func, args, kwargs))
        given = [x for x in args if isinstance(x, Deferred)]
        if not given or kwargs or func in PRODUCTS:
            given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Deferred)]
        chains = [x.cell.chain for x in given]
        for x in given:
            if x.cell.chain is not None and x.cell.edge != _edge(x):
                x.cell.chain = None
                if x.cell.product is not None:
                    x.cell.product.leave("another function took the scores")
        if not self.may_record() or any(x is not None and x.product.graded != torch.is_grad_enabled() for x in chains):
            args, kwargs = prepared(func, args, kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in PRODUCTS and len(given) == 1:
            out = self._finish(func, args, kwargs, given[0])
            if out is not None:
                return out
        elif func in DROPOUTS and isinstance(args[0], Scores) and len(given) == 1:
            func, args, kwargs = as_product(func, args, kwargs)
        args, kwargs = prepared(func, args, kwargs)
        session.recording += 1
        try:
            with torch._C.DisableTorchFunctionSubclass():
                out = func(*args, **kwargs)
        finally:
            session.recording -= 1
        made = args[0] if func is Tensor.__setitem__ else out
        if isinstance(made, Deferred) and made.cell.chain is not None and not any(made.cell.chain is x for x in chains):
            made.cell.edge = _edge(made)
        return out

    def _finish(self, func: Any, args: Any, kwargs: Any, weights: Deferred) -> Tensor | None:
        """Attention, if ``func`` multiplies weights by values."""
        chain, product = weights.cell.meaning, weights.cell.product
        if chain is None or product is None:
            return None
        given = values(func, args, kwargs, chain.order)
        try:
            if product.packer != packer():
                raise LeftError("a product that ends in another checkpoint than it begins in")
            if given is None or not chain.weights:
                raise LeftError("a product of scores" if given is not None else "another product with weights")
            if product.outcome is not None and not native.worth_reading_again(chain):
                raise LeftError("few scores that were computed before")
            v = given.v(tensors_of(func, args)[given.at])
            out = self.attend(chain, given, v, _product_dtype(weights, v))
        except LeftError as left:
            product.leave(str(left), again=chain.weights)
            weights.cell.chain = None
            return None
        except BaseException:  # also a checkpoint's, at the last tensor that it needs
            product.take()
            raise
        product.take()
        return given.arranged(out, copied=out.requires_grad)  # backward reads out, which callers may change in place

    def attend(self, chain: Chain, given: Values, v: Tensor, dtype: torch.dtype) -> Tensor:
        """The result for recorded weights and ``v``, the values of ``given``."""
        if not all(read.unchanged for read in chain.reads()):
            raise LeftError("queries, keys or a mask changed since the scores were written")
        size = grouped.heads_in_a_group(chain, v, self.session.repeats)
        return native.attend(chain, v, dtype) if size == 1 else grouped.attend(chain, v, dtype, size)

    def begun(self, product: Product) -> bool:
        """Called at each first product. Whether it may be recorded: it is wherever it is computed again."""
        innermost = running.visits[-1].frame if running.visits else None
        return checkpoints.carry(recognized, sys._getframe(1), innermost, self.entered)

    def may_record(self) -> bool:
        """Whether tensors are what they seem: no transform, tangent, compiler or tracer is at work."""
        return not (
            torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0 or untouched()
        )


@contextmanager
def recognized() -> Iterator[None]:
    """Recognition in a separate session, unless it is on. Weights that are still alive at the end are computed."""
    if is_on():
        yield
        return
    session = Session()
    try:
        with Recognition(session, sys._getframe(2)):
            yield
    finally:
        session.end(read=not checkpoints.stopping())


def _product_dtype(weights: Deferred, v: Tensor) -> torch.dtype:
    """The dtype of torch's own product of the two."""
    if torch.is_autocast_enabled(v.device.type) and torch.float64 not in (weights.dtype, v.dtype):
        return torch.get_autocast_dtype(v.device.type)
    if weights.dtype != v.dtype:
        raise LeftError(f"weights of {weights.dtype} times values of {v.dtype}")
    return v.dtype


def is_on() -> bool:
    """Whether recognition watches this thread's functions. Torch turns it off within one, such as autograd.grad."""
    return any(isinstance(mode, Recognition) for mode in torch.overrides._get_current_function_mode_stack())


def untouched() -> bool:
    """Whether somebody records the plain code: a compiler, an exporter, a tracer."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def _edge(x: Tensor) -> tuple[str, int] | None:
    """The name and number of the autograd node, which is not held."""
    with torch._C.DisableTorchFunctionSubclass():
        node = x.grad_fn
    return None if node is None else (node.name(), node._sequence_nr())
