"""Promise: generation over a cache equals rereading the whole text for each byte, or it stops and says why."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from pyattn.cli import checkpoint
from pyattn.cli.generate import sampling
from pyattn.cli.gpt import GPT, Config

CONTEXT = 16
MODELS: dict[str, dict[str, Any]] = {
    "learned positions": {},
    "ALiBi": {"alibi": True},
    "window": {"window": (4, 0), "alibi": True},
    "window of learned positions": {"window": (4, 0)},
    "all": {"window": (5, 0), "sinks": True, "alibi": True},
}


def made(**options: Any) -> GPT:
    """A model whose logits differ by more than rounding does."""
    torch.manual_seed(0)
    model = GPT(Config(layers=2, heads=2, width=16, context=CONTEXT, **options)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def text_of(model: GPT, cached: bool, ids: Tensor, count: int, seed: int = 0, **draw: Any) -> Tensor:
    """The generated tokens, (B, count)."""
    reads = sampling.Cached(model, len(ids), ids.shape[1] + count) if cached else sampling.recomputing(model)
    draw = {"temperature": 0.0, "top_k": 40} | draw
    return torch.cat([*sampling.continuation(reads, ids, count, torch.Generator().manual_seed(seed), **draw)], 1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [3, 256])
def test_same_tokens_as_recomputing(monkeypatch, name, chunk):
    """The prompt comes in chunks, and a window's ring wraps several times; with ALiBi, past the context."""
    monkeypatch.setattr(sampling, "CHUNK", chunk)
    model = made(**MODELS[name])
    ids = torch.randint(256, (3, 7))
    count = sampling.room(model.config, 7, 40)
    assert count == (40 if model.config.alibi else CONTEXT - 7)
    for draw in ({}, {"temperature": 1.0}):
        ours, expected = (text_of(model, cached, ids, count, **draw) for cached in (True, False))
        assert torch.equal(ours, expected)
    caches = sampling.caches_for(model, 3, 7 + count)
    ring = chunk == 3 and model.config.window != (-1, -1)
    assert all((cache.window is not None) == ring for cache in caches)
    assert not ring or caches[0].max_seqlen == model.config.window[0] + chunk


def test_tokens_are_drawn_by_the_seed():
    model, ids = made(alibi=True), torch.randint(256, (3, 7))

    def draw(top_k, seed):
        return text_of(model, True, ids, 30, seed, temperature=1.0, top_k=top_k)

    assert torch.equal(draw(40, seed=1), draw(40, seed=1))
    assert not torch.equal(draw(40, seed=1), draw(40, seed=2))
    assert torch.equal(draw(1, seed=1), draw(1, seed=2))
    assert torch.equal(draw(1, seed=1), text_of(model, True, ids, 30))


# The command


@pytest.fixture
def runs(tmp_path):
    for name, options in (("learned", {}), ("endless", {"window": (4, 0), "sinks": True, "alibi": True})):
        (tmp_path / name).mkdir()
        checkpoint.save(made(**options).float(), tmp_path / name / checkpoint.MODEL)
    return tmp_path


def test_the_text_and_its_speed_are_shown(runs, shown):
    command = f"generate {runs / 'endless'} --prompt Grüße --tokens 40"
    printed = [shown(command), shown(f"{command} --no-cache")]
    for _, err in printed:
        assert " tokens/s" in err
        assert "40 bytes after 7 in " in err
        assert "stopped" not in err
    assert printed[0].out == printed[1].out
    assert printed[0].out.startswith("Grüße")


def test_a_bar_shows_tokens_a_second(runs, shown, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert "tokens/s]" in shown(f"generate {runs / 'endless'} --tokens 40").err


def test_learned_positions_stop_at_the_context(runs, shown):
    command = f"generate {runs / 'learned' / checkpoint.MODEL} --prompt"
    said = "stopped at the context of 16 bytes, where learned positions end\n13 bytes after 3 in "
    assert said in shown(f"{command} abc --tokens 40").err
    assert shown(f"{command} {'a' * 16}").out == "a" * 16 + "\n"


def test_ctrl_c_keeps_what_was_written(runs, shown, monkeypatch):
    choose, chosen = sampling.choose, []

    def interrupted(*arguments):
        if len(chosen) == 5:
            raise KeyboardInterrupt
        chosen.append(choose(*arguments))
        return chosen[-1]

    command = f"generate {runs / 'learned'} --prompt abc --tokens 40"
    whole = shown(command).out
    monkeypatch.setattr(sampling, "choose", interrupted)
    out, err = shown(command, 130)
    assert "5 bytes after 3 in " in err
    assert "stopped" not in err
    written = bytes([*b"abc", *(int(token) for token in chosen)]).decode(errors="replace")
    assert out == written + "\n"
    assert whole.startswith(written.rstrip("\ufffd"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--prompt=", "--prompt must have at least 1 byte, got 0"),
        ("--prompt aaaaaaaaaaaaaaaaa", "--prompt must have at most 16 bytes, the model's context, got 17"),
        ("--device cuda", "--device cuda needs a "),
    ],
)
def test_wrong_options(runs, refusal, options, message):
    assert refusal(f"generate {runs / 'learned'} {options}").startswith(message)


@pytest.mark.parametrize("name", ["int8", "float8"])
@pytest.mark.parametrize("run", ["learned", "endless"])
def test_caches_of_8_bits(runs, shown, name, run):
    """The text's loss from 8 bits is close to that from the model's dtype, and not the same."""
    err = shown(f"generate {runs / run} --prompt abc --tokens 9 --cache-dtype {name}").err
    found = re.search(rf"loss over these 12 bytes: ([\d.]+) from a cache of {name}, ([\d.]+) from the model's", err)
    assert found
    eight, own = map(float, found.groups())
    assert eight == pytest.approx(own, rel=0.2)
    assert eight != own


@pytest.mark.parametrize("more", ["--no-cache", "--draft here"])
def test_8_bits_need_a_cache_of_one_model(runs, refusal, more):
    command = f"generate {runs / 'endless'} --cache-dtype int8 {more.replace('here', str(runs / 'endless'))}"
    assert refusal(command).startswith(f"--cache-dtype must come without {more.split()[0]}, got int8")
