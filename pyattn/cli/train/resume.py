"""All that a training needs to continue to the bit: a safetensors file, options as JSON in its metadata; no pickle.

Ranks write weights and moments to a folder that the file names; replacing the file makes a checkpoint the current one.
"""

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyattn.cli import InputError, output
from pyattn.cli import checkpoint as stored
from pyattn.cli.gpt import GPT
from pyattn.cli.text import Text
from pyattn.cli.train import options as training_options
from pyattn.cli.train.loop import Training
from pyattn.cli.train.one_process import OPTIONS as OF_RANKS

STATE = "training.safetensors"
RULE = "--resume must be a folder that pyattn train wrote"
PATHS = ("data", "out", "resume")
"""The options that hold paths."""
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter: the number of steps, and two tensors of its shape."""


def digest(text: Text) -> str:
    """SHA-256 of the text, by which a resumed run recognises it."""
    content = torch.cat([text.train, text.validation]).numpy()
    return hashlib.sha256(content.tobytes()).hexdigest()


def _parts(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The weights, and the optimizer's state of each."""
    parts = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            parts[f"optimizer.{key}.{name}"] = value
    return parts


def described(options: argparse.Namespace) -> dict[str, Any]:
    """The options as they are stored: those of the training, without those of the processes that it runs on."""
    return {name: str(x) if isinstance(x, Path) else x for name, x in vars(options).items() if name not in OF_RANKS}


def save(path: Path, training: Training, options: argparse.Namespace, text: Text) -> None:
    """Write the state of ``training`` between two steps."""
    losses, ranks = training.losses, training.ranks
    tensors = _parts(training.model, training.optimizer)
    facts = ranks.write(path.parent, len(losses.train), tensors)
    tensors |= {
        **{f"generator.{name}": generator.get_state() for name, generator in training.generators.items()},
        "losses.train": torch.tensor(list(losses.train.values()), dtype=torch.float64),
        "losses.validation": torch.tensor(list(losses.validation.items()), dtype=torch.float64).view(-1, 2),
    }
    facts |= {"options": json.dumps(described(options)), "text": digest(text)}
    with ranks.agreement({}):
        if ranks.first:
            stored.write(path, tensors, facts)
            output.remove_shards(path.parent, but=facts.get("shards", ""))


@dataclass(frozen=True)
class State:
    """A state that has been read and checked.

    Attributes:
        path: its file.
        options: the options of the run.
        text: the :func:`digest` of the run's text.
        tensors: the tensors under the names that :func:`save` gives them.
    """

    path: Path
    options: argparse.Namespace
    text: str
    tensors: dict[str, Tensor]

    @property
    def steps(self) -> int:
        """The number of completed steps."""
        return len(self.tensors["losses.train"])

    def restore(self, training: Training) -> None:
        """Put ``training``, made for the same options, into the saved state."""
        model, losses, ranks, tensors = training.model, training.losses, training.ranks, self.tensors
        weights = {name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")}
        model.load_state_dict({name: ranks.cut(name, whole) for name, whole in weights.items()})
        for name, parameter in model.named_parameters():
            if self.steps:
                known = {key: tensors[f"optimizer.{key}.{name}"] for key in MOMENTS}
                # AdamW keeps its step count on the CPU, wherever the weights are.
                moved = {
                    key: x if key == "step" else ranks.cut(name, x).to(parameter.device) for key, x in known.items()
                }
                training.optimizer.state[parameter] = moved
        losses.train.update(enumerate(tensors["losses.train"].tolist(), 1))
        losses.validation.update((int(step), loss) for step, loss in tensors["losses.validation"].tolist())
        for name, generator in training.generators.items():
            key = f"generator.{name}"
            with stored.named(RULE, self.path, key):
                generator.set_state(tensors[key])


def _expected(options: argparse.Namespace, tensors: dict[str, Tensor]) -> stored.Expected:
    """Shapes and dtypes of what :func:`save` writes for ``options``, after as many steps as ``tensors`` hold losses."""
    numbers = sum(tensor.numel() for tensor in tensors.values())
    model = stored.skeleton(training_options.config_of(options), len(tensors), numbers)
    missing = torch.empty(0)
    done, validated = (tensors.get(f"losses.{kind}", missing).shape[:1].numel() for kind in ("train", "validation"))
    expected = {f"model.{name}": what for name, what in stored.weights_of(model).items()}
    for name, parameter in model.named_parameters() if done else ():
        for key in MOMENTS:
            shape = () if key == "step" else tuple(parameter.shape)
            expected[f"optimizer.{key}.{name}"] = shape, torch.float32
    expected["losses.train"] = (done,), torch.float64
    expected["losses.validation"] = (validated, 2), torch.float64
    drawn = tuple(torch.get_rng_state().shape), torch.uint8
    expected |= {"generator.batches": drawn, "generator.torch": drawn}
    if options.device == "cuda":
        expected["generator.cuda"] = tuple(torch.cuda.get_rng_state().shape), torch.uint8
    return expected


def _check(options: argparse.Namespace, tensors: dict[str, Tensor]) -> None:
    """Raise ValueError unless ``tensors`` are what :func:`save` writes for ``options``."""
    stored.check_tensors(tensors, _expected(options, tensors))
    done = len(tensors["losses.train"])
    if done > options.steps:
        raise ValueError(f"losses.train must have at most the {options.steps} steps of the run, got {done}")
    for name, tensor in tensors.items():
        if name.startswith("optimizer.step.") and tensor.item() != done:
            raise ValueError(f"{name} must be {done}, the number of losses.train, got {tensor.item():g}")
        if name.startswith("optimizer.exp_avg_sq.") and (tensor < 0).any():
            raise ValueError(f"{name} must not be negative, got {tensor.min().item():g}")


def load(run: Path) -> State:
    """The state that ``pyattn train`` left in the folder ``run``.

    Raises:
        InputError: there is no state, or it is not as :func:`save` wrote it.
    """
    path = run / STATE
    try:
        with stored.named(RULE, path):
            facts, tensors = stored.read(path, "options", "text")
            if "shards" in facts:
                from pyattn.cli.train import checkpoint_shards  # needs torch.distributed, which one process does not

                tensors |= checkpoint_shards.load(run, facts["shards"])
            defaults = training_options.defaults()
            options = stored.fields(facts, "options", described(argparse.Namespace(**defaults)))
            options = defaults | options | {name: Path(options[name]) for name in PATHS if options[name] is not None}
            named = argparse.Namespace(**options)
            training_options.check(named)
            _check(named, tensors)
            return State(path, named, facts["text"], tensors)
    except FileNotFoundError as error:
        raise InputError(RULE, path) from error
