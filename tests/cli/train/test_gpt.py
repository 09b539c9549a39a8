"""Promise: text is read as bytes and split fairly, and the model is a GPT with any implementation of attention."""

import pytest
import torch

from pyattn.cli import InputError
from pyattn.cli.gpt import ATTENTIONS, GPT, Config, attend_reference
from pyattn.cli.text import MAX_BYTES, read
from pyattn.cli.train.compare import rounding_bound
from pyattn.cli.train.loop import Recipe

CONTEXT = 16
SMALL = Config(layers=2, heads=2, width=16, context=CONTEXT)


# Text


def test_a_folder_is_read_without_what_is_not_text(tmp_path):
    (tmp_path / "deep" / "down").mkdir(parents=True)
    (tmp_path / "a.txt").write_bytes(b"a" * 500)
    (tmp_path / "deep" / "down" / "b.md").write_bytes("ü".encode() * 250)
    for name, content in {"x.bin": b"a\0b", "y.txt": b"\xff\xfe", "empty.txt": b"", ".hidden": b"h" * 900}.items():
        (tmp_path / name).write_bytes(content)
    text = read(tmp_path, CONTEXT)
    assert (len(text.train), len(text.validation)) == (900, 100)
    assert sorted(bytes(torch.cat([text.train, text.validation]).tolist())) == sorted(b"a" * 500 + "ü".encode() * 250)
    assert torch.equal(text.train, read(tmp_path, CONTEXT).train)


def test_a_folder_without_text_is_rejected(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"\0" * 900)
    with pytest.raises(InputError, match=r"data must hold text \(UTF-8\), got none in 1 files of"):
        read(tmp_path, CONTEXT)


def test_text_is_capped(tmp_path, monkeypatch):
    monkeypatch.setattr("pyattn.cli.text.MAX_BYTES", 1000)
    (tmp_path / "long.txt").write_bytes(b"x" + "ü".encode() * 5000)  # the cap falls inside a character
    text = read(tmp_path / "long.txt", CONTEXT)
    assert len(text.train) + len(text.validation) == 1000


def test_without_data_the_standard_library_is_read():
    text = read(None, 256)
    assert 2**20 < len(text.train) < MAX_BYTES
    assert b"import " in bytes(text.train.tolist())


def test_batches_are_windows_of_the_text(story):
    text = read(story, CONTEXT)
    content, held_out = bytes(text.train.tolist()), bytes(text.validation.tolist())
    windows = next(text.batches(4, CONTEXT, torch.Generator().manual_seed(0)))
    assert windows.shape == (4, CONTEXT + 1)
    assert all(bytes(window) in content for window in windows.tolist())
    spread = text.validation_windows(5, CONTEXT).tolist()
    assert bytes(spread[0]) == held_out[: CONTEXT + 1]
    assert bytes(spread[-1]) == held_out[-CONTEXT - 1 :]


# The model


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(SMALL).eval()


@pytest.fixture
def windows():
    return torch.randint(256, (3, CONTEXT + 1), generator=torch.Generator().manual_seed(0))


def test_parameters_are_counted_as_in_gpt2(model):
    layers, width, vocab = SMALL.layers, SMALL.width, SMALL.vocab
    block = 12 * width**2 + 13 * width  # qkv 3, project 1, up 4, down 4; biases 3 + 1 + 4 + 1, two norms of 2
    expected = (vocab + CONTEXT) * width + layers * block + 2 * width
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    with torch.device("meta"):
        gpt2 = GPT(Config(12, 12, 768, 1024, 50257))
    assert sum(parameter.numel() for parameter in gpt2.parameters()) == 124_439_808


@pytest.mark.parametrize("name", ATTENTIONS)
def test_later_tokens_leave_earlier_logits_alone(model, windows, name):
    model.attend = ATTENTIONS[name]
    ids = windows[:, :-1]
    later = ids.clone()
    later[:, 9:] = 255 - later[:, 9:]
    before, after = model(ids), model(later)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attentions_give_the_same_loss_and_gradients(model, windows, name):
    results = []
    for attend in (attend_reference, ATTENTIONS[name]):
        model.attend = attend
        loss = model.loss(windows)
        results.append((loss.item(), torch.autograd.grad(loss, model.blocks[0].qkv.weight)[0]))
    (expected, expected_grad), (loss, grad) = results
    assert abs(loss - expected) <= rounding_bound(model, torch.float32, expected)
    share = rounding_bound(model, torch.float32, 1.0)  # relative to the largest gradient, as to the loss
    assert (grad - expected_grad).abs().max() <= share * expected_grad.abs().max()


@pytest.mark.parametrize("window", [(0, 0), (2, 0), (2, -1), (3, 5), (-1, 0), (-1, -1)], ids=str)
def test_a_window_is_left_and_right(windows, window):
    """Changing token 5 changes the logits of the tokens that see it: itself, and as many after it as left says."""
    torch.manual_seed(0)
    model = GPT(Config(1, 2, 16, CONTEXT, window=window)).eval()
    ids = windows[:, :-1]
    other = ids.clone()
    other[:, 5] = 255 - other[:, 5]
    changed = (model(ids) != model(other)).any(-1).any(0)
    last = CONTEXT - 1 if window[0] < 0 else 5 + window[0]
    assert changed.nonzero().flatten().tolist() == list(range(5, last + 1))


def test_dropout_is_drawn_anew_in_training_only(windows):
    model = GPT(Config(2, 2, 16, CONTEXT, dropout=0.5))
    assert model.loss(windows) != model.loss(windows)
    assert model.eval().loss(windows) == model.loss(windows)


def test_longer_input_than_the_context_is_rejected(model):
    with pytest.raises(InputError, match="tokens must fit the context of 16, got 17"):
        model(torch.zeros(1, CONTEXT + 1, dtype=torch.long))


def test_the_learning_rate_rises_and_falls():
    recipe = Recipe(steps=100, batch=1, lr=1.0, eval_every=1, dtype=torch.float32)
    rates = [recipe.rate(step) for step in range(100)]
    assert rates[:6] == sorted(rates[:6])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert max(rates) == 1.0
    assert 0.0 < rates[-1] < 0.001
