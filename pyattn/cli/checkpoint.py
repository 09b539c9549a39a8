"""Checkpoints: weights as safetensors, the model's configuration as JSON in their metadata; no pickle."""

import dataclasses
import json
from pathlib import Path

from safetensors.torch import save as serialize
from torch import Tensor

from pyattn.cli import InputError, output, stored
from pyattn.cli.gpt import GPT, Attend, Config, attend_pyattn

MODEL = "model.safetensors"
FIELDS = {name: (type(value),) for name, value in dataclasses.asdict(Config()).items()}
"""The configuration's, with their types."""


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file whole or not at all; safetensors' own ``save_file`` writes in place, in mode 0600."""
    dense = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    output.write(path, serialize(dense, metadata=metadata))


def save(model: GPT, path: Path) -> None:
    """Write weights and configuration. The output layer shares the token embedding, so the file holds it once."""
    write(path, model.state_dict(), {"config": json.dumps(dataclasses.asdict(model.config))})


def load(path: Path, attend: Attend = attend_pyattn) -> GPT:
    """The model that :func:`save` wrote, on the CPU and in eval mode.

    Raises:
        FileNotFoundError: there is no such file.
        InputError: it is no checkpoint, or not as :func:`save` wrote it.

    Example::

        model = pyattn.cli.checkpoint.load("runs/first/model.safetensors")
    """
    with stored.named("run must hold a checkpoint that pyattn train wrote", path):
        facts, tensors = stored.read(path)
        config = Config(**stored.fields(facts, "config", FIELDS))
        skeleton = stored.skeleton(config, len(tensors), sum(tensor.numel() for tensor in tensors.values()))
        stored.check_tensors(tensors, stored.weights_of(skeleton))
    model = GPT(config, attend)
    model.load_state_dict(tensors)
    return model.eval()


def of_run(run: Path) -> tuple[GPT, Path]:
    """The model that ``pyattn train`` left in the folder ``run``, or in the checkpoint of that name, and its path."""
    path = run / MODEL if run.is_dir() else run
    try:
        return load(path), path
    except FileNotFoundError as error:
        raise InputError("run must be a folder that pyattn train wrote, or its checkpoint", path) from error
