"""Checkpoints: weights as safetensors, the model's configuration as JSON in their metadata; no pickle.

Files are read as if anyone might have edited them: an error names the file and the key.
"""

import dataclasses
import json
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from pyattn.cli import InputError, output
from pyattn.cli.gpt import GPT, Attend, Config, attend_pyattn
from pyattn.cli.train.one_process import Alone

MODEL = "model.safetensors"
Expected = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of tensors by name."""


@contextmanager
def named(rule: str, path: Path, key: str = "") -> Iterator[None]:
    """Turns an error about the file ``path`` into an InputError: ``rule``, the file, ``key``, the fault.

    A missing file is left to the caller.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        fault = (str(error) or type(error).__name__).removeprefix("pyattn: ").splitlines()[0]
        raise InputError(rule, f"{path} ({key}{': ' if key else ''}{fault})") from error


def read(path: Path, *keys: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata of a file, which must have ``keys``, and its tensors."""
    with safe_open(path, framework="pt") as file:
        facts = file.metadata() or {}
        for key in keys:
            if key not in facts:
                raise ValueError(f"metadata must have {key}, got {' '.join(facts) or 'none'}")
        return facts, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no dict)


def _alike(value: object, default: object) -> bool:
    """Whether JSON's ``value`` is of the kind of ``default``: an integer is also a number, None stands for a path."""
    if isinstance(default, tuple):
        return isinstance(value, list) and len(value) == len(default) and all(map(_alike, value, default))
    if default is None:
        return value is None or isinstance(value, str)
    return type(value) is type(default) or (type(value) is int and isinstance(default, float))


def fields(facts: Mapping[str, str], key: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object under ``key`` in the metadata: exactly the names of ``defaults``, each of its default's kind."""
    values = json.loads(facts[key])
    if not isinstance(values, dict):
        raise TypeError(f"{key} must be a JSON object, got {reprlib.repr(values)}")
    for name in sorted(defaults.keys() | values.keys()):
        if not (name in defaults and name in values and _alike(values[name], defaults[name])):
            wanted = f"like {json.dumps(defaults[name])}" if name in defaults else "absent"
            got = reprlib.repr(values[name]) if name in values else "none"
            raise ValueError(f"{key}: {name} must be {wanted}, got {got}")
        if isinstance(defaults[name], float):
            values[name] = float(str(values[name]))  # an integer past the end is infinite, not an error
        elif isinstance(defaults[name], tuple):
            values[name] = tuple(values[name])
    return values


def check_tensors(found: Mapping[str, Tensor], expected: Expected) -> None:
    """Raise ValueError unless ``found`` has exactly the tensors, shapes and dtypes of ``expected``, all finite."""
    for name in sorted(expected.keys() | found.keys()):
        wanted, got = "absent", "none"
        if name in expected:
            shape, dtype = expected[name]
            wanted = f"{dtype} of shape {shape}, 0 numbers not finite"
        if name in found:
            tensor = found[name]
            not_finite = int((~tensor.isfinite()).sum())
            got = f"{tensor.dtype} of shape {tuple(tensor.shape)}, {not_finite} numbers not finite"
        if got != wanted:
            raise ValueError(f"{name} must be {wanted}, got {got}")


def skeleton(config: Config, tensors: int, numbers: int) -> GPT:
    """A model of ``config`` without memory (meta), if a file of that many tensors and numbers can hold it.

    Raises:
        ValueError: a size that such a file can't hold, detected before any module is built.
    """
    sizes = {"layers": tensors, "width": numbers, "vocab": numbers, "heads": numbers}
    for name, most in (sizes if config.alibi else sizes | {"context": numbers}).items():
        if getattr(config, name) > most:
            raise ValueError(f"{name} must be at most {most}, as much as the file holds, got {getattr(config, name)}")
    with torch.device("meta"):
        return GPT(config)


def weights_of(model: GPT) -> Expected:
    """Shapes and dtypes of the weights of ``model``."""
    return {name: (tuple(weight.shape), weight.dtype) for name, weight in model.state_dict().items()}


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file, complete or not at all; safetensors' ``save_file`` writes in place, in mode 0600."""
    dense = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    output.write(path, serialize(dense, metadata=metadata))


def save(model: GPT, path: Path, ranks: Alone | None = None) -> None:
    """Write weights and configuration. The output layer shares the token embedding, so the file holds it once.

    The first of the ``ranks`` writes, and all wait for it.
    """
    ranks, weights = ranks or Alone(), model.weights()
    with ranks.agreement({}):
        if ranks.first:
            write(path, weights, {"config": json.dumps(dataclasses.asdict(model.config))})


def load(path: Path, attend: Attend = attend_pyattn, name: str = "run") -> GPT:
    """Load the model that :func:`save` wrote, on the CPU and in eval mode; errors call the option ``name``.

    Raises:
        FileNotFoundError: the file does not exist.
        InputError: the file is not a checkpoint, or not as :func:`save` wrote it.

    Example::

        model = pyattn.cli.checkpoint.load("runs/first/model.safetensors")
    """
    with named(f"{name} must hold a checkpoint that pyattn train wrote", path):
        facts, tensors = read(path, "config")
        config = Config(**fields(facts, "config", dataclasses.asdict(Config())))
        expected = skeleton(config, len(tensors), sum(tensor.numel() for tensor in tensors.values()))
        check_tensors(tensors, weights_of(expected))
    model = GPT(config, attend)
    model.load_state_dict(tensors)
    return model.eval()


def of_run(run: Path, name: str = "run") -> tuple[GPT, Path]:
    """The model that ``pyattn train`` left in the folder or checkpoint ``run``, the option ``name``, and its path."""
    path = run / MODEL if run.is_dir() else run
    try:
        return load(path, name=name), path
    except FileNotFoundError as error:
        raise InputError(f"{name} must be a folder that pyattn train wrote, or its checkpoint", path) from error
