"""Promise: a file that someone has edited is refused in one sentence that names the file and the key at fault."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pyattn.cli import main
from pyattn.cli.checkpoint import MODEL
from pyattn.cli.state import STATE

OPTIONS = "--alibi", "--sinks"
HUGE = 10**30

Edit = Callable[[dict[str, str], dict[str, Tensor]], None]
"""Changes metadata and tensors in place."""


def set_json(key: str, name: str, value: Any) -> Edit:
    def edit(facts: dict[str, str], tensors: dict[str, Tensor]) -> None:
        values = json.loads(facts[key]) | {name: value}
        facts[key] = json.dumps({k: v for k, v in values.items() if v is not ...})

    return edit


def without_json(key: str, name: str) -> Edit:
    def edit(facts: dict[str, str], tensors: dict[str, Tensor]) -> None:
        facts[key] = json.dumps({k: v for k, v in json.loads(facts[key]).items() if k != name})

    return edit


def set_fact(key: str, text: str | None) -> Edit:
    def edit(facts: dict[str, str], tensors: dict[str, Tensor]) -> None:
        facts.pop(key) if text is None else facts.__setitem__(key, text)

    return edit


def change(name: str, how: Callable[[Tensor], Tensor] | None) -> Edit:
    def edit(facts: dict[str, str], tensors: dict[str, Tensor]) -> None:
        tensor = tensors.pop(name)
        if how is not None:
            tensors[name] = how(tensor).contiguous()

    return edit


def poisoned(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = torch.nan
    return tensor


def edited(path: Path, edit: Edit) -> None:
    with safe_open(path, framework="pt") as file:
        facts, tensors = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    edit(facts, tensors)
    save_file(tensors, path, facts)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The files of a run, and its text."""
    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text"
    text.write_text("".join(f"{n} green bottles, hanging on the wall.\n" for n in range(100)))
    shape = "--layers 2 --heads 2 --width 8 --context 16 --batch 2 --steps 3 --eval-every 2 --sample 4"
    assert main(["train", *shape.split(), *OPTIONS, "--data", str(text), "--out", str(folder / "run")]) == 0
    return {name: (folder / "run" / name).read_bytes() for name in (MODEL, STATE)}


@pytest.fixture
def run(trained, tmp_path):
    for name, content in trained.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


