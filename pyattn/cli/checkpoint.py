"""Checkpoints: weights as safetensors, the model's configuration as JSON in their metadata; no pickle."""

import dataclasses
import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save as serialize

from pyattn.cli.gpt import GPT, Attend, Config, attend_pyattn


def save(model: GPT, path: Path) -> None:
    """Write weights and configuration; an earlier file is replaced only when the new one is complete.

    The output layer shares the token embedding, so the file holds it once. The file's mode follows the umask, which
    safetensors' own ``save_file`` ignores: it writes 0600.
    """
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(serialize(weights, metadata={"config": json.dumps(dataclasses.asdict(model.config))}))
    unfinished.replace(path)


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
