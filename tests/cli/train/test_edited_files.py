"""Promise: a file that someone has edited is refused in one sentence that names the file and the key at fault."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pyattn.cli import main
from pyattn.cli.checkpoint import MODEL
from pyattn.cli.train.resume import STATE

HUGE = 10**30


def edited(path: Path, name: str, change: Callable[[Tensor], Tensor] | object) -> None:
    """Changes a tensor, a key of the metadata, or a name in the JSON object there.

    None removes a tensor or a key, ... a name.
    """
    with safe_open(path, framework="pt") as file:
        facts, tensors = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if callable(change):
        tensors[name] = change(tensors.get(name, torch.zeros(2))).contiguous()
    elif name in tensors:
        del tensors[name]
    elif name in facts:
        facts |= {name: change}
        facts = {key: value for key, value in facts.items() if value is not None}
    else:
        key = "config" if "config" in facts else "options"
        values = json.loads(facts[key]) | {name: change}
        facts[key] = json.dumps({k: v for k, v in values.items() if v is not ...})
    save_file(tensors, path, facts)


def poisoned(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = torch.nan
    return tensor


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The files of a run."""
    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text"
    text.write_text("".join(f"{n} green bottles, hanging on the wall.\n" for n in range(100)))
    shape = "--layers 2 --heads 2 --width 8 --context 16 --batch 2 --steps 3 --eval-every 2 --sample 4 --alibi --sinks"
    assert main(["train", *shape.split(), "--data", str(text), "--out", str(folder / "run")]) == 0
    return {name: (folder / "run" / name).read_bytes() for name in (MODEL, STATE)}


@pytest.fixture
def run(trained, tmp_path):
    for name, content in trained.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


BAD_WINDOWS = [4, None, [3], [3, 0, 0], [-2, 0], [0, HUGE], [1.0, 0], [True, 0], "30"]
SIZES = ["layers", "heads", "width", "context", "vocab"]
BAD_SIZES = [float("nan"), -1, HUGE, 2**62, "8", None, 1.5, True]
WEIGHT = "blocks.1.qkv.weight"
EXP_AVG, EXP_AVG_SQ, STEP = (f"optimizer.{key}.{WEIGHT}" for key in ("exp_avg", "exp_avg_sq", "step"))
MODEL_EDITS: list[tuple[str, Any, str]] = [
    # With ALiBi, no tensor has the size of the context.
    *((n, v, n) for n, v in product(SIZES, BAD_SIZES) if (n, v) != ("context", 2**62)),
    *(("window", pair, "window") for pair in BAD_WINDOWS),
    ("dropout", float("inf"), "dropout"),
    ("sinks", 1, "sinks"),
    ("alibi", False, "position.weight"),
    ("layers", 1, "blocks.1."),
    ("width", 16, "blocks.0.attention_norm.bias must be torch.float32 of shape (16,)"),
    ("heads", ..., "config: heads must be like 4, got none"),
    ("colour", 1, "config: colour must be absent, got 1"),
    ("config", None, "metadata must have config"),
    ("config", "{", "Expecting"),
    ("config", "[1]", "config must be a JSON object"),
    ("config", "[" * 100_000, "recursion"),
    ("config", '{"layers": 1' + "0" * 5000 + "}", "digits"),
    *((WEIGHT, change, WEIGHT) for change in (Tensor.double, Tensor.int, poisoned, None)),
    *((WEIGHT, lambda t, part=part: t[part], WEIGHT) for part in (None, slice(0), (slice(None), slice(1, None)))),
]
STATE_EDITS: list[tuple[str, Any, str]] = [
    *((n, v, n) for n, v in product(("layers", "width", "context"), BAD_SIZES)),
    *((n, v, n) for n, v in product(("steps", "batch", "threads"), (float("nan"), -1, HUGE))),
    *((n, v, n) for n, v in product(("lr", "temperature", "dropout"), (float("nan"), -1, 10**400, "1", None))),
    *((n, "abacus", n) for n in ("attention", "device", "dtype")),
    *(("window", pair, "window") for pair in BAD_WINDOWS),
    ("data", 7, "data"),
    ("steps", ..., "options: steps must be like 2400, got none"),
    ("colour", 1, "options: colour must be absent, got 1"),
    ("options", None, "metadata must have options"),
    ("text", None, "metadata must have text"),
    ("steps", 2, "losses.train"),
    *((n, lambda t: t[1:], n) for n in (f"model.{WEIGHT}", EXP_AVG)),
    *((n, None, n) for n in (EXP_AVG, "losses.train")),
    (EXP_AVG_SQ, lambda t: t - 9, EXP_AVG_SQ),
    (STEP, lambda t: t * 0 - 1, STEP),
    ("losses.train", lambda t: t[0], "losses.train"),
    ("losses.validation", lambda t: t[:, :1], "losses.validation"),
    ("losses.validation", poisoned, "losses.validation"),
    ("generator.batches", lambda t: t[:9], "generator.batches"),
    ("generator.torch", lambda t: t * 0 + 255, "generator.torch"),
    ("generator.cuda", lambda t: t, "generator.cuda"),
]


def short(value: object) -> str:
    return str(value)[:20]


@pytest.mark.parametrize(("name", "change", "key"), MODEL_EDITS, ids=short)
def test_an_edited_checkpoint(run, refusal, name, change, key):
    edited(run / MODEL, name, change)
    said = refusal(f"generate {run} --prompt a --tokens 3")
    assert said.startswith(f"run must hold a checkpoint that pyattn train wrote, got {run / MODEL} (")
    assert key in said
    assert len(said) < 390


@pytest.mark.parametrize(("name", "change", "key"), STATE_EDITS, ids=short)
def test_an_edited_state(run, refusal, name, change, key):
    edited(run / STATE, name, change)
    before = (run / STATE).read_bytes()
    said = refusal(f"train --resume {run} --steps 5")
    assert said.startswith(f"--resume must be a folder that pyattn train wrote, got {run / STATE} (")
    assert key in said
    assert len(said) < 400
    assert (run / STATE).read_bytes() == before


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, 1000, -1])
@pytest.mark.parametrize("name", [MODEL, STATE])
def test_a_truncated_file(run, refusal, name, size):
    content = (run / name).read_bytes()
    (run / name).write_bytes(content[:size])
    assert str(run / name) in refusal(f"generate {run} --tokens 1" if name == MODEL else f"train --resume {run}")


def test_files_that_nobody_edited_are_taken(run, shown):
    for name, tensor in ((MODEL, WEIGHT), (STATE, f"model.{WEIGHT}")):
        edited(run / name, tensor, Tensor.clone)
    shown(f"generate {run} --prompt a --tokens 3")
    shown(f"train --resume {run} --steps 5")
