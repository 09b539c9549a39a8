"""The options of ``pyattn train``: their meanings, their limits, and which of them a command line gave."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from pyattn.cli import InputError
from pyattn.cli.checks import at_least, check_memory, check_positive
from pyattn.cli.generate import sampling
from pyattn.cli.gpt import ATTENTIONS, Config
from pyattn.cli.options import DEVICES, Command
from pyattn.cli.train.one_process import OPTIONS as OF_RANKS
from pyattn.options import UNBOUNDED

PRODUCTS = ("float32", "bfloat16")
CHOICES: dict[str, Iterable[str]] = {"attention": ATTENTIONS, "device": DEVICES, "dtype": PRODUCTS}

MOST_LR = 1e37
"""AdamW's first step divides the learning rate by 1 - 0.9, and float32's largest number is 3.4e38."""

PROMPT = 64
"""Bytes of validation text that the sample continues, at most a quarter of the
context: a line or two, enough to see its kind."""


def parser(about: str | None = None) -> Command:
    """The options with their defaults; ``about``: the command's description in --help.

    The defaults reached the lowest loss among configurations of equal cost (two minutes on two Zen 4 cores): 1.8 nats
    per byte with 2 layers; 4 layers stayed at 2.3, with 1100 steps of 4 windows and with 550 of 8.
    """
    made = Command("train", about)
    model = made.add_argument_group("model")
    for name, meaning in {
        "layers": "number of blocks",
        "heads": "attention heads in each block",
        "width": "features of a token, a multiple of heads",
        "context": "bytes the model can see",
        "dropout": "probability of dropping a weight or an output",
    }.items():
        made.option(name, getattr(Config, name), meaning, to=model)
    made.window(model)
    model.add_argument("--sinks", action="store_true", help="add a learned sink to each head's softmax")
    model.add_argument(
        "--alibi", action="store_true", help="ALiBi in place of learned positions, which end at the context"
    )
    made.option("attention", "pyattn", "implementation of attention", to=model, choices=ATTENTIONS)

    training = made.add_argument_group("training")
    training.add_argument("--data", type=Path, help="text file or folder; default: Python's standard library")
    made.option("steps", 2400, "optimiser steps, including those of a resumed run", at_least(1), training)
    made.option("batch", 4, "windows of context bytes per step", at_least(1), training)
    rates = "reached after a twentieth of the steps, then cosine decay to nearly 0"
    check_lr = partial(check_positive, most=MOST_LR, zero=False)
    made.option("lr", 5e-3, f"highest learning rate: {rates}", check_lr, training)
    made.option("eval-every", 200, "steps from one validation to the next", at_least(1), training)
    made.place("where to train", training)
    made.option("dtype", "float32", "dtype of matrix products (bfloat16: autocast)", to=training, choices=PRODUCTS)
    training.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="continue the run in this folder, from its end or, if it was cut off, its last validation. The run's own "
        "options apply and can't be given here, except --steps: with another number, further steps have the learning "
        "rates of a run planned with that many steps (the rate of a finished run rises again), and everything else "
        "continues to the bit; default: begin a run",
    )

    across = made.add_argument_group(
        "several processes", "torchrun --nproc-per-node N -m pyattn train ..., where N is the product of these"
    )
    made.option("data-parallel", 1, "ranks that share each batch", at_least(1), across)
    made.option("context-parallel", 1, "ranks that share the positions of each window", at_least(1), across)
    made.option("tensor-parallel", 1, "ranks that share the heads and features of each block", at_least(1), across)

    output = made.add_argument_group("output")
    output.add_argument("--out", type=Path, help="folder to write; default: a new one in runs/, named by the time")
    output.add_argument("--overwrite", action="store_true", help="replace an earlier run's files in --out")
    made.option("sample", 400, "bytes to generate at the end", at_least(0), output)
    made.sampling(" of weights, batches, dropout and sample", output)
    return made


def given(argv: Sequence[str]) -> set[str]:
    """The names of the options in ``argv``."""
    unset = dict.fromkeys(defaults(), object())
    found = vars(parser().parse_args(argv, argparse.Namespace(**unset)))
    return {name for name, value in unset.items() if found[name] is not value}


def defaults() -> dict[str, Any]:
    """The options' values where none is given; None stands for a path."""
    return vars(parser().parse_args([]))


def config_of(options: argparse.Namespace) -> Config:
    """The model configuration that the options describe."""
    given = {field.name: getattr(options, field.name, field.default) for field in fields(Config)}
    return Config(**given | {"window": tuple(options.window)})


def sizes(options: argparse.Namespace) -> list[int]:
    """How many ranks share each axis of the mesh."""
    return [getattr(options, name) for name in OF_RANKS]


def prompt_size(options: argparse.Namespace) -> int:
    """Number of bytes that the sample continues."""
    quarter: int = options.context // 4
    return max(1, min(PROMPT, quarter))


def check(options: argparse.Namespace) -> None:
    """Raise InputError for the first invalid value; :class:`Config` checks the model's."""
    for name, choices in CHOICES.items():
        if getattr(options, name) not in choices:
            raise InputError(f"--{name} must be one of {', '.join(choices)}", getattr(options, name))
    parser().check(options)
    extras = tuple(options.window) != UNBOUNDED or options.sinks or options.alibi
    if options.attention == "sdpa" and extras:
        raise InputError("--window, --sinks and --alibi need another --attention", options.attention)
    several = sizes(options) != [1] * len(OF_RANKS)
    if options.attention != "pyattn" and (options.context_parallel > 1 or (options.dropout and several)):
        rule = "--context-parallel, and --dropout on several ranks, need --attention pyattn"
        raise InputError(rule, options.attention)
    if options.heads % options.tensor_parallel:
        raise InputError(
            "--heads must be a multiple of --tensor-parallel", f"{options.heads} and {options.tensor_parallel}"
        )
    config = config_of(options)
    windows = options.batch * options.context * 4 * (config.vocab + config.width * config.layers)
    # Weights, gradients and AdamW's two moments; logits, and each block's output to the residual stream.
    check_memory("training", 16 * config.weights + windows, options.device)
    sampling.check_caches("--sample", config, prompt_size(options), options.sample, options.device)
