"""Promise: the switch routes torch's SDPA and its modules here, counts the calls it leaves to torch, and comes off."""

import threading
from contextlib import nullcontext

import pytest
import torch
from support.adapters.gradients import with_gradients
from support.adapters.sdpa import detached, tensors
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention  # bound before the switch is on, as in models
from torch.profiler import profile

from pyattn.adapters.sdpa import counts, disable, enable, enabled, is_enabled

pytestmark = pytest.mark.usefixtures("nothing_counted")


def operators(call):
    with profile() as record:
        call()
    return {event.key for event in record.key_averages()}


def test_calls_come_here_with_their_gradients():
    q, k, v = tensors()
    mask = torch.randn(6, 6, dtype=torch.float64)

    def step():
        return with_gradients(scaled_dot_product_attention, q, k, v, mask)

    plain = step()
    with enabled():
        ours = step()
        assert "pyattn::attention_backward" in operators(step)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    assert counts() == (2, 0, {})
    assert not any("pyattn" in name for name in operators(step))


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_every_grad_mode(mode):
    q, k, v = tensors(torch.float32)
    with enabled(), mode():
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.requires_grad == (mode is nullcontext)
    assert counts().taken == 1


def test_autocast():
    q, k, v = tensors(torch.float32)
    with enabled(), torch.autocast("cpu", torch.bfloat16):
        assert scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
    assert counts().taken == 1


def test_dropout_follows_torchs_seed():
    q, k, v = tensors(torch.float32)
    with enabled():
        torch.manual_seed(1)
        first = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        torch.manual_seed(1)
        assert torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.5), first)
    assert counts().taken == 2


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, dtype=torch.float64)
    return nn.TransformerEncoder(layer, 2)


PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's fast path makes them from padding
@pytest.mark.parametrize("options", [{}, {"src_key_padding_mask": PADDING}, {"mask": torch.ones(6, 6).triu(1).bool()}])
@pytest.mark.parametrize("training", [True, False])
def test_encoders_and_their_fast_path(training, options):
    model = encoder().train(training)
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    grads = torch.enable_grad() if training else torch.no_grad()
    with grads:
        plain = model(x, **options)
        with enabled():
            ours = model(x, **options)
    assert counts() == (2, 0, {}), "one call a layer"
    tokens = ~options.get("src_key_padding_mask", torch.zeros(2, 6, dtype=torch.bool))
    torch.testing.assert_close(ours[tokens], plain[tokens])
    if training:
        weights = list(model.parameters())
        gradients = [torch.autograd.grad(out[tokens].sin().sum(), weights) for out in (ours, plain)]
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


CALLS = {
    "no weights": {"key_padding_mask": PADDING, "need_weights": False},
    "weights": {"key_padding_mask": PADDING},
    "of each head": {"average_attn_weights": False, "attn_mask": torch.randn(8, 6, 6, dtype=torch.float64)},
    "with a hint": {"attn_mask": torch.ones(6, 6).triu(1).bool(), "is_causal": True, "need_weights": True},
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("added", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=["plain", "added keys"])
def test_multihead_attention(training, options, added):
    mha = nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64, **added).train(training)
    x = torch.randn(2, 6, 32, dtype=torch.float64, requires_grad=training)

    def results():
        out, weights = mha(x, x, x, **options)
        if not training:
            return out, weights
        loss = out.sin().sum() + (0 if weights is None else weights.square().sum())
        return out, weights, torch.autograd.grad(loss, (x, *mha.parameters()))

    with torch.set_grad_enabled(training):
        plain = results()
        with enabled():
            ours = results()
    torch.testing.assert_close(ours, plain)
    assert counts() == (1, 0, {})


def test_weights_without_a_batch():
    mha, x = nn.MultiheadAttention(32, 4), torch.randn(6, 32)
    plain = mha(x, x, x)
    with enabled():
        torch.testing.assert_close(mha(x, x, x), plain)
    assert counts() == (1, 0, {})


def test_weights_of_a_hidden_head_are_zero():
    """torch's own are NaN, in its gradients too."""
    mha = nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 6, 32, dtype=torch.float64, requires_grad=True)
    hidden = torch.zeros(8, 6, 6, dtype=torch.bool)
    hidden[1] = True  # the second head of the first sequence
    with enabled():
        out, weights = mha(x, x, x, attn_mask=hidden, average_attn_weights=False)
        (out.sum() + weights.sin().sum()).backward()
    assert not weights[0, 1].any()
    assert (weights.sum(-1) > 0.99).sum() == 7 * 6
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
    assert counts() == (1, 0, {})


