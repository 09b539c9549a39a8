"""The same recognition on graphs of ``torch.compile``: the backend ``"pyattn"``, which hands over to Inductor.

Dynamo's graph keeps the functions that the model's code calls. They are run once, on tensors without memory, under
:class:`~pyattn.adapters.scratch.recognition.Recognition`; the nodes that became attention are replaced by one.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor

from pyattn.adapters.scratch import grouped, native
from pyattn.adapters.scratch.masks.constants import FULL, Constants
from pyattn.adapters.scratch.masks.unread import unread
from pyattn.adapters.scratch.products import PRODUCTS, Values, positional, queries_and_keys, tensors_of
from pyattn.adapters.scratch.recognition import Recognition
from pyattn.adapters.scratch.recording.chain import Chain, LeftError
from pyattn.adapters.scratch.recording.deferred import tree_deferred
from pyattn.adapters.scratch.recording.expressions import Noise, address, copies
from pyattn.adapters.scratch.recording.repeats import Repeats
from pyattn.adapters.scratch.recording.session import Product, Session
from pyattn.adapters.scratch.recording.terms import Read


def backend(graph: fx.GraphModule, inputs: list[Tensor], **options: Any) -> Callable[..., Any]:
    """Compiles ``graph`` with Inductor after its attention was replaced. For ``torch.compile(backend="pyattn")``."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(replaced(graph), inputs, **options)
    return compiled  # type: ignore[no-any-return]


def before_compiling(context: Any) -> None:
    """Replaces the attention of the graph that dynamo is tracing, whichever backend compiles it; not in an export."""
    output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    compiler = output.compiler_fn
    if not output.export and not isinstance(compiler, _WithRecognition):
        output.compiler_fn = _WithRecognition(compiler)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def is_outermost(hooks: str) -> bool:
    """Whether dynamo traces a function of the module ``hooks`` by itself, as no part of another."""
    traced: Any = InstructionTranslator.current_tx()
    while traced.parent is not None:
        traced = traced.parent
    return bool(traced.f_globals["__name__"] == hooks)


class _WithRecognition:
    """A backend of ``torch.compile`` that compiles graphs after their attention was replaced."""

    def __init__(self, compiler: Callable[..., Any]) -> None:
        self.compiler = compiler
        self.__name__ = getattr(compiler, "__name__", "backend")

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor], **options: Any) -> Any:
        return self.compiler(replaced(graph), inputs, **options)


class _Match(NamedTuple):
    """Attention found in a graph: the nodes of the two products, and what lies between them.

    Keys and values of ``size`` heads after one another are the same, copied into the memory of ``repeated``.
    """

    first: fx.Node
    last: fx.Node
    chain: Chain
    values: Values
    dtype: torch.dtype
    size: int
    repeated: frozenset[int]

    def read_by(self, values_of: dict[fx.Node, Any], ends: set[fx.Node]) -> "_Match":
        """The same, without groups where a node other than a view or the ``ends`` reads the copies.

        It might be a hook, or another that reads their gradient, which attention of groups leaves to the first heads.
        """
        copies = {
            node
            for node, x in values_of.items()
            if type(x) is FakeTensor
            and address(x) in self.repeated
            and not isinstance(node.target, HigherOrderOperator)
        }
        seen = all(user in copies or user in ends for node in copies for user in node.users)
        return self if seen else self._replace(size=1)


