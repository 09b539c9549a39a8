"""All that a training needs to go on to the bit: a safetensors file, options as JSON in its metadata; no pickle."""

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pyattn.cli import InputError
from pyattn.cli.checkpoint import write
from pyattn.cli.fit import Losses
from pyattn.cli.gpt import GPT
from pyattn.cli.text import Text

STATE = "training.safetensors"
PATHS = ("data", "out", "resume")
"""The options that are paths."""


def digest(text: Text) -> str:
    """SHA-256 of the text, by which a run knows it again."""
    content = torch.cat([text.train, text.validation]).numpy()
    return hashlib.sha256(content.tobytes()).hexdigest()


def _parts(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, and what the optimizer knows of each."""
    parts = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            parts[f"optimizer.{key}.{name}"] = value
    return parts


@dataclass(frozen=True)
class Training:
    """What :func:`save` takes and :meth:`State.restore` fills: each changes as the training goes on.

    Attributes:
        generator: what batches are drawn from; torch's own, which dropout draws from, belongs to the state too.
    """

    model: GPT
    optimizer: torch.optim.Optimizer
    losses: Losses
    generator: torch.Generator

    @property
    def on_gpu(self) -> bool:
        """Whether dropout draws from a GPU's generator."""
        return self.model.token.weight.is_cuda


def save(path: Path, training: Training, options: argparse.Namespace, text: Text) -> None:
    """Write the state of ``training`` between two steps."""
    losses = training.losses
    tensors = _parts(training.model, training.optimizer) | {
        "generator.batches": training.generator.get_state(),
        "generator.torch": torch.get_rng_state(),
        "losses.train": torch.tensor(list(losses.train.values()), dtype=torch.float64),
        "losses.validation": torch.tensor(list(losses.validation.items()), dtype=torch.float64).view(-1, 2),
    }
    if training.on_gpu:
        tensors["generator.cuda"] = torch.cuda.get_rng_state()
    kept = {name: str(x) if isinstance(x, Path) else x for name, x in vars(options).items()}
    write(path, tensors, {"options": json.dumps(kept), "text": digest(text)})


@dataclass(frozen=True)
class State:
    """A state that was read.

    Attributes:
        options: those of the run.
        text: :func:`digest` of its text.
        tensors: by the names that :func:`save` gives them.
    """

    options: argparse.Namespace
    text: str
    tensors: dict[str, Tensor]

    def restore(self, training: Training) -> None:
        """Put ``training``, made for the same options, where the saved one was."""
        model, losses, tensors = training.model, training.losses, self.tensors
        weights = {name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")}
        model.load_state_dict(weights)
        for name, parameter in model.named_parameters():
            known = {key: tensors.get(f"optimizer.{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            if known["step"] is not None:
                # AdamW counts steps on the CPU wherever the weights lie.
                moments = {key: x.to(parameter.device) for key, x in known.items() if x is not None and key != "step"}
                training.optimizer.state[parameter] = {"step": known["step"], **moments}
        losses.train.update(enumerate(tensors["losses.train"].tolist(), 1))
        losses.validation.update((int(step), loss) for step, loss in tensors["losses.validation"].tolist())
        training.generator.set_state(tensors["generator.batches"])
        torch.set_rng_state(tensors["generator.torch"])
        if training.on_gpu:
            torch.cuda.set_rng_state(tensors["generator.cuda"])


def load(run: Path) -> State:
    """The state that ``pyattn train`` left in the folder ``run``.

    Raises:
        InputError: there is none, or it can't be read.
    """
    path = run / STATE
    try:
        with safe_open(path, framework="pt") as file:
            facts: dict[str, str] = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        options: dict[str, Any] = json.loads(facts["options"])
        paths = {name: Path(options[name]) for name in PATHS if options[name] is not None}
        return State(argparse.Namespace(**options | paths), facts["text"], tensors)
    except FileNotFoundError as error:
        raise InputError("--resume must be a folder that pyattn train wrote", path) from error
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        got = f"{path} ({str(error).splitlines()[0]})"
        raise InputError("--resume must be a folder that pyattn train wrote", got) from error