def test_weights_are_those_after_dropout():
    mha = nn.MultiheadAttention(32, 4, dropout=0.5, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    with enabled():
        out, weights = mha(x, x, x, average_attn_weights=False)
    v = nn.functional.linear(x, *(p.chunk(3)[2] for p in (mha.in_proj_weight, mha.in_proj_bias)))
    heads = weights @ v.unflatten(-1, (4, 8)).transpose(1, 2)
    torch.testing.assert_close(mha.out_proj(heads.transpose(1, 2).flatten(2)), out)
    assert 0.3 < (weights == 0).double().mean() < 0.7
    assert counts() == (1, 0, {})


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda mha, x: mha(x[:0], x[:0], x[:0]), "query or key without elements"),
        (lambda mha, x: by_torch_alone(mha, x), "torch.nn.attention.sdpa_kernel without FLASH_ATTENTION"),
        (lambda mha, x: dropping_all(mha, x), "nn.MultiheadAttention with need_weights=True that drops every weight"),
    ],
    ids=["empty", "math", "dropped"],
)
def test_weights_that_torch_computes(call, reason):
    mha, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 6, 32)
    with enabled():
        weights = call(mha, x)[1]
    assert weights.dim() == 3
    assert counts() == (0, 0, {reason: 1})


def by_torch_alone(mha, x):
    with sdpa_kernel(SDPBackend.MATH):
        return mha(x, x, x)


def dropping_all(mha, x):
    mha.dropout = 1.0
    return mha(x, x, x)


@pytest.mark.parametrize("kind", ["bool", "float", "wide"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_a_mask_with_is_causal(kind, dropout_p):
    """torch's kernel computes both without gradients of the mask and without dropout; else torch raises."""
    q, k, v = tensors()
    v = v[..., :5] if kind == "wide" else v
    mask = torch.rand(6, 6) < 0.7 if kind == "bool" else torch.randn(6, 6, dtype=torch.float64)
    both = (mask & torch.ones(6, 6).bool().tril()) if kind == "bool" else mask + torch.full((6, 6), -torch.inf).triu(1)

    def call(mask, is_causal):
        torch.manual_seed(1)

        def function(*tensors):
            return scaled_dot_product_attention(*tensors, dropout_p=dropout_p, is_causal=is_causal)

        return with_gradients(function, q, k, v, mask)

    with enabled():
        ours, truth = call(mask, True), call(both, False)
        torch.testing.assert_close(ours[:4], truth[:4])
        if kind != "bool":
            torch.testing.assert_close(ours[4].tril(), truth[4].tril())
            assert not ours[4].triu(1).any()
    assert counts() == (2, 0, {})


def test_nothing_is_recorded_below_autograd():
    q, k, v = tensors()
    with enabled(), torch._C._AutoDispatchBelowAutograd():
        assert not scaled_dot_product_attention(q, k, v).requires_grad
    assert counts().taken == 1


def test_enable_disable_and_blocks():
    enable()
    enable()
    with enabled():
        disable()
        assert is_enabled(), "a block is open"
        with enabled():
            pass
        assert is_enabled()
    assert not is_enabled()
    with enabled():
        enable()
    assert is_enabled()
    disable()
    assert not is_enabled()
    disable()
    with pytest.raises(ZeroDivisionError), enabled():
        _ = 1 / 0
    assert not is_enabled()


def test_what_was_set_before_comes_back(monkeypatch):
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    with enabled():
        assert not torch.backends.mha.get_fastpath_enabled()
    assert not torch.backends.mha.get_fastpath_enabled()
    monkeypatch.undo()


def test_the_switch_belongs_to_the_process():
    """Another thread's calls come here while this one holds the switch, and no longer once it is released."""
    q, k, v = detached()

    def in_a_thread():
        thread = threading.Thread(target=scaled_dot_product_attention, args=(q, k, v))
        thread.start()
        thread.join()

    with enabled():
        in_a_thread()
        assert counts().taken == 1
    in_a_thread()
    assert counts().taken == 1


def test_threads_call_while_others_switch():
    q, k, v = detached()
    exact = scaled_dot_product_attention(q, k, v)
    done, wrong = threading.Event(), []

    def call():
        try:
            while not done.is_set():
                torch.testing.assert_close(scaled_dot_product_attention(q, k, v), exact)
        except BaseException as error:
            wrong.append(error)

    def switch():
        try:
            for _ in range(100):
                with enabled():
                    scaled_dot_product_attention(q, k, v)
        except BaseException as error:
            wrong.append(error)

    callers = [threading.Thread(target=call) for _ in range(2)]
    switchers = [threading.Thread(target=switch) for _ in range(2)]
    for thread in (*callers, *switchers):
        thread.start()
    for thread in switchers:
        thread.join()
    done.set()
    for thread in callers:
        thread.join()
    assert not wrong
    assert not is_enabled()
    assert counts().taken >= 200
