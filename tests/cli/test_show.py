"""Promise: ``pyattn show`` draws the weights of a checkpoint's heads, or says in one sentence what is wrong."""

import pytest
import torch
from matplotlib.image import imread

from pyattn import reference
from pyattn.cli import checkpoint, show
from pyattn.cli.gpt import GPT, Config

TEXT = "Grüße\n\tan sie"


@pytest.fixture
def run(tmp_path):
    model = GPT(Config(layers=2, heads=2, width=8, context=24))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20)  # weights that differ from each other
    checkpoint.save(model, tmp_path / "model.safetensors")
    return tmp_path


def test_a_picture_of_each_head(run, shown, monkeypatch):
    printed = shown(["show", str(run), "--text", TEXT]).out
    assert printed == f"2 layers, 2 heads, 15 bytes: {run / 'weights.png'}\n"
    whole = imread(run / "weights.png")
    monkeypatch.setattr(show.chart, "LABELS", 4)  # as for a long text, a label here and there
    shown(f"show {run / 'model.safetensors'} --layer 1 --head 0 --out {run / 'one.png'}")
    one = imread(run / "one.png")
    assert (whole.shape[1], one.shape[1]) == (9 * 120, 5 * 120)
    assert whole.shape[0] > 1.5 * one.shape[0]


def test_what_is_drawn_are_the_weights_of_the_chosen_heads(run):
    model, seen = checkpoint.load(run / "model.safetensors"), []

    def attend(q, k, v, dropout_p):
        out, weights = reference.attention(q, k, v, return_weights=True)
        seen.append(weights)
        return out

    ids = torch.tensor(list(TEXT.encode()))
    found = show.weights_of(model, ids, [1, 0], [1])
    model.attend = attend
    model(ids[None])
    torch.testing.assert_close(found, torch.stack([seen[1][0, 1:], seen[0][0, 1:]]))
    assert not found.triu(1).any()
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 1, 15))


def test_every_byte_has_a_label():
    labels = show.labels_of(TEXT.encode() + b"\x00")
    assert labels == ["G", "r", "c3", "bc", "c3", "9f", "e", "↵", "⇥", "a", "n", "␣", "s", "i", "e", "00"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("nowhere", "run must be a folder that pyattn train wrote, or its checkpoint, got nowhere"),
        ("{run}/..", "run must be a folder that pyattn train wrote, or its checkpoint, got "),
        ("{run} --layer 2", "--layer must lie between 0 and 1, got 2"),
        ("{run} --head 0 -1", "--head must lie between 0 and 1, got -1"),
        ("{run} --text=", "--text must have 1 to 24 bytes, the model's context, got 0"),
        ("{run} --text abcdefghijklmnopqrstuvwxyz", "--text must have 1 to 24 bytes, the model's context, got 26"),
        ("{run} --text a --out /dev/null/a.png", "--out must be a file that can be written to, got /dev/null/a.png"),
    ],
)
def test_bad_values_are_one_sentence(run, refusal, options, message):
    assert refusal(f"show {options.format(run=run)}").startswith(message)
