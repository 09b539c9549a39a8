"""Promise: a draft changes how fast a text is written, not the text."""

import re
from functools import partial

import pytest
import torch
from cli.generate.test_generate import MODELS, made

from pyattn import set_row_invariant
from pyattn.cli import checkpoint
from pyattn.cli.generate import sampling
from pyattn.cli.generate.drafts import Drafts
from pyattn.cli.gpt import GPT, Config, token_by_token

PROMPT = torch.randint(256, (1, 7), generator=torch.Generator().manual_seed(2))


def drafter(name: str, noise: float) -> GPT:
    """The large model with noise on its weights, so it guesses some tokens right."""
    model = made(**MODELS[name])
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def texts(model: GPT, drafted: Drafts, count: int, temperature: float) -> list[list[int]]:
    """The tokens with a draft, and those without."""
    both = []
    for follow in (drafted.continuation, partial(sampling.continuation, sampling.Cached(model, 1, 7 + count))):
        generator = torch.Generator().manual_seed(1)
        both.append([int(token) for token in follow(PROMPT, count, generator, temperature=temperature, top_k=40)])
    return both


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("chunk", [8, 256])
def test_the_same_text(monkeypatch, name, temperature, chunk):
    """Whatever the draft guesses, through several moves of a ring's window and up to the end of a context."""
    monkeypatch.setattr(sampling, "CHUNK", chunk)
    model, shares = made(**MODELS[name]), []
    count = sampling.room(model.config, 7, 40)
    for noise, tokens in ((0.0, 4), (0.05, 1), (0.05, 7), (3.0, 3)):
        drafted = Drafts(model, drafter(name, noise), tokens)
        with_draft, without = texts(model, drafted, count, temperature)
        assert with_draft == without
        assert len(without) == count
        shares.append(drafted.accepted / drafted.drafted)
    assert shares[0] == 1.0 > shares[-1]


def alike(name: str, dtype: torch.dtype) -> GPT:
    """A model whose tokens are about equally likely: its logits are small, and rounding decides often."""
    torch.manual_seed(0)
    model = GPT(Config(layers=2, heads=2, width=128, context=100, **MODELS[name])).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.05)
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_logits_of_a_draft_have_the_bits_of_single_tokens(name, dtype):
    model, ids = alike(name, dtype), torch.randint(256, (1, 90))
    chunks = ids.split((7, 1, 2, 5, 9, 40, 26), 1)
    for setting in (True, False):
        with set_row_invariant(setting):
            one, some = (sampling.Cached(model, 1, 90) for _ in range(2))
            alone = torch.cat([one.logits(token) for token in ids.split(1, 1)], 1)
            same = torch.equal(torch.cat([some.logits(chunk, token_by_token) for chunk in chunks], 1), alone)
        assert same or not setting
    assert not same or dtype != torch.float32  # 16 bits may round differences away


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_text_where_rounding_would_decide(name, dtype, temperature):
    model = alike(name, dtype)
    with set_row_invariant(True):
        for small, tokens in ((model, 4), (alike("window", torch.float32), 7)):
            with_draft, without = texts(model, Drafts(model, small, tokens), 90, temperature)
            assert with_draft == without


def test_how_many_calls_are_saved(monkeypatch):
    """A draft that is always right: the large model reads its n tokens and one more in each call."""
    model, calls, logits = made(alibi=True), [], sampling.Cached.logits

    def counted(self, ids, *layers):
        calls.append((self.model, ids.shape[1]))
        return logits(self, ids, *layers)

    monkeypatch.setattr(sampling.Cached, "logits", counted)
    drafted = Drafts(model, made(alibi=True), 4)
    texts(model, drafted, 31, 0.0)
    assert [size for of, size in calls if of is model][:7] == [7, 5, 5, 5, 5, 5, 5]
    assert (drafted.drafted, drafted.accepted) == (24, 24)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_short_texts(count):
    model = made(alibi=True)
    with_draft, without = texts(model, Drafts(model, made(alibi=True), 4), count, 0.0)
    assert with_draft == without
    assert len(without) == count


# The command


@pytest.fixture
def runs(tmp_path):
    models = {"large": {"alibi": True}, "small": {"alibi": True, "window": (4, 0)}, "short": {}}
    for name, options in models.items():
        (tmp_path / name).mkdir()
        checkpoint.save(made(**options).float(), tmp_path / name / checkpoint.MODEL)
    (tmp_path / "other").mkdir()
    checkpoint.save(made(vocab=300).float(), tmp_path / "other" / checkpoint.MODEL)
    return tmp_path


@pytest.mark.parametrize("options", ["--temperature 0", "--draft-tokens 7 --seed 3"])
def test_text_and_speed_are_shown(runs, shown, options):
    command = f"generate {runs / 'large'} --prompt abc --tokens 40 {options}"
    out, err = shown(f"{command} --draft {runs / 'small'}")
    assert out == shown(command).out
    said = r"^40 bytes after 3 in .* tokens/s\n(\d+) of (\d+) drafted bytes accepted, "
    found = re.search(said + r"\d+\.\d\d times as fast as without the draft \(\d+\.\d s\), the same text\n$", err)
    assert found is not None
    assert int(found[1]) <= int(found[2])


def test_another_text_is_told(runs, shown, monkeypatch):
    """Rounding can't be provoked: the calls that check a draft of 4 get other logits here."""
    logits = sampling.Cached.logits
    flipped = lambda self, ids, *layers: logits(self, ids, *layers) * (-1) ** (ids.shape[1] == 5)  # noqa: E731
    monkeypatch.setattr(sampling.Cached, "logits", flipped)
    err = shown(f"generate {runs / 'large'} --prompt abc --tokens 40 --temperature 0 --draft {runs / 'small'}").err
    assert re.search(r", another text from byte 1 on, where two bytes were equally likely to rounding\n$", err)


def test_ctrl_c_in_either_text(runs, shown, monkeypatch):
    """In the first it keeps what was written; in the second it leaves out the comparison."""
    choose, calls = sampling.choose, []
    command = f"generate {runs / 'large'} --prompt abc --tokens 9 --temperature 0 --draft {runs / 'small'}"

    def counted(*args, stop, **named):
        calls.append(args)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return choose(*args, **named)

    monkeypatch.setattr(sampling, "choose", partial(counted, stop=0))
    whole = shown(command).out
    for stop in (6, len(calls)):
        calls.clear()
        monkeypatch.setattr(sampling, "choose", partial(counted, stop=stop))
        out, err = shown(command, 130)
        assert "accepted" not in err
        assert (out == whole) == (stop > 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--draft {runs}/nowhere", "--draft must be a folder that pyattn train wrote, or its checkpoint, got "),
        ("--draft {runs}/other", "--draft must have the vocabulary of the model, 256, got 300"),
        (
            "--draft {runs}/short --tokens 14",
            "--draft must have a context of at least 17 bytes, the prompt and --tokens, or ALiBi, got 16",
        ),
        ("--draft {runs}/small --no-cache", "--draft needs a cache, got --no-cache"),
        ("--draft {runs}/small --draft-tokens 0", "--draft-tokens must be at least 1, got 0"),
        (
            "--draft {runs}/small --draft-tokens 256",
            "--draft-tokens must be at most 255 (a call reads so many, and one ",
        ),
    ],
)
def test_drafts_that_are_refused(runs, refusal, options, message):
    assert refusal(f"generate {runs / 'large'} --prompt abc {options.format(runs=runs)}").startswith(message)