BAD_WINDOWS: list[Any] = [4, None, [3], [3, 0, 0], [-2, 0], [0, HUGE], [1.0, 0], [True, 0], "30"]
LARGE = ("context",)  # with ALiBi, no tensor has that size
SIZES = ["layers", "heads", "width", "context", "vocab"]
BAD_SIZES = [float("nan"), -1, HUGE, 2**62, "8", None, 1.5, True]
NUMBERS = ["lr", "temperature", "dropout"]
TENSOR = "blocks.1.qkv.weight"
MODEL_EDITS: dict[str, tuple[Edit, str]] = {
    **{f"{n} {v}": (set_json("config", n, v), n) for n in SIZES for v in BAD_SIZES if v != 2**62 or n not in LARGE},
    **{f"window {pair}": (set_json("config", "window", pair), "window") for pair in BAD_WINDOWS},
    "dropout": (set_json("config", "dropout", float("inf")), "dropout"),
    "sinks": (set_json("config", "sinks", 1), "sinks"),
    "no positions": (set_json("config", "alibi", False), "position.weight"),
    "other layers": (set_json("config", "layers", 1), "blocks.1."),
    "other width": (set_json("config", "width", 16), "weight must have shape"),
    "no key": (without_json("config", "heads"), "config must have the key heads"),
    "another key": (set_json("config", "colour", 1), "config must not have the key colour"),
    "no config": (set_fact("config", None), "metadata must have the key config"),
    "no JSON": (set_fact("config", "{"), "Expecting"),
    "a list": (set_fact("config", "[1]"), "config must be a JSON object"),
    "deep": (set_fact("config", "[" * 100_000), "recursion"),
    "digits": (set_fact("config", '{"layers": 1' + "0" * 5000 + "}"), "digits"),
    "shape": (change(TENSOR, lambda t: t[:, 1:]), TENSOR),
    "rank": (change(TENSOR, lambda t: t[None]), TENSOR),
    "dtype": (change(TENSOR, Tensor.double), TENSOR),
    "ints": (change(TENSOR, Tensor.int), TENSOR),
    "NaN": (change(TENSOR, poisoned), TENSOR),
    "missing": (change(TENSOR, None), TENSOR),
    "empty": (change(TENSOR, lambda t: t[:0]), TENSOR),
}
STATE_EDITS: dict[str, tuple[Edit, str]] = {
    **{f"{n} {v}": (set_json("options", n, v), n) for n in ("layers", "width", "context") for v in BAD_SIZES},
    **{
        f"{n} {v}": (set_json("options", n, v), n)
        for n in ("steps", "batch", "threads")
        for v in (float("nan"), -1, HUGE)
    },
    **{f"{n} {v}": (set_json("options", n, v), n) for n in NUMBERS for v in (float("nan"), -1, 10**400, "1", None)},
    **{n: (set_json("options", n, "abacus"), n) for n in ("attention", "device", "dtype")},
    **{f"window {pair}": (set_json("options", "window", pair), "window") for pair in BAD_WINDOWS},
    "data": (set_json("options", "data", 7), "data"),
    "no key": (without_json("options", "steps"), "options must have the key steps"),
    "another key": (set_json("options", "colour", 1), "options must not have the key colour"),
    "no options": (set_fact("options", None), "metadata must have the key options"),
    "no text": (set_fact("text", None), "metadata must have the key text"),
    "fewer steps": (set_json("options", "steps", 2), "losses.train"),
    "shape": (change(f"model.{TENSOR}", lambda t: t[1:]), f"model.{TENSOR}"),
    "moment": (change(f"optimizer.exp_avg.{TENSOR}", None), f"optimizer.exp_avg.{TENSOR}"),
    "moment's shape": (change(f"optimizer.exp_avg.{TENSOR}", lambda t: t[1:]), f"optimizer.exp_avg.{TENSOR}"),
    "negative square": (change(f"optimizer.exp_avg_sq.{TENSOR}", lambda t: t - 9), f"optimizer.exp_avg_sq.{TENSOR}"),
    "step": (change(f"optimizer.step.{TENSOR}", lambda t: t * 0 - 1), f"optimizer.step.{TENSOR}"),
    "no losses": (change("losses.train", None), "losses.train"),
    "losses": (change("losses.train", lambda t: t[0]), "losses.train"),
    "validation": (change("losses.validation", lambda t: t[:, :1]), "losses.validation"),
    "NaN validation": (change("losses.validation", poisoned), "losses.validation"),
    "generator's size": (change("generator.batches", lambda t: t[:9]), "generator.batches"),
    "generator's content": (change("generator.torch", lambda t: t * 0 + 255), "generator.torch"),
    "GPU's generator": (lambda facts, tensors: tensors.update({"generator.cuda": torch.zeros(2)}), "generator.cuda"),
}


@pytest.mark.parametrize("edit", MODEL_EDITS)
def test_an_edited_checkpoint(run, refusal, edit):
    change_file, key = MODEL_EDITS[edit]
    edited(run / MODEL, change_file)
    for command in (["generate", str(run), "--prompt", "a", "--tokens", "3"], ["show", str(run), "--text", "a"]):
        said = refusal(*command)
        assert said.startswith(f"run must hold a checkpoint that pyattn train wrote, got {run / MODEL} (")
        assert key in said
        assert len(said) < 390


@pytest.mark.parametrize("edit", STATE_EDITS)
def test_an_edited_state(run, capsys, edit):
    change_file, key = STATE_EDITS[edit]
    edited(run / STATE, change_file)
    before = (run / STATE).read_bytes()
    assert main(["train", "--resume", str(run), "--steps", "5"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"pyattn: --resume must be a folder that pyattn train wrote, got {run / STATE} (")
    assert key in said.replace("_", "-").replace(key.replace("_", "-"), key)
    assert said.count("\n") == 1
    assert len(said) < 400
    assert (run / STATE).read_bytes() == before


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, 1000, -1])
@pytest.mark.parametrize("name", [MODEL, STATE])
def test_a_truncated_file(run, refusal, name, size):
    content = (run / name).read_bytes()
    (run / name).write_bytes(content[:size])
    command = ["generate", str(run), "--tokens", "1"] if name == MODEL else ["train", "--resume", str(run)]
    assert str(run / name) in refusal(*command)


def test_files_that_nobody_edited_are_taken(run):
    for name in (MODEL, STATE):
        edited(run / name, lambda facts, tensors: None)
    assert main(["generate", str(run), "--prompt", "a", "--tokens", "3"]) == 0
    assert main(["train", "--resume", str(run), "--steps", "5"]) == 0
