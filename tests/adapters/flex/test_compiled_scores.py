"""Promise: a score_mod of the user's own is one operator of a compiled graph, forward and backward."""

import numpy
import pytest
import torch
from support.adapters.any_masks import HOLES, INTERVALS, LENGTH
from support.adapters.any_scores import HEADS, SCORES, drawn, functions, relative
from support.cases import allocated, newer_compiler

from pyattn.adapters.flex import AuxRequest, causal, create_block_mask, flex_attention
from pyattn.adapters.flex.compiled import scores
from pyattn.adapters.flex.compiled.programs import PROGRAMS, name_of
from pyattn.adapters.flex.scores import score_masks

pytestmark = [
    newer_compiler,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning"),
]


@pytest.fixture(autouse=True)
def _new_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function, backend="aot_eager"):
    return torch.compile(function, backend=backend, fullgraph=True)


def results(function, arguments, learned=()):
    """Results and all gradients."""
    found = function(*arguments)
    found = found if isinstance(found, tuple) else (found,)
    weights = [torch.arange(x.numel()).reshape(x.shape).sin() for x in found]
    loss = sum((x.masked_fill(x == -torch.inf, 0.0) * w).sum() for x, w in zip(found, weights, strict=True))
    leaves = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
    return *found, *torch.autograd.grad(loss, [*leaves, *learned], materialize_grads=True)


def assert_same(function, eager, arguments, learned=()):
    for number, (x, y) in enumerate(zip(*(results(f, arguments, learned) for f in (function, eager)), strict=True)):
        assert torch.equal(x, y), number


def attend(q, k, v, score_mod, block_mask=None):
    return flex_attention(q * 2, k, v, score_mod, block_mask, enable_gqa=True) * 2


def shifted(values, factor=2.0):
    return lambda score, b, h, q_idx, kv_idx: score * values[h] * factor


@pytest.mark.parametrize("name", ["partial", "a module", "a bias", "forgetting", "alibi by document"])
def test_scores(name):
    """Made inside of the graph, of its values or of its inputs."""
    function, _ = functions(name)
    tensors = drawn(name, torch.float32)

    def step(q, k, v, *learned):
        return function(q * 2, k, v, *[x * 2 for x in learned])

    assert_same(compiled(step), step, tensors)
    made = SCORES[name].make(*(x.detach().requires_grad_() for x in tensors[3:]))
    learned = [x.requires_grad_() for x in (made.weight, made.bias)] if name == "a module" else []
    assert_same(compiled(attend), attend, [*tensors[:3], made], learned)


def test_inductor():
    """Nothing else is in the graph: C++ that Inductor writes depends on the processor, and takes seconds to compile."""

    def call(q, k, v, score_mod):
        return flex_attention(q, k, v, score_mod, enable_gqa=True)

    assert_same(compiled(call, "inductor"), call, [*drawn("nothing", torch.float32), shifted(torch.rand(HEADS))])


