"""Promise: chapter 4's classes continue over their own caches as the plain ones do, within a window as well."""

from typing import Any

import pytest
import torch
from support.assertions import refused
from support.modules import ARGUMENTS, CONTEXT_LENGTH, D_IN, assert_same, class_of, sequences

from pyattn import nn, reference
from pyattn.nn import growing_cache

NAME = "MultiHeadAttention"
STEPS = (5, 1, 1, 3, 1, 6, 1)
"""New tokens per call; 18 in all."""

LATENT, SLIDING = "book.MultiHeadLatentAttention", "MultiHeadAttentionWithSWA"
SIZES = (D_IN, 8, 0.0, 2)

CASES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "MultiHeadAttention": (NAME, ARGUMENTS[NAME]),
    "max_seq_len": (NAME, (*ARGUMENTS[NAME], 18)),
    "window_size": (NAME, (*ARGUMENTS[NAME], None, 4)),
    "window_size 1": (NAME, (*ARGUMENTS[NAME], None, 1)),
    "a window wider than the text": (NAME, (*ARGUMENTS[NAME], None, 30)),
    "sliding": (SLIDING, ARGUMENTS[SLIDING]),
    "sliding in no window": (SLIDING, SIZES),
    "latent": (LATENT, ARGUMENTS[LATENT]),
    "latent of the usual size, with biases": (LATENT, (*SIZES, True)),
}
each_case = pytest.mark.parametrize("case", CASES)


