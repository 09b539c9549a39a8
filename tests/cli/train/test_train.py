"""Promise: a training leaves a model, a curve and a true report of both, whatever happens meanwhile."""

import math
import re
from pathlib import Path

import pytest
import torch
from matplotlib import image
from torch import Tensor

from pyattn.cli import chart, checkpoint
from pyattn.cli.chart import draw
from pyattn.cli.gpt import ATTENTIONS, GPT
from pyattn.cli.text import read
from pyattn.cli.train import command, loop

CONTEXT = 16


def validation_loss(path: Path, data: Path) -> float:
    windows = read(data, CONTEXT).validation_windows(command.VALIDATION_WINDOWS, CONTEXT)
    with torch.no_grad():
        return checkpoint.load(path).loss(windows).item()


@pytest.mark.parametrize("losses", [loop.Losses(), loop.Losses({1: 5.0, 2: math.inf}, {0: 5.5})], ids=["none", "some"])
def test_a_curve_is_a_picture_however_training_ended(tmp_path, losses):
    draw(losses, 3.0, "title", tmp_path / "loss.png")
    pixels = image.imread(tmp_path / "loss.png")
    assert pixels.shape[:2] == (750, 1200)
    assert len({tuple(pixel) for pixel in pixels[::5, ::5].reshape(-1, pixels.shape[2]).tolist()}) > 2


def test_training_leaves_a_model_a_curve_and_the_truth_about_them(train_on, story, monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr(chart, "draw", lambda *given: (drawn.append(given), draw(*given)))
    code, folder = train_on()
    shown = capsys.readouterr().out
    assert code == 0
    ((losses, unigram_loss, _, path),) = drawn
    assert (list(losses.train), list(losses.validation)) == ([*range(1, 7)], [0, 3, 6])
    assert unigram_loss == read(story, CONTEXT).unigram_loss()
    assert path == folder / "loss.png"
    assert f"validation loss {validation_loss(folder / 'model.safetensors', story):.4f} nats a byte" in shown
    assert "loads back, same validation loss" in shown
    assert "attention pyattn: " in shown
    assert "losses agree to" in shown
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("step ")] == ["0", "3"]


def test_training_learns(train_on, story):
    _, folder = train_on("--steps", "100", "--lr", "2e-2", "--eval-every", "100")
    assert validation_loss(folder / "model.safetensors", story) < 0.5 * read(story, CONTEXT).unigram_loss()


@pytest.mark.parametrize("options", ["--attention sdpa", "--attention reference", "--dtype bfloat16"])
def test_training_takes_other_attentions_and_dtypes(train_on, options, capsys):
    assert train_on(*options.split())[0] == 0
    assert "loads back, same validation loss" in capsys.readouterr().out


def test_a_wrong_attention_is_found_out(train_on, monkeypatch, capsys):
    def looks_ahead(q, k, v, dropout_p):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    monkeypatch.setitem(ATTENTIONS, "sdpa", looks_ahead)
    assert train_on("--attention", "sdpa")[0] == 1
    assert "losses DIFFER by" in capsys.readouterr().out


def test_a_checkpoint_that_changes_is_found_out(train_on, monkeypatch, capsys):
    load = checkpoint.load

    def load_scaled(*args):
        model = load(*args)
        model.token.weight.data *= 1.01
        return model

    monkeypatch.setattr(checkpoint, "load", load_scaled)
    assert train_on()[0] == 1
    assert "loads back to ANOTHER validation loss" in capsys.readouterr().out


def test_models_without_learned_positions_read_on(train_on, story, capsys):
    """The same bytes are scored at the end of texts of several lengths."""
    _, folder = train_on("--alibi", "--window", "3", "0", "--sinks")
    shown = capsys.readouterr().out
    model, text = checkpoint.load(folder / "model.safetensors"), read(story, CONTEXT)
    texts = text.validation_windows(loop.TEXTS, 256)
    found = re.search(r"past the training length, validation loss of the same bytes at the end of (.*)", shown)[1]
    losses = dict(part.split(": ") for part in found.split(", "))
    assert list(losses) == ["16", "32", "64", "128", "256"]
    for length, loss in losses.items():
        ids = texts[:, -int(length) - 1 :]
        with torch.no_grad():
            logits = model(ids[:, :-1])[:, -8:]
        exact = torch.nn.functional.cross_entropy(logits.mT, ids[:, -8:]).item()
        assert float(loss) == pytest.approx(exact, abs=1e-4)
    train_on(out="learned")
    assert "past the training length" not in capsys.readouterr().out


# Training that diverges


def poison(monkeypatch: pytest.MonkeyPatch, training: bool, first: int, factor: float) -> None:
    """Multiplies the training or validation losses by ``factor`` from batch number ``first`` on."""
    loss_of, batches = loop.loss_of, []

    def poisoned(model: GPT, windows: Tensor, dtype: torch.dtype) -> Tensor:
        batches.extend([windows] if model.training == training else [])
        return loss_of(model, windows, dtype) * (factor if model.training == training and len(batches) >= first else 1)

    monkeypatch.setattr(loop, "loss_of", poisoned)


@pytest.mark.parametrize(
    ("training", "first", "factor", "reason", "kept"),
    [
        (True, 1, math.inf, "the training loss at step 1 is inf", 0),
        (True, 5, math.nan, "the training loss at step 5 is nan", 3),
        (False, 3, math.nan, "the validation loss at step 3 is nan", 0),
        (False, 5, math.inf, "the validation loss at step 6 is inf", 3),
    ],
)
def test_divergence_keeps_the_last_good_model(
    train_on, story, monkeypatch, capsys, training, first, factor, reason, kept
):
    """A validation has two batches."""
    with monkeypatch.context() as patch:
        poison(patch, training, first, factor)
        code, folder = train_on()
    shown = capsys.readouterr()
    model = folder / "model.safetensors"
    assert code == 1
    assert (
        shown.err
        == f"pyattn: training diverged, {reason}; {model} has the weights of step {kept}: lower --lr, got 0.005\n"
    )
    assert f"step {kept:5}  validation loss {validation_loss(model, story):.4f}" in shown.out
    assert "sample" not in shown.out
    assert (folder / "loss.png").exists()


# Written files


def test_an_earlier_run_is_overwritten_only_on_request(train_on, capsys):
    _, folder = train_on("--seed", "1")
    before = (folder / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert train_on("--seed", "2")[0] == 2
    message = f"--out must be a new folder, or --overwrite be given, got {folder} with "
    files = "model.safetensors and training.safetensors and loss.png"
    assert capsys.readouterr() == ("", f"pyattn: {message}{files}\n")
    assert (folder / "model.safetensors").read_bytes() == before
    assert train_on("--seed", "2", "--overwrite")[0] == 0
    assert (folder / "model.safetensors").read_bytes() != before