class _GraphRecognition(Recognition):
    """Recognition of tensors without memory, which notes what it finds."""

    tensors = FakeTensor

    def __init__(self) -> None:
        super().__init__(Session(learning=True, repeats=Repeats(of_graph=True)))
        self.node: fx.Node | None = None
        self.firsts: dict[Product, fx.Node] = {}
        self.matches: list[_Match] = []
        self.constants = Constants()

    def may_record(self) -> bool:
        """A graph holds no transforms and no tangents."""
        return True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        if func in FULL:
            self.constants.note(func, args, kwargs or {}, out)
        return out

    def on_scores(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``where`` with a number, which must keep it."""
        args = self.constants.as_numbers(args) if func in (torch.where, Tensor.where) else args
        return super().on_scores(func, args, kwargs)

    def begun(self, product: Product) -> bool:
        """Notes the node of the first product, unless it is another function's, such as a checkpoint's."""
        assert self.node is not None
        self.firsts[product] = self.node
        return _target(self.node) in PRODUCTS

    def attend(self, chain: Chain, given: Values, v: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor without memory like the result, and the match."""
        assert self.node is not None
        if _target(self.node) not in PRODUCTS:
            raise LeftError("a product with values in another function")
        out = native.attend(chain, v, dtype, unread)
        size = grouped.proved(chain, v, self.session.repeats)
        repeated = frozenset((address(chain.k.tensor), address(v)) if size > 1 else ())
        self.matches.append(_Match(self.firsts[chain.product], self.node, chain, given, dtype, size, repeated))
        return out


class _Reader(fx.Interpreter):
    """Runs a graph under recognition and keeps the value of every node."""

    def __init__(self, graph: fx.GraphModule, mode: _GraphRecognition) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.mode = mode

    def run_node(self, n: fx.Node) -> Any:
        self.mode.node = n
        known = n.meta.get("example_value")
        if n.op != "placeholder" and isinstance(known, torch.SymInt | torch.SymFloat | torch.SymBool):
            return known  # computed again, it would be another symbol
        return super().run_node(n)


def replaced(graph: fx.GraphModule) -> fx.GraphModule:
    """``graph`` with its attention replaced, in place. A graph that can't be run without memory stays as it is.

    What a checkpoint computes is a graph within the graph.
    """
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.higher_order.tag_activation_checkpoint:
            replaced(getattr(graph, node.args[0].target))
    mode = _GraphRecognition()
    reader = _Reader(graph, mode)
    placeholders = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
    fakes = [x for x in placeholders if isinstance(x, FakeTensor)]
    if not fakes:
        return graph
    try:
        with fakes[0].fake_mode, mode:
            reader.run(*copies(placeholders))
    except (RuntimeError, TypeError):  # it needs values, or sizes that are still symbols
        return graph
    ends = {node for match in mode.matches for node in (match.first, match.last)}
    for match in [match.read_by(reader.env, ends) for match in mode.matches]:
        _replace(graph, match, reader.env)
    graph.graph.lint()
    graph.recompile()
    return graph


def _replace(graph: fx.GraphModule, match: _Match, values_of: dict[fx.Node, Any]) -> None:
    """Puts one node in the place of the match, unless something else uses its scores or weights."""
    product = match.chain.product
    between = [
        node
        for node, x in values_of.items()
        if node.op not in ("placeholder", "output") and any(y.cell.product is product for y in tree_deferred(x))
    ]
    between += [x for node in between for x in node.users if _target(x) in FULL and set(x.users) <= set(between)]
    between += [x for node in between for x in node.users if x.target is operator.setitem and x.args[0] is node]
    inside = {*between, match.last}
    if any(user not in inside for node in between for user in node.users):
        product.lose("scores or weights are read as well, in compiled code")
        return
    nodes: dict[int, fx.Node] = {}
    for node, x in values_of.items():
        if isinstance(x, Tensor):
            nodes.setdefault(id(x), node)  # not the change in place that follows, which returns the same tensor
    reads = [read.tensor for read in match.chain.reads()[2:]]
    sizes = [*match.chain.sizes, *(n for lead in match.chain.leads for n in lead)]
    symbolic = any(not isinstance(n, int) for n in sizes)
    if not all(id(x) in nodes for x in reads) or (symbolic and match.chain.has_sizes_of_its_own):
        product.lose("masks made within another function, or views of sizes that are symbols, in compiled code")
        return
    (first, args, kwargs), (last, others, _) = _call(match.first), _call(match.last)
    arguments = (args, tensors_of(last, others)[match.values.at], [nodes[id(x)] for x in reads])
    with graph.graph.inserting_before(match.last):
        made = graph.graph.call_function(_attention(match, first, kwargs), arguments)
    made.meta.update(match.last.meta)
    match.last.replace_all_uses_with(made)
    for node in [x for x in reversed(graph.graph.nodes) if x in inside]:
        graph.graph.erase_node(node)


def _target(node: fx.Node) -> Any:
    """The function that Recognition sees when ``node`` runs."""
    if node.op == "call_method":
        return getattr(Tensor, str(node.target))
    return torch.matmul if node.target is operator.matmul else node.target


def _call(product: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function of a product and its arguments, operands by position."""
    func = _target(product)
    return func, *positional(func, product.args, product.kwargs)


def _attention(match: _Match, first: Any, kwargs: dict[str, Any]) -> Callable[..., Tensor]:
    """``match`` as a function of operands, values and what was read between. ``kwargs`` are numbers of the first."""
    found = match.chain

    def pyattn_attention(args: Any, v: Tensor, reads: list[Tensor]) -> Tensor:
        operands = queries_and_keys(first, args, kwargs, type(v))
        assert operands is not None
        q, k = (operands.k, operands.q) if found.swapped else (operands.q, operands.k)
        chain = found.of(q, k, reads)
        if not found.has_sizes_of_its_own:
            chain = chain.resized(operands.lead, (q.shape[-2], k.shape[-2]))
        if found.dropout is not None:
            seed = torch.empty((), dtype=torch.int64, device=v.device).random_()
            chain = chain._replace(dropout=Noise(seed, found.dropout.p, (), found.dtype))
        v = match.values.v(v)
        if match.size > 1:  # copied, so that Inductor reads what was repeated and never writes the repeated tensor
            k, v = (x[..., :: match.size, :, :].unsqueeze(-3).contiguous() for x in (k, v))
            chain = chain._replace(k=Read.of(k))
        out = native.attend(chain, v, match.dtype, unread, match.size)
        return match.values.arranged(out)

    return pyattn_attention
