"""A model on disk: safetensors, with the model's shape as JSON in the metadata; nothing is unpickled."""

import dataclasses
import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save as serialize

from pyattn.cli.gpt import GPT, Attend, Config, attend_pyattn


def save(model: GPT, path: Path) -> None:
    """Write weights and shape, in place of what was there only once all is written.

    The output layer is the token embedding, so the file has it once. It gets the mode that the umask leaves
    (safetensors' own ``save_file`` makes files that only their owner can read).
    """
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(serialize(weights, metadata={"config": json.dumps(dataclasses.asdict(model.config))}))
    unfinished.replace(path)


def load(path: Path, attend: Attend = attend_pyattn) -> GPT:
    """The model that :func:`save` wrote, on the CPU, ready to generate.

    Example::

        model = pyattn.cli.checkpoint.load("runs/first/model.safetensors")
    """
    with safe_open(path, framework="pt") as file:
        config = Config(**json.loads(file.metadata()["config"]))
    model = GPT(config, attend)
    model.load_state_dict(load_file(path))
    return model.eval()
