"""Gradients of repeated keys and values: whoever reads those of all heads gets them, in every way that torch has."""

import math

import pytest
import torch
from support.adapters.groups import (
    FUTURE,
    SIZE,
    Counting,
    G,
    H,
    T,
    assert_same,
    attention,
    both,
    inputs,
    repeated,
    results,
)
from torch.nn import functional

from pyattn.adapters import scratch


@pytest.fixture
def count(monkeypatch):
    return Counting(monkeypatch)


def hooks(kind):
    """Gradients of the repeated tensors, read in one way, and all results."""
    read = []

    def repeat(k):
        found = repeated(k)
        if kind == "before":
            found.register_hook(lambda g: read.append(g.clone()))
        elif kind == "changing":
            found.register_hook(lambda g: g * 2)
        elif kind == "changing in place":
            found.register_hook(lambda g: g.mul_(2))
        elif kind == "of the node":
            found.grad_fn.register_prehook(lambda gs: (gs[0] * 3,))
        elif kind == "retained":
            found.retain_grad()
        read.append(found)
        return found

    def code(q, k, v):
        out = attention(q, k, v)
        if kind == "after":
            for x in (k, v):
                x.register_hook(lambda g: read.append(g + 0))
        if kind == "used twice":
            out = out + (k + v).sum() * 3 + k
        return out

    found = results(repeat, code)
    return found, [x.grad if kind == "retained" else x for x in read]


@pytest.mark.parametrize(
    "kind", ["before", "after", "changing", "changing in place", "of the node", "retained", "used twice"]
)
def test_readers_of_the_gradient(kind, count):
    assert_same(*both(hooks, kind))
    assert (count.taken, count.whole) == (1, 1)


def test_gradients_of_repeated_tensors(count):
    """They outlive the pass, and inputs that change after it."""

    def code():
        q, k, v = inputs()
        made = repeated(k), repeated(v)
        found = torch.autograd.grad(attention(q, *made).square().sum(), [*made, q])
        with torch.no_grad():
            q.zero_()
        return [x + 0 for x in found], [x.tolist() for x in found]

    assert_same(*both(code))
    assert (count.taken, count.whole) == (1, 1)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_some_gradients(wanted, count):
    def code():
        tensors = inputs()
        out = attention(tensors[0], *map(repeated, tensors[1:]))
        return [torch.autograd.grad(out.square().sum(), [tensors[i] for i in wanted], retain_graph=True) for _ in "ab"]

    assert_same(*both(code))
    assert (count.taken, count.whole) == (1, 0)


def second(hooked):
    """Second derivatives, the repeated tensors' own among them."""
    q, k, v = inputs()
    made = repeated(k), repeated(v)
    read = []
    for x in made if hooked else ():
        x.register_hook(lambda g: read.append(g.detach() + 0))
    first = torch.autograd.grad(attention(q, *made).sin().sum(), [q, k, v], create_graph=True)
    return read, first, torch.autograd.grad(sum(x.square().sum() for x in first), [q, k, v])


@pytest.mark.parametrize("hooked", [False, True])
def test_second_derivatives(hooked, count):
    assert_same(*both(second, hooked))
    assert count.taken == 1


def test_queries_made_from_keys(count):
    """And keys that are their own values."""

    def code():
        k = inputs()[1]
        made = repeated(k)
        first = torch.autograd.grad(attention(made.sin(), made, made).sin().sum(), k, create_graph=True)
        return first, torch.autograd.grad(first[0].square().sum(), k)

    assert_same(*both(code))
    assert count.taken == 1


def test_dropout_of_all_heads_is_that_of_groups(count):
    """The same draws: sums of the gradients of all heads are those of groups."""
    q, k, v = inputs()
    with scratch.enabled():
        made = repeated(k), repeated(v)
        out = functional.dropout((q @ made[0].mT).softmax(-1), 0.4) @ made[1]
        of_all = torch.autograd.grad(out.square().sum(), made, retain_graph=True)
        of_groups = torch.autograd.grad(out.square().sum(), (k, v))
    assert_same([x.unflatten(1, (G, SIZE)).sum(2) for x in of_all], list(of_groups))
    assert (count.taken, count.whole) == (1, 1)


def test_biases_and_temperatures(count):
    def code():
        q, k, v = inputs()
        bias, heat = (torch.linspace(-1, 1, n, dtype=q.dtype).requires_grad_() for n in (H * T * T, H))
        made = repeated(k), repeated(v)
        scores = (q @ made[0].mT * heat.view(H, 1, 1) + bias.view(H, T, T)).masked_fill(FUTURE, -math.inf)
        out = scores.softmax(-1) @ made[1]
        return torch.autograd.grad(out.square().sum(), (q, k, v, bias, heat, *made))

    assert_same(*both(code))
    assert (count.taken, count.whole) == (1, 1)


def test_inputs_that_changed_before_a_late_read():
    """An error, as in torch's backward."""
    q, k, v = inputs()
    changing = q * 1
    with scratch.enabled():
        made = repeated(k)
        out = attention(changing, made, repeated(v))

    def change(g):
        with torch.no_grad():
            changing.zero_()
        g.sum()

    made.register_hook(change)
    with pytest.raises(RuntimeError, match="pyattn: queries, keys, values and masks must not change in place"):
        out.sum().backward()


def test_a_change_in_place_is_noticed():
    q, k, v = inputs()
    changing = q * 1
    with scratch.enabled():
        out = attention(changing, repeated(k), repeated(v))
        changing.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_several_gradients_at_once(count):
    def code():
        q, k, v = inputs()
        made = repeated(k), repeated(v)
        out = attention(q, *made)
        several = torch.stack([torch.ones_like(out), out.detach()])
        return torch.autograd.grad(out, (q, k, v, *made), several, is_grads_batched=True)

    assert_same(*both(code))
    assert count.taken == 1


def test_leaves_keep_gradients_that_are_plain_tensors(count):
    def code():
        q, k, v = inputs()
        made = [repeated(x).detach().requires_grad_() for x in (k, v)]
        attention(q, *made).square().sum().backward()
        return [x.grad for x in made]

    ours, plain = both(code)
    assert_same(ours, plain)
    assert {type(x) for x in ours} == {torch.Tensor}
    assert count.taken == 0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_anomalies_are_looked_for(count):
    with torch.autograd.detect_anomaly():
        assert_same(*both(results, repeated))
    assert (count.taken, count.whole) == (1, 1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_backward(count):
    def code():
        q, k, v = inputs()
        out = attention(q, repeated(k), repeated(v))
        return out, (q, k, v)

    (ours, tensors), (plain, others) = both(code)
    plain.square().sum().backward()
    torch.compiler.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        ours.square().sum().backward()
    torch.compiler.reset()
    assert_same([x.grad for x in tensors], [x.grad for x in others])
    assert count.taken == 1
