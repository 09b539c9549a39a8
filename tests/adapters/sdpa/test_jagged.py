"""Promise: under the switch, models that call torch's function on jagged nested tensors train natively."""

import pytest
import torch
from support.assertions import assert_close, graph_of
from support.jagged import drawn
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from pyattn.adapters.sdpa import counts, enabled

pytestmark = [
    pytest.mark.usefixtures("nothing_counted"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # torch's compiler, of a jagged view
]


def one_by_one(q, k, v, **named):
    qkvs = zip(q, k, v, strict=True)
    return torch.cat([scaled_dot_product_attention(*(t[None] for t in qkv), **named)[0] for qkv in qkvs], 1)


@pytest.mark.parametrize("keys", [None, (4, 9, 2, 5)], ids=["self", "cross"])
@pytest.mark.parametrize("named", [{}, {"is_causal": True}, {"is_causal": True, "scale": 0.3}], ids=str)
def test_forward_and_gradients(named, keys):
    """As torch's own function, sequence by sequence: is_causal is upper-left."""
    q, k, v = drawn(keys=keys)
    with enabled():
        out = scaled_dot_product_attention(q, k, v, enable_gqa=True, **named)
    assert counts() == (1, 0, {})
    assert (out.shape, out.offsets()) == ((*q.shape[:3], 6), q.offsets())
    exact = one_by_one(*(t.unbind() for t in (q, k, v)), enable_gqa=True, **named)
    assert_close(out.values(), exact)
    grads = [torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (out.values(), exact)]
    assert_close(*([g.values() for g in some] for some in grads))


def test_dropout():
    q, k, v = drawn(dtype=torch.float32)
    with enabled():
        torch.manual_seed(1)
        first = scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True).values()
        torch.manual_seed(1)
        assert torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True).values(), first)
        assert not torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True).values(), first)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("wrap", [lambda model: model, graph_of], ids=["eager", "compiled"])
def test_a_model_trains(wrap):
    """torch 2.13 has no kernel for this on a CPU: "No viable backend"."""
    torch.manual_seed(0)
    model = Model()
    call, losses = wrap(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x = torch.nested.nested_tensor([torch.randn(n, 16) for n in (3, 11, 1)], layout=torch.jagged)
    with enabled():
        for _ in range(4):
            loss = call(x).values().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert counts().torch == {}


def test_holes_and_offsets_apart():
    """As torch.nested.narrow gives them, and k and v nested apart, as torch itself takes them."""
    padded = torch.randn(3, 9, 2, 8)
    x = torch.nested.narrow(padded, 1, torch.tensor([0, 2, 1]), torch.tensor([4, 1, 6]), layout=torch.jagged)
    parts = [t.detach().transpose(0, 1) for t in x.unbind()]
    k, v = (torch.nested.nested_tensor([t.transpose(0, 1) for t in parts], layout=torch.jagged) for _ in "kv")
    with enabled():
        for given in ((x, x, x), (k, k, v)):
            out = scaled_dot_product_attention(*(t.transpose(1, 2) for t in given), is_causal=True)
            assert_close(out.values(), one_by_one(parts, parts, parts, is_causal=True), 1e-6)
    assert counts() == (2 + 6, 0, {})  # one by one, the switch takes dense calls, too


def test_calls_left_to_torch():
    """Their results and errors are torch's."""
    q, k, v = drawn((3, 5), dtype=torch.float32)
    x = torch.nested.nested_tensor_from_jagged(torch.randn(8, 2, 8), k.offsets())
    with enabled():
        with pytest.raises(ValueError, match="Masks are not yet supported"):
            scaled_dot_product_attention(q, k, v, attn_mask=q, enable_gqa=True)
        with pytest.raises(ValueError, match="to have the same dtype"):
            scaled_dot_product_attention(q.double(), k, v, enable_gqa=True)
        assert counts().taken == 0
        assert [*counts().torch] == ["nested tensors with attn_mask", "k must have dtype float64"]
        out = scaled_dot_product_attention(x, x, x)  # dense positions: an ordinary call for the values
    assert_close(out.values(), scaled_dot_product_attention(x, x, x).values(), 1e-6)
    assert counts().taken == 1
