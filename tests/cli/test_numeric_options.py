"""Promise: every number given to any command is used as it is, or refused in one sentence before any work."""

import argparse
import os
import re
from typing import Any
from unittest import mock

import pytest
import torch

from pyattn import cli
from pyattn.cli import checkpoint, checks, main, show
from pyattn.cli.bench import command as bench
from pyattn.cli.generate import sampling
from pyattn.cli.gpt import GPT, Config
from pyattn.cli.profile import command as profile
from pyattn.cli.train import command as train

EXTREMES = [
    "0",
    "-1",
    "1e-320",
    "1e308",
    "nan",
    "inf",
    "1" + "0" * 400,
    "1" + "0" * 5000,
    str(2**63),
    str(2**64),
    "many",
    str(2**63 - 1),
]


class Work(BaseException):
    """Raised when the work begins."""


@pytest.fixture
def run(tmp_path):
    checkpoint.save(GPT(Config(layers=1, heads=1, width=4, context=8, alibi=True)), tmp_path / checkpoint.MODEL)
    return tmp_path


COMMANDS = {
    "train": "train --layers 1 --heads 1 --width 4 --context 8 --data {story} --out {run}/new",
    "generate": "generate {run} --prompt a",
    "bench": "bench --shapes 1x1x9x4",
    "profile": "profile --shapes 1x8x9x4",
    "show": "show {run} --text a",
}
WORK = (train, "fit"), (sampling, "choose"), (bench, "measured_peaks"), (profile, "measure"), (show, "weights_of")


def options_of(command: str) -> dict[str, argparse.Action]:
    """The options of a command that take numbers."""
    actions: list[argparse.Action] = []
    add = argparse._ActionsContainer._add_action

    def noted(self: Any, action: argparse.Action) -> argparse.Action:
        actions.append(action)
        return add(self, action)

    with mock.patch.object(argparse._ActionsContainer, "_add_action", noted), pytest.raises(SystemExit):
        main([command, "--no-such-option"])
    return {action.option_strings[0]: action for action in actions if action.type in (int, float)}


def test_every_command_but_info_takes_numbers(capsys):
    assert COMMANDS.keys() | {"info"} == cli.COMMANDS.keys()
    assert all(map(options_of, COMMANDS))


@pytest.mark.parametrize("text", EXTREMES, ids=lambda text: text[:20] + "~" * (len(text) > 20))
@pytest.mark.parametrize("command", COMMANDS)
def test_extremes(run, story, monkeypatch, capsys, command, text):
    """Work that begins honours the value: see the next test."""
    for module, name in WORK:
        monkeypatch.setattr(module, name, mock.Mock(side_effect=Work))
    for option, action in options_of(command).items():
        capsys.readouterr()
        values = [text] * (action.nargs if isinstance(action.nargs, int) else 1)
        argv = [*COMMANDS[command].format(run=run, story=story).split(), option, *values]
        try:
            code: object = main(argv)
        except SystemExit as ended:
            code = ended.code
        except Work:
            continue
        shown = capsys.readouterr()
        if code == 0:
            assert (option, text) == ("--tokens", "0")
            continue
        assert (code, shown.out) == (2, ""), argv
        last = shown.err.splitlines()[-1]
        assert last.startswith("pyattn")
        assert option.removeprefix("--") in last or "memory" in last, last
        assert shown.err.count("\n") == 1 or "error: argument" in last
        assert len(last) < 300 or "error: argument" in last
    assert not (run / "new").exists()


LARGEST = 2**63 - 1
WORKING = {
    "train": [
        *(f"--{name} {LARGEST}" for name in ("eval-every", "top-k", "sample")),
        *(f"{alibi}--window {LARGEST} {LARGEST}" for alibi in ("", "--alibi ")),
        *(f"--seed {2**64 - 1}", "--dropout 1e-320", "--dropout 0.9999999", "--lr 1.2e-38"),
        *("--temperature 1.2e-38", "--temperature 3.4e38"),
    ],
    "generate": [f"--top-k {LARGEST}", f"--seed {2**64 - 1}", "--temperature 1.2e-38", "--temperature 3.4e38"],
    "profile": [
        *(f"--documents {LARGEST}", f"--window {LARGEST} {LARGEST}"),
        *("--softcap 1e-320", "--softcap 1e308", "--dropout 1e-320", "--dropout 0.9999999"),
    ],
}


@pytest.mark.parametrize(("command", "options"), [(name, option) for name, all_ in WORKING.items() for option in all_])
def test_extremes_that_are_right_work(run, story, shown, command, options):
    small = {"train": "--batch 2 --steps 2 --threads 1", "generate": "--tokens 9", "profile": "--forward --threads 1"}
    argv = f"{COMMANDS[command]} {small[command]} {options}".format(run=run, story=story)
    assert "nan" not in shown(argv).out


def test_the_lowest_temperature_takes_the_likeliest(run):
    logits = torch.tensor([[3.0, 9.0, 1.0, 8.999]])
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        assert sampling.choose(logits, checks.FLOAT32.tiny, 4, generator).item() == 1


@pytest.mark.parametrize("text", [b"\xff\xfe", "half \ud83d of a pair".encode("utf-8", "surrogatepass")])
@pytest.mark.parametrize(("command", "option"), [("generate", "--prompt"), ("show", "--text")])
def test_bytes_that_are_no_text(run, refusal, command, option, text):
    """As a shell passes them."""
    given = os.fsdecode(text)
    assert refusal([command, str(run), option, given]) == f"{option} must be text (UTF-8), got {given!a}"


@pytest.mark.parametrize("command", ["bench", "profile"])
def test_a_shape_beyond_the_memory(command, refusal):
    """torch might get it from a system that promises more than it has, and kills."""
    message = refusal(f"{command} --shapes 1024x1024x1024x256")
    assert re.fullmatch(
        r"--shapes 1024x.* must fit the memory of this machine, [\d.e+]+ GB, got at least 3.3e\+03 GB", message
    )


def test_memory_that_torch_can_not_have_is_one_sentence(run, monkeypatch, refusal):
    monkeypatch.setattr(checks, "check_memory", lambda *_: None)
    monkeypatch.setattr(sampling, "check_memory", lambda *_: None)
    message = f"generate must fit the memory that is free, got {2**48 + 16} bytes"
    assert refusal(f"generate {run} --prompt a --tokens {2**44}") == message