def test_changes_show():
    """In place, of a parameter for another, and of numbers; new functions and lengths compile no graph."""

    class Scored(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gains = torch.nn.Parameter(torch.rand(HEADS))

        def score_mod(self, score, b, h, q_idx, kv_idx):
            return score * self.gains[h]

        def forward(self, q, k, v):
            return attend(q, k, v, self.score_mod)

    module, tensors = Scored(), drawn("nothing", torch.float32)
    function = compiled(module)
    for change in (lambda: None, lambda: module.gains.add_(1.0), lambda: setattr(module, "gains", Scored().gains)):
        with torch.no_grad():
            change()
        assert_same(function, module, tensors, [module.gains])
    torch.compiler.reset()
    function = compiled(attend)
    for number, reach in enumerate((9, 8, 7, 6)):
        table = torch.rand(HEADS, 2 * reach + 1, requires_grad=True)
        arguments = [x.detach()[:, :, reach:].requires_grad_() for x in tensors]
        with torch._dynamo.config.patch(error_on_recompile=number > 1):
            assert_same(function, attend, [*arguments, near(table, reach)], [table])
    for factor in (1.5, 0.5, -1.0):
        assert_same(function, attend, [*tensors, shifted(torch.rand(HEADS), factor)])


def near(table, reach):
    return lambda score, b, h, q_idx, kv_idx: score + table[h, (kv_idx - q_idx).clamp(-reach, reach) + reach]


@pytest.mark.parametrize("score", ["relative", "a square"])
@pytest.mark.parametrize(
    "mask_mod",
    [causal(torch.tensor([3, -2])), INTERVALS["padding"], HOLES["checkerboard"]],
    ids=["offsets", "padding", "checkerboard"],
)
def test_masks(score, mask_mod):
    block_mask = create_block_mask(mask_mod, 2, HEADS, LENGTH, LENGTH, "cpu", 16)
    *tensors, score_mod = *drawn("nothing"), SCORES[score].make(*(torch.rand(s) for s in SCORES[score].shapes))
    assert_same(compiled(attend), attend, [*tensors, score_mod, block_mask])


def test_a_mask_in_the_score_is_remembered(monkeypatch):
    """It is evaluated again when its tensors change, even by a graph that writes to memory unseen, not in each call."""
    ids, counts = torch.zeros(LENGTH, dtype=torch.int64), []
    evaluate = score_masks.evaluate

    def counted(*arguments):
        now = evaluate(*arguments)
        counts.append(now is not arguments[3])
        return now

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(ids[q_idx] == ids[kv_idx], score * score, -torch.inf)

    monkeypatch.setattr(score_masks, "evaluate", counted)
    function, tensors = compiled(attend), drawn("nothing")
    for _ in range(3):
        function(*tensors, score_mod).sum().backward()
    assert sum(counts) == 1
    ids.data[20:] = 1
    assert torch.equal(function(*tensors, score_mod), attend(*tensors, lambda *arguments: score_mod(*arguments)))
    assert sum(counts) == 3


@pytest.mark.parametrize("name", ["relative", "a square"])
def test_autocast_and_lse(name):
    tensors = drawn(name, torch.float32)

    def step(q, k, v, *learned):
        score_mod = SCORES[name].make(*learned)
        with torch.autocast("cpu", torch.bfloat16):
            out, aux = flex_attention(q, k, v, score_mod, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return out.float(), aux.lse

    assert_same(compiled(step), step, tensors)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert torch.equal(compiled(step)(*tensors)[0], step(*tensors)[0])


def test_memory():
    """Forward and backward stay far below the 134 MB of the scores of two heads."""
    tensors = torch.randn(3, 1, 2, 4096, 16, requires_grad=True).unbind()
    block_mask = create_block_mask(causal(), None, None, 4096, 4096, "cpu")
    function, score_mod = compiled(attend), shifted(torch.rand(2, requires_grad=True))

    def step():
        function(*tensors, score_mod, block_mask).sum().backward()

    step()
    assert allocated(step) < 40e6


SLOPES = torch.rand(4, dtype=torch.float64, requires_grad=True)
ABSOLUTE = {
    "a distance": lambda score, b, h, q_idx, kv_idx: score - SLOPES[h] * abs(q_idx - kv_idx),
    "the score": lambda score, b, h, q_idx, kv_idx: abs(score) * SLOPES[h],
    "an argument": lambda score, b, h, q_idx, kv_idx: score + abs(q_idx) * SLOPES[h],
    "what is learned": lambda score, b, h, q_idx, kv_idx: score + abs(SLOPES[h] - 0.5) * kv_idx,
    "the result": lambda score, b, h, q_idx, kv_idx: abs(score * SLOPES[h]),
    "an abs": lambda score, b, h, q_idx, kv_idx: score + abs(abs(q_idx - kv_idx) - 3) * SLOPES[h],
    "in a condition": lambda score, b, h, q_idx, kv_idx: torch.where(abs(q_idx - kv_idx) < 4, score, -torch.inf) * 1.0,
}


@pytest.mark.parametrize("name", ABSOLUTE)
def test_builtin_abs(name):
    """dynamo computes it past the mode that records the score_mod."""
    torch.compiler.reset()
    arguments = [*drawn("nothing"), ABSOLUTE[name]]
    assert_same(compiled(attend), attend, arguments, [SLOPES] if name != "in a condition" else [])


def test_what_a_graph_can_not_record():
    """It breaks there, and the score_mod runs outside of it."""
    places = torch.rand(LENGTH, 2, dtype=torch.float64, requires_grad=True)
    pairs = torch.rand(LENGTH, 2, 3, dtype=torch.float64, requires_grad=True)
    order = numpy.arange(LENGTH)[::-1].copy()

    def parts(score, b, h, q_idx, kv_idx):
        x, y = places[q_idx]
        return score * x + y

    def attribute(score, b, h, q_idx, kv_idx):
        return score + (pairs[q_idx].mT @ pairs[kv_idx]).sum()

    def by_an_array(score, b, h, q_idx, kv_idx):
        return score * places[order][q_idx, 0]

    def speaks(score, b, h, q_idx, kv_idx):
        print(end="")
        return score * places[h, 0]

    for score_mod, tensor, sentence in (
        (parts, places, "pyattn: a score_mod of your own must not read attributes or parts of what depends on its arg"),
        (attribute, pairs, "must not read attributes or parts of what depends on its arguments, got fullgraph=True"),
        (by_an_array, places, "nor give a function of torch anything but tensors and constants, got fullgraph=True"),
        (speaks, places, "print"),
    ):
        torch.compiler.reset()
        arguments = [*drawn("nothing"), score_mod]
        assert_same(torch.compile(attend, backend="aot_eager"), attend, arguments, [tensor])
        torch.compiler.reset()
        with pytest.raises(Exception, match=sentence):
            compiled(attend)(*arguments)


def test_branches_are_refused():
    def score_mod(score, b, h, q_idx, kv_idx):
        return score * 2 if q_idx > 5 else score

    for fullgraph in (False, True):
        torch.compiler.reset()
        with pytest.raises(Exception, match="data-dependent"):
            torch.compile(attend, backend="aot_eager", fullgraph=fullgraph)(*drawn("nothing"), score_mod)


def test_second_derivatives_are_refused():
    q, k, v = drawn("nothing")
    out = compiled(attend, "eager")(q, k, v, relative(torch.rand(HEADS, 19)))
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives of a score_mod of your own are not implemented"):
        first.sum().backward()


def test_names_of_programs(monkeypatch):
    """They follow from the calls; a graph whose program is not there says so."""
    given = ("%argument0",), {}
    functions = torch.tanh, lambda x: x, lambda x: x + 1
    names = [name_of(((function, *given),), "%0") for function in functions]
    assert len(set(names)) == 3
    assert names == [name_of(((function, *given),), "%0") for function in functions]
    assert PROGRAMS[names[2]].replayed([torch.ones(())], [], []) == 2
    function, tensors = compiled(attend, "eager"), drawn("nothing")
    function(*tensors, shifted(torch.rand(HEADS)))
    monkeypatch.setattr(scores, "PROGRAMS", {})
    with pytest.raises(RuntimeError, match="pyattn: a score_mod must be compiled in the process that runs it, got sco"):
        function(*tensors, shifted(torch.rand(HEADS)))
