"""The memory of recognition: products of queries and keys, and expressions that are not computed yet."""

import weakref

import torch
from torch import Tensor

from pyattn.adapters.scratch.call_counts import TAKEN, count
from pyattn.adapters.scratch.recording.expressions import Expression, address, packer
from pyattn.adapters.scratch.recording.repeats import Repeats

Modules = tuple[torch.nn.Module, ...]

HANDED_OUT = "memory of queries, keys or a mask is handed out"


class Product:
    """One product of queries and keys, from the call that multiplies them to the product with the values.

    Attributes:
        graded: whether gradients were recorded when it was written: a step that does otherwise is no part of it.
        outcome: what became of it: :data:`.call_counts.TAKEN`, the reason why it was left, or None as yet.
        again: whether another call of the same code may be taken although this one was left.
        scope: the modules that were running, outermost first, without those that its scores or weights outlive.
        replayed: the same modules, all of them, if checkpointing will run them again: it counts saved tensors, so it
            must find the same recognition.
        packer: what packed the tensors that autograd saved, to tell one checkpoint from another.
        watched: whether a hook sees the gradient of its scores, or their inputs have changed: nothing may replace them.
        memory: the addresses of what the scores are computed from.
    """

    def __init__(self, session: "Session", description: str, scope: Modules) -> None:
        self.session: Session = session
        self.description: str = description
        self.scope: Modules = scope
        self.packer: object = packer()
        self.replayed: Modules = () if self.packer is None else scope
        self.graded: bool = torch.is_grad_enabled()
        self.outcome: str | None = None
        self.again: bool = False
        self.watched: bool = False
        self.memory: set[int] = set()
        self.pending: weakref.WeakSet[Expression] = weakref.WeakSet()

    def read(self, *arguments: object) -> None:
        """Notes that scores are computed from the tensors among ``arguments``."""
        self.memory |= {address(x) for x in arguments if isinstance(x, Tensor)}

    def defer(self, expression: Expression) -> Expression:
        """Remembers ``expression``, which is computed when something reads it or changes what it reads."""
        self.pending.add(expression)
        return expression

    def settle(self) -> None:
        """Computes every expression that somebody can still read."""
        for expression in list(self.pending):
            expression.compute()
        self.pending.clear()

    def watch(self, name: str, differentiable: bool) -> None:
        """Notes that ``name`` looks at the gradient of scores or weights, which some made of them do not have."""
        if self.outcome == TAKEN:
            if not differentiable:
                return
            raise RuntimeError(
                f"pyattn: gradients of scores and weights must be requested before the product with the values, got "
                f"{name} of scores of {self.description} after it; pyattn.adapters.scratch.revert(model) keeps all"
            )
        self.watched = True
        self.leave(f"a gradient of the scores is read ({name})")

    def leave(self, reason: str, *, again: bool = False) -> None:
        """Counts the product as left, if nothing was decided before."""
        if self.outcome is None:
            self.outcome = reason
            self.again = again
            count(reason)

    def lose(self, reason: str) -> None:
        """Counts the product, which was taken, as left after all."""
        count(TAKEN, -1)
        self.outcome = None
        self.leave(reason)

    def take(self) -> None:
        """Counts the product as taken, also if other code has read its scores or weights before."""
        if self.outcome is not None:
            count(self.outcome, -1)
        self.outcome = TAKEN
        count(TAKEN)

    def __str__(self) -> str:
        outcome = "attention" if self.outcome == TAKEN else f"left ({self.outcome})"
        return f"{self.description}: {outcome}"

    @property
    def alive(self) -> bool:
        """Whether scores or weights that nothing has computed can still be read."""
        return any(expression.value is None for expression in list(self.pending))


class Session:
    """The products since recognition was switched on, in one thread.

    Attributes:
        learning: whether it finds out which modules hold an attention, so all products are remembered.
        modules: the converted modules whose forward is running, outermost first.
        visited: those that ran.
        products: those with scores or weights that can still be read.
        few, recorded: whether there were products of too few scores, and others.
        history: all of them, if ``learning``.
        repeats: tensors that were repeated for groups of heads.
        handed_out: the addresses of memory that others have got while products were recorded, and may change unnoticed.
    """

    def __init__(self, *, learning: bool = False, repeats: Repeats | None = None) -> None:
        self.learning = learning
        self.modules: list[torch.nn.Module] = []
        self.visited: set[torch.nn.Module] = set()
        self.products: weakref.WeakSet[Product] = weakref.WeakSet()
        self.history: list[Product] = []
        self.repeats: Repeats = Repeats() if repeats is None else repeats
        self.handed_out: set[int] = set()
        self.few = self.recorded = False
        self.recording = 0
        self.starting: Product | None = None

    def begin(self, description: str) -> Product:
        """A product that is about to be recorded."""
        if not self.products:
            self.handed_out.clear()
        product = Product(self, description, tuple(self.modules))
        self.products.add(product)
        if self.learning:
            self.history.append(product)
        return product

    def before_change(self, tensors: list[Tensor], reason: str) -> None:
        """Computes what reads the memory of ``tensors``, which are about to change in place for this ``reason``."""
        changing = {address(x) for x in tensors if x.layout is torch.strided}
        if not changing:
            return
        self.repeats.forget(changing)
        if reason.startswith(HANDED_OUT):
            self.handed_out |= changing
        for product in list(self.products):
            if not changing.isdisjoint(product.memory):
                product.settle()
                product.watched = True
                product.leave(reason)

    def may_change_unnoticed(self, *arguments: object) -> bool:
        """Whether others have the memory of some tensor among ``arguments``."""
        return bool(self.handed_out) and any(address(x) in self.handed_out for x in arguments if isinstance(x, Tensor))

    def narrow(self, module: torch.nn.Module) -> None:
        """``module`` has ended: products whose scores or weights outlive it are held by the one around it."""
        for product in self.history:
            if product.scope and product.scope[-1] is module and product.alive:
                product.scope = product.scope[:-1]

    def holders(self) -> set[torch.nn.Module]:
        """The modules in which recognition is worth while."""
        held = [p.scope or p.replayed for p in self.history if p.outcome == TAKEN or p.again]
        return {scope[-1] for scope in held if scope}

    def end(self, *, read: bool = True) -> None:
        """Computes all scores and weights that outlive the session, if they may be ``read``, before inputs change."""
        for product in list(self.products) if read else []:
            if product.alive:
                product.leave("scores or weights are kept")
                product.settle()
        for product in self.history:
            product.leave("no softmax and product with values followed")
