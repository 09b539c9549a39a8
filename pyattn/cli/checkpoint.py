"""Checkpoints: weights as safetensors, the model's configuration as JSON in their metadata; no pickle."""

import dataclasses
import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor

from pyattn.cli import InputError
from pyattn.cli.gpt import GPT, Attend, Config, attend_pyattn

MODEL = "model.safetensors"


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file; an earlier one is replaced only when the new one is complete.

    Its mode follows the umask, which safetensors' own ``save_file`` ignores: it writes 0600.
    """
    unfinished = path.with_suffix(".unfinished")
    dense = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    unfinished.write_bytes(serialize(dense, metadata=metadata))
    unfinished.replace(path)


def save(model: GPT, path: Path) -> None:
    """Write weights and configuration. The output layer shares the token embedding, so the file holds it once."""
    write(path, model.state_dict(), {"config": json.dumps(dataclasses.asdict(model.config))})


def load(path: Path, attend: Attend = attend_pyattn) -> GPT:
    """The model that :func:`save` wrote, on the CPU and in eval mode.

    Example::

        model = pyattn.cli.checkpoint.load("runs/first/model.safetensors")
    """
    with safe_open(path, framework="pt") as file:
        config = Config(**json.loads(file.metadata()["config"]))
    model = GPT(config, attend)
    model.load_state_dict(load_file(path))
    return model.eval()


def of_run(run: Path) -> tuple[GPT, Path]:
    """The model that ``pyattn train`` left in the folder ``run``, or in the checkpoint of that name, and its path."""
    path = run / MODEL if run.is_dir() else run
    try:
        return load(path), path
    except FileNotFoundError as error:
        raise InputError("run must be a folder that pyattn train wrote, or its checkpoint", path) from error
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        got = f"{path} ({str(error).splitlines()[0]})"
        raise InputError("run must hold a checkpoint that pyattn train wrote", got) from error