def twins(case: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The native and the plain module in float64."""
    name, arguments = CASES[case]
    made = []
    for home in (nn, reference):
        torch.manual_seed(123)
        made.append(class_of(name, home)(*arguments).double())
    return made[0], made[1]


@each_case
@pytest.mark.parametrize("fewest", [1, 256])
def test_equals_plain(monkeypatch, case, fewest):
    """The cache grows several times, is dropped on request and by a call without it, and takes other batches."""
    monkeypatch.setattr(growing_cache, "FEWEST", fewest)
    native, plain = twins(case)
    x = sequences(2, sum(STEPS))
    for use in (x, x[:1], x.repeat(2, 1, 1)):
        whole = plain(use)
        assert_same(native(use), whole)
        steps = [native(part, use_cache=True) for part in use.split(STEPS, 1)]
        assert_same(torch.cat(steps, 1), whole)
        assert_same(torch.cat([plain(part, use_cache=True) for part in use.split(STEPS, 1)], 1), whole)
        native(use[:, :2])
    for part in x.split(STEPS, 1):
        for module in (native, plain):
            module.reset_cache()
        assert_same(native(part, True), plain(part, True))


@each_case
def test_states_go_both_ways(case):
    native, plain = twins(case)
    assert list(native.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(native.state_dict(), strict=True)
    native.load_state_dict(plain.state_dict(), strict=True)
    native(sequences(1, 3), use_cache=True)
    assert list(native.state_dict()) == list(plain.state_dict())


def test_a_window_outlasts_the_context():
    """The ring buffer stays as small as the window and the longest chunk need, and rotary positions count on."""
    native = nn.MultiHeadAttention(D_IN, 8, CONTEXT_LENGTH, 0.0, 2, window_size=4, rotary=100.0).double()
    longer = nn.MultiHeadAttention(D_IN, 8, 600, 0.0, 2, window=(3, 0), rotary=100.0).double()
    longer.load_state_dict(native.state_dict())
    x = sequences(2, 600)
    steps = [native(part, use_cache=True) for part in x.split(9, 1)]
    assert_same(torch.cat(steps, 1), longer(x))
    assert native._own_cache.cache.max_seqlen == growing_cache.FEWEST


def test_the_context_is_the_end_without_a_window():
    for most, made in ((CONTEXT_LENGTH, twins(NAME)[0]), (18, twins("max_seq_len")[0])):
        made(sequences(2, 10), use_cache=True)
        message = f"the module's cache must hold at most {most} tokens, its max_seq_len or context_length, got 10 and "
        with refused(ValueError, message):
            made(sequences(2, 10), use_cache=True)
        made(sequences(2, most - 10), use_cache=True)


def test_the_window_may_be_set():
    native, plain = twins("window_size")
    native.window_size = plain.window_size = 2
    x = sequences(2, 9)
    assert native.window == (1, 0)
    assert "window_size=2" in repr(native)
    assert_same(native(x), plain(x))
    native(x, use_cache=True)
    native.window_size = 3
    message = "a module's window must not change before reset_cache(), because its cache has dropped or kept keys "
    with refused(ValueError, message):
        native(x, use_cache=True)
    native.reset_cache()
    assert_same(native(x, use_cache=True), (setattr(plain, "window_size", 3), plain(x))[1])


def test_options_of_a_call():
    """Masks and biases have the keys so far; weights too; lengths pad on the right."""
    native, plain = twins(NAME)
    x, mask = sequences(2, 9), torch.rand(2, 2, 9, 9) < 0.7
    native(x[:, :5], use_cache=True), plain(x[:, :5], use_cache=True)
    own = {"mask": mask[:, :, 5:], "bias": torch.randn(9).double()}
    out, weights = native(x[:, 5:], use_cache=True, need_weights=True, **own)
    assert_same(out, plain(x[:, 5:], use_cache=True, **own))
    assert weights.shape == (2, 2, 4, 9)
    native.reset_cache()
    native(x[:, :5], use_cache=True, lengths=[5, 3])
    last = native(x[:, 5:6], use_cache=True)
    assert_same(last[1:], native(torch.cat([x[1:, :3], x[1:, 5:6]], 1))[:, 3:])


def test_layers_may_be_given_other_windows():
    """The book's model sets the attribute of each layer after making it."""
    native, plain = twins("sliding")
    x = sequences(2, 9)
    for size in (None, 2, 7):
        native.sliding_window_size = plain.sliding_window_size = size
        native.reset_cache()
        assert_same(native(x), plain(x))
        steps = [native(part, use_cache=True) for part in x.split(2, 1)]
        assert_same(torch.cat(steps, 1), plain(x))
    native.sliding_window_size = 0
    with refused(ValueError, "window_size must be at least 1, got 0"):
        native(x)


def test_a_latent_cache_is_small():
    """One row of latent_dim numbers for each token; weights are those of every head, absorbed or not."""
    native, _ = twins("latent")
    x = sequences(2, 9)
    out, weights = native(x, need_weights=True)
    native(x[:, :5], use_cache=True)
    for at in range(5, 9):
        last, shown = native(x[:, at : at + 1], use_cache=True, need_weights=True)
        assert_same(last, out[:, at : at + 1])
        assert_same(shown, weights[:, :, at : at + 1, : at + 1])
    cache = native._own_cache.cache
    assert cache.k.shape[1:] == (1, growing_cache.FEWEST, 5)
    assert cache.shared_values


def test_dropout_over_latent_vectors():
    """The bias of W_UV counts by the weights that are left."""
    native, _ = twins("latent of the usual size, with biases")
    native.dropout.p = 1.0
    x = sequences(1, 4)
    native(x[:, :3], use_cache=True)
    assert_same(native(x[:, 3:], use_cache=True), native.out_proj.bias.expand(1, 1, -1))


DEEPSEEK = {"hidden_size": 64, "num_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
DEEPSEEK |= {"qk_rope_head_dim": 4, "v_head_dim": 8}
BOOK = {"d_in": 64, "d_out": 64, "dropout": 0.0, "num_heads": 4}


def test_either_latent_class_names_the_other():
    for wrong, right, given in (
        (nn.book.MultiHeadLatentAttention, "pyattn.nn.MultiHeadLatentAttention", DEEPSEEK),
        (nn.MultiHeadLatentAttention, "pyattn.nn.book.MultiHeadLatentAttention", BOOK),
    ):
        first = [*given.values()]
        for positional, named in (([], given), (first, {}), (first[:2], dict([*given.items()][2:]))):
            message = rf"^pyattn: MultiHeadLatentAttention takes .*; {right} takes .*: use that one for these arguments"
            with pytest.raises(TypeError, match=message):
                wrong(*positional, **named)
    with pytest.raises(TypeError, match="use that one"):
        nn.MultiHeadLatentAttention(64, 64, 0.0, 4, latent_dim=16)
    with refused(TypeError, "MultiHeadLatentAttention has no argument latent_dims (did you mean latent_dim?), got 3"):
        nn.book.MultiHeadLatentAttention(**BOOK, latent_dims=3)
    nn.MultiHeadLatentAttention(**DEEPSEEK), nn.book.MultiHeadLatentAttention(**BOOK)


def test_a_projection_that_cannot_be_absorbed():
    """It works where it is called; a ring buffer over latent vectors needs the matrix."""
    native, plain = twins("latent")
    for module in (native, plain):
        module.W_UK = torch.nn.Sequential(module.W_UK, torch.nn.Tanh())
    x = sequences(2, 9)
    assert_same(native(x), plain(x))
    steps = [native(part, use_cache=True) for part in x.split((5, 1, 3), 1)]
    assert_same(torch.cat(steps, 1), plain(x))


def test_calls_without_tokens_leave_no_batch_size_behind():
    """A first call that is refused or empty."""
    native, plain = twins(NAME)
    with refused(TypeError, "bias must have dtype torch.float64 or torch.float32, got torch.float16"):
        native(sequences(3, 4), use_cache=True, bias=torch.zeros(4).half())
    native(sequences(1, 0), use_cache=True)
    x = sequences(2, 4)
    assert_same(native(x, use_cache=True), plain(x))


@pytest.mark.parametrize("name", [NAME, LATENT, SLIDING, "MultiHeadAttentionWithDSA"])
def test_a_refused_call_without_the_cache_keeps_it(name):
    native = class_of(name)(*(SIZES if "DSA" in name else ARGUMENTS[name])).double()
    x = sequences(2, 9)
    native(x[:, :5], use_cache=True)
    dropout, native.dropout = native.dropout, torch.nn.ReLU()
    with refused(TypeError, "dropout must be nn.Dropout or nn.Identity, got ReLU"):
        native(x)
    native.dropout = dropout
    assert_same(native(x[:, 5:], use_cache=True), native(x)[:, 5:])


def test_refusals():
    native, _ = twins(NAME)
    with refused(TypeError, "use_cache must be bool, got torch.Tensor of shape (3, 3)"):
        native(sequences(2, 3), torch.ones(3, 3).bool())
    with refused(ValueError, "window_size must come without window, got 4 and (3, 0)"):
        nn.MultiHeadAttention(D_IN, 8, 9, 0.0, 2, window_size=4, window=(3, 0))
    native.mask = torch.zeros(CONTEXT_LENGTH, CONTEXT_LENGTH)
    with refused(NotImplementedError, "an assigned mask is not supported with kv_cache, got one of shape (19, 19)"):
        native(sequences(2, 3), use_cache=True)
